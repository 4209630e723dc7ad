"""Save and restore attributes of the user's objects that change during a run, as plain data.

The epoch that a sampler counts, the position that a dataset keeps, or a weight of a loss that a module anneals affects
the rest of a run, as the state of a random generator does. A checkpoint therefore stores the attributes that have
changed since the run began.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import cache, cached_property
from io import IOBase
from typing import Any, Generic, Protocol

from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from trainer.packages import is_users_module
from trainer.state import generators, plain_values
from trainer.state.plain_values import Copier, Limits

_DATASETS = Limits(items=64, elements=4096)
"""For data. Larger values are part of the data."""
_SAMPLERS = Limits(items=2**14, elements=2**20)
"""Weights and indices of samplers may change, and workers do not read them."""
_MAX_OBJECTS = 200
_SAVED_ELSEWHERE = (*plain_values.NUMBERS, *generators.KINDS)
"""An attribute that is still the same object of one of these types is unchanged: generators are saved by themselves."""
_LOST = ["lost"]
"""Stands for a value that cannot be restored."""
ABSTRACT: set[Any] = {object, ABC, Generic, Protocol}
"""Base classes without a state."""


class AttributeChanges:
    """The changes of the attributes of some objects since this instance was created.

    The changed attributes of an object are restored if they are plain values: numbers, strings, short containers of
    them, small tensors and arrays, and random generators that were created in the meantime. If another attribute has
    changed, the object's ``state_dict`` and ``load_state_dict`` are used instead, if it has both. An iterator counts as
    changed, except in data: its position cannot be read.

    Args:
        objects: the objects to watch.
        holders: objects of other packages, of which only the random generators are watched. Default: none.
        limits: which values are copied. Default: None, the limits for data and samplers.
        ignored: returns the attributes of an object that are not watched. Default: none are ignored.
        max_objects: largest number of watched objects. Default: 200.
        elsewhere: returns the memory of tensors that are saved elsewhere, such as weights. Default: none.

    Attributes:
        names: the name of the class of each object.
    """

    def __init__(
        self,
        objects: Sequence[Any],
        holders: Sequence[Any] = (),
        *,
        limits: Limits | None = None,
        ignored: Callable[[Any], Set[str]] = lambda _: frozenset(),
        max_objects: int = _MAX_OBJECTS,
        elsewhere: Callable[[], Set[int]] = frozenset[int],
    ) -> None:
        self._objects = list(objects)[:max_objects]
        self._watched = len(self._objects)
        self._objects += holders
        self._ignored = list(map(ignored, self._objects))
        self.names = list(map(_class_name, self._objects))
        self._values = list(map(self._attributes, range(len(self._objects))))
        for values in self._values[self._watched :]:
            for name in [name for name, value in values.items() if not generators.is_random(value)]:
                del values[name]
        self._kinds = Copier(limits or _SAMPLERS, elsewhere), Copier(limits or _DATASETS, elsewhere)
        self._copiers = [self._kinds[not isinstance(one, Sampler)] for one in self._objects]
        self._are_data = limits is None
        self._first = [
            {name: copier.copy(value) for name, value in values.items()}
            for values, copier in zip(self._values, self._copiers, strict=True)
        ]

    def read(self) -> list[Any]:
        """Return the changes of each object, as data that :meth:`write` accepts.

        An entry is a list of two items: the name of the object's class, and the changes. The changes are a dict of
        values by attribute, with ``["lost"]`` for a value that cannot be restored, or a list with the object's own
        state.
        """
        for copier in self._kinds:
            copier.begin()
        numbers: dict[int, int] = {}  # of the new random generators, which several attributes may share
        return [[name, self._changes(place, numbers)] for place, name in enumerate(self.names)]

    def write(self, state: list[Any]) -> None:
        """Restore the values that :meth:`read` returned. Attributes that it did not return get their first value.

        Objects of a class stay unchanged if the saved run had another number of them.
        """
        saved_of = _by_class(state)
        created: dict[int, Any] = {}
        for name, places in self._places().items():
            if len(saved_of.get(name, [])) == len(places):
                for place, saved in zip(places, saved_of[name], strict=True):
                    self._restore(place, saved, created)

    def undo(self, written: list[Any]) -> None:
        """Undo :meth:`write`, except for attributes that have changed since.

        Args:
            written: the result of :meth:`read` after the call of :meth:`write`.
        """
        self.write([[name, _newer(now, old)] for (name, now), (_, old) in zip(self.read(), written, strict=True)])

    def missing(self, state: list[Any]) -> list[str]:
        """Return the classes that have a changed object in ``state``, and a different number of objects now.

        Samplers of torch are excluded, because only their epoch changes, which ``set_epoch`` sets.
        """
        changed = {name: changes for name, changes in _by_class(state).items() if any(changes)}
        return [
            name
            for name, changes in changed.items()
            if len(changes) != self.names.count(name) and not (name.startswith("torch.") and name.endswith("Sampler"))
        ]

    @staticmethod
    def has_read(state: Any) -> bool:
        """Return whether a state is from :meth:`read`, and not that of a random generator."""
        return isinstance(state, list) and all(isinstance(entry, list) for entry in state)

    @staticmethod
    def lost(state: Any) -> list[str]:
        """Return the attributes that a state from :meth:`read` could not include."""
        entries = state if AttributeChanges.has_read(state) else ()
        return [
            f"{kind}.{name}"
            for kind, changes in entries
            if isinstance(changes, dict)
            for name, value in changes.items()
            if value == _LOST
        ]

    def _attributes(self, place: int) -> dict[str, Any]:
        return {name: value for name, value in vars(self._objects[place]).items() if name not in self._ignored[place]}

    def _places(self) -> dict[str, list[int]]:
        """Return the positions of the objects of each class."""
        return _by_class([name, place] for place, name in enumerate(self.names))

    def _restore(self, place: int, saved: Any, created: dict[int, Any]) -> None:
        """Restore one object.

        Args:
            place: its position.
            saved: its entry in the result of :meth:`read`.
            created: the random generators that were created, by their numbers. Gets new ones.
        """
        one, first, values = self._objects[place], self._first[place], self._values[place]
        if isinstance(saved, list):
            one.load_state_dict(plain_values.value_of(saved, None))
            return
        for name in [name for name, *_ in self._changed(place) if name in first and name not in saved]:
            is_plain = not isinstance(first[name], tuple)
            vars(one)[name] = plain_values.value_of(first[name], vars(one).get(name)) if is_plain else values[name]
        for name, value in saved.items():
            kind = value[0] if isinstance(value, list) else None
            if kind == "generator":
                if value[1] not in created:
                    created[value[1]] = generators.create(value[2])
                vars(one)[name] = created[value[1]]
            elif kind == "new":  # the attribute was set to another object during the run
                vars(one)[name] = plain_values.value_of(value[1], None)
            elif value != _LOST:
                vars(one)[name] = plain_values.value_of(value, vars(one).get(name))

    def _changes(self, place: int, numbers: dict[int, int]) -> Any:
        one, values, changed = self._objects[place], self._values[place], dict[str, Any]()
        for name, value, plain in self._changed(place):
            if generators.can_create(value):
                changed[name] = ["generator", numbers.setdefault(id(value), len(numbers)), generators.state_of(value)]
            elif isinstance(plain, tuple):
                if is_watched(one) and (own := _own_state(one, self._copiers[place])) is not None:
                    return own
                changed[name] = _LOST
            else:
                is_new = isinstance(plain, list) and value is not values.get(name)
                changed[name] = plain if not is_new else ["new", plain] if plain_values.can_create(value) else _LOST
        return changed

    def _changed(self, place: int) -> Iterator[tuple[str, Any, Any]]:
        """Yield the name, the value, and the copy or identity of each changed attribute."""
        values, first, copier = self._values[place], self._first[place], self._copiers[place]
        for name, value in self._attributes(place).items():
            if name in values and value is values[name] and isinstance(value, _SAVED_ELSEWHERE):
                continue
            if place >= self._watched and not generators.is_random(value):
                continue
            plain = copier.copy(value)
            may_have_changed = not self._are_data and isinstance(plain, tuple) and _has_iterator(value)
            if name in first and plain == first[name] and not may_have_changed:
                continue
            of_class = getattr(type(self._objects[place]), name, None)
            if not isinstance(of_class, cached_property) and not (callable(of_class) and callable(value)):
                yield name, value, plain


def is_watched(value: Any) -> bool:
    """Return whether the attributes of an object are part of the state of the data.

    This is true for datasets, samplers and objects of the user's classes, including subclasses of DataLoader, but not
    for modules and parts of a framework.
    """
    if (
        isinstance(value, (nn.Module, type))
        or type(value) is DataLoader
        or not isinstance(getattr(value, "__dict__", None), dict)
    ):
        return False
    return all(_is_users(base) for base in type(value).__mro__)


def _newer(now: Any, old: Any) -> Any:
    """Return the changes of an object that leave its attributes as they are if they are not those in ``old``."""
    if isinstance(now, list) or isinstance(old, list):
        return now if now != old else {}
    return {name: _LOST for name, value in now.items() if value == _LOST or value != old.get(name, _LOST)}


def _has_iterator(value: Any) -> bool:
    """Return whether a value, or an item of a container, is an iterator with a position that cannot be read."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(one, Iterator) and not isinstance(one, IOBase) and not is_watched(one) for one in items)


@cache
def _is_users(base: type) -> bool:
    root = base.__module__.partition(".")[0]
    if root == "trainer":  # its state is stored elsewhere
        return False
    if issubclass(base, (Dataset, Sampler)) or base in ABSTRACT or base is DataLoader:
        return True
    return base.__module__ == "collections.abc" or is_users_module(base.__module__)


def _class_name(value: Any) -> str:
    """Return a name that stays the same if the class moves to another module, or FSDP wraps it."""
    kind = next(base for base in type(value).__mro__ if not base.__module__.startswith("torch.distributed."))
    return f"torch.{kind.__qualname__}" if kind.__module__.startswith("torch.") else kind.__qualname__


def _by_class(entries: Iterable[Any]) -> dict[str, list[Any]]:
    """Group the second items of the entries by their first."""
    found: dict[str, list[Any]] = {}
    for name, item in entries:
        found.setdefault(name, []).append(item)
    return found


def _own_state(value: Any, copier: Copier) -> list[Any] | None:
    """Return the state of an object that has ``state_dict`` and ``load_state_dict``, if it is plain."""
    if not all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")):
        return None
    try:
        state = copier.copy(value.state_dict())
    except Exception:  # it needs arguments, or is not ready
        return None
    return state if isinstance(state, list) else None
