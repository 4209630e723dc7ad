"""Save and restore attributes of datasets and samplers that change during a run, as plain data.

The epoch that a sampler counts, or the position that a dataset keeps, affects the rest of a run, as the state of a
random generator does. A checkpoint therefore stores the attributes that have changed since the run began.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from trainer.module_tree import is_dense
from trainer.state import generators

_MAX_OBJECTS = 200
_MAX_ITEMS = 64
"""Containers with more items than this are data. They are compared by identity and length."""
_MAX_ELEMENTS = 4096
"""Tensors and arrays with more elements than this are data."""
_SAMPLERS = 256
"""Samplers may have this many times more: their weights and indices may change, and workers do not read them."""
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_SAVED_ELSEWHERE = (*_NUMBERS, *generators.KINDS)
"""If an attribute still is the same object of one of these types, its change, if any, is not one of the attribute."""
_LOST = ["lost"]
"""Stands for a value that cannot be restored."""
_ABSTRACT = {"builtins.object", "abc.ABC", "typing.Generic", "typing.Protocol"}


class AttributeChanges:
    """The changes of the attributes of some objects since this instance was created.

    The changed attributes of an object are restored if they are plain values: numbers, strings, short containers of
    them, small tensors and arrays, and random generators that were created in the meantime. If another attribute has
    changed, the object's ``state_dict`` and ``load_state_dict`` are used instead, if it has both.

    Args:
        objects: the objects to watch, at most 200.
        holders: objects of other packages, of which only the random generators are watched. Default: none.
    """

    def __init__(self, objects: Sequence[Any], holders: Sequence[Any] = ()) -> None:
        self._objects = list(objects)[:_MAX_OBJECTS]
        self._watched = len(self._objects)
        self._objects += holders
        self._names = list(map(_class_name, self._objects))
        self._values = [dict(vars(one)) for one in self._objects]
        for values in self._values[self._watched :]:
            for name in [name for name, value in values.items() if not generators.is_random(value)]:
                del values[name]
        self._scales = [_SAMPLERS if isinstance(one, Sampler) else 1 for one in self._objects]
        self._first = [
            {name: _plain(value, scale) for name, value in values.items()}
            for values, scale in zip(self._values, self._scales, strict=True)
        ]

    def read(self) -> list[Any]:
        """Return the changes of each object, as data that :meth:`write` accepts.

        An entry is a list of two items: the name of the object's class, and the changes. The changes are a dict of
        values by attribute, with ``["lost"]`` for a value that cannot be restored, or a list with the object's own
        state.
        """
        numbers: dict[int, int] = {}  # of the new random generators, which several attributes may share
        return [[name, self._changes(place, numbers)] for place, name in enumerate(self._names)]

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

    def missing(self, state: list[Any]) -> list[str]:
        """Return the classes that have a changed object in ``state``, and a different number of objects now.

        Samplers of torch are excluded, because only their epoch changes, which ``set_epoch`` sets.
        """
        changed = {name: changes for name, changes in _by_class(state).items() if any(changes)}
        return [
            name
            for name, changes in changed.items()
            if len(changes) != self._names.count(name) and not (name.startswith("torch.") and name.endswith("Sampler"))
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

    def _places(self) -> dict[str, list[int]]:
        """Return the positions of the objects of each class."""
        return _by_class([name, place] for place, name in enumerate(self._names))

    def _restore(self, place: int, saved: Any, created: dict[int, Any]) -> None:
        """Restore one object.

        Args:
            place: its position.
            saved: its entry in the result of :meth:`read`.
            created: the random generators that were created, by their numbers. Gets new ones.
        """
        one, first, values = self._objects[place], self._first[place], self._values[place]
        if isinstance(saved, list):
            one.load_state_dict(_value_of(saved, None))
            return
        for name in [name for name, *_ in self._changed(place) if name in first and name not in saved]:
            is_plain = not isinstance(first[name], tuple)
            vars(one)[name] = _value_of(first[name], vars(one).get(name)) if is_plain else values[name]
        for name, value in saved.items():
            if isinstance(value, list) and value[0] == "generator":
                if value[1] not in created:
                    created[value[1]] = generators.create(value[2])
                vars(one)[name] = created[value[1]]
            elif value != _LOST:
                vars(one)[name] = _value_of(value, vars(one).get(name))

    def _changes(self, place: int, numbers: dict[int, int]) -> Any:
        one, values, changed = self._objects[place], self._values[place], dict[str, Any]()
        for name, value, plain in self._changed(place):
            if generators.can_create(value):
                changed[name] = ["generator", numbers.setdefault(id(value), len(numbers)), generators.state_of(value)]
            elif isinstance(plain, tuple):
                if (own := _own_state(one)) is not None:
                    return own
                changed[name] = _LOST
            else:
                is_new = isinstance(plain, list) and value is not values.get(name)
                changed[name] = ["new", plain] if is_new else plain
        return changed

    def _changed(self, place: int) -> Iterator[tuple[str, Any, Any]]:
        """Yield the name, the value, and the copy or identity of each changed attribute."""
        one, values, first = self._objects[place], self._values[place], self._first[place]
        for name, value in vars(one).items():
            if name in values and value is values[name] and isinstance(value, _SAVED_ELSEWHERE):
                continue
            if place >= self._watched and not generators.is_random(value):
                continue
            plain = _plain(value, self._scales[place])
            if name not in first or plain != first[name]:
                yield name, value, plain


def is_watched(value: Any) -> bool:
    """Return whether the attributes of an object are part of the state of the data.

    This is true for datasets, samplers and objects of the user's classes, but not for modules and parts of a framework.
    """
    if isinstance(value, (nn.Module, type)) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    return all(_is_users(base) for base in type(value).__mro__)


@cache
def _is_users(base: type) -> bool:
    root = base.__module__.partition(".")[0]
    if root == "trainer":  # its state is stored elsewhere
        return False
    if issubclass(base, (Dataset, Sampler)) or f"{base.__module__}.{base.__qualname__}" in _ABSTRACT:
        return True
    return base.__module__ == "collections.abc" or is_users_module(base.__module__)


@cache
def is_users_module(name: str) -> bool:
    """Return whether a module is the user's: not part of Python, of an installed package, or of this one."""
    root = name.partition(".")[0]
    path = str(getattr(sys.modules.get(root), "__file__", ""))
    return not (root == "trainer" or root in sys.stdlib_module_names or "site-packages" in path)


def _class_name(value: Any) -> str:
    """Return a name that stays the same if the class moves to another of the user's modules."""
    kind = type(value)
    return f"torch.{kind.__qualname__}" if kind.__module__.startswith("torch.") else kind.__qualname__


def _by_class(entries: Iterable[Any]) -> dict[str, list[Any]]:
    """Group the second items of the entries by their first."""
    found: dict[str, list[Any]] = {}
    for name, item in entries:
        found.setdefault(name, []).append(item)
    return found


def _own_state(value: Any) -> list[Any] | None:
    """Return the state of an object that has ``state_dict`` and ``load_state_dict``, if it is plain."""
    if not all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")):
        return None
    state = _plain(value.state_dict(), _SAMPLERS if isinstance(value, Sampler) else 1)
    return state if isinstance(state, list) else None


def _plain(value: Any, scale: int = 1) -> Any:
    """Return a copy of a value as numbers, strings and lists, or a tuple that identifies it if that is not possible.

    Args:
        value: the value.
        scale: multiplies the limits of items and elements. Default: 1.
    """
    if type(value) in _NUMBERS:
        return value
    copied = _copied(value, [_MAX_ITEMS * scale], _MAX_ELEMENTS * scale)
    return (id(value), len(value) if isinstance(value, (list, dict, set)) else 0) if copied is None else copied


def _copied(value: Any, left: list[int], elements: int) -> Any:
    """Return a plain copy of a container, tensor or array.

    None if it has other contents, over ``left[0]`` items, or a tensor or array with over ``elements`` elements.
    """
    kind = type(value)
    if kind in (Tensor, np.ndarray) or isinstance(value, np.generic):
        return _numbers_of(value, elements)
    if kind not in (list, tuple, set, dict):
        return None
    left[0] -= 2 * len(value) if kind is dict else len(value)
    if left[0] < 0:
        return None
    items = [child for pair in value.items() for child in pair] if kind is dict else list(value)
    copied = [child if type(child) in _NUMBERS else _copied(child, left, elements) for child in items]
    lost = any(copy is None and child is not None for copy, child in zip(copied, items, strict=True))
    return None if lost else [kind.__name__, copied]


def _numbers_of(value: Any, elements: int) -> list[Any] | None:
    if isinstance(value, Tensor):
        if not is_dense(value) or value.device.type != "cpu" or value.numel() > elements:
            return None
        dense = value.detach().resolve_conj().resolve_neg().contiguous()
        numbers = dense.view(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), numbers]
    if value.size > elements or value.dtype.hasobject or value.dtype.names:
        return None
    return ["array", value.dtype.str, list(value.shape), value.tobytes()]


def _value_of(plain: Any, current: Any) -> Any:
    """Return the value that ``plain`` is a copy of. If possible, ``current`` is changed to it in place and returned."""
    if not isinstance(plain, list):
        return plain
    kind = plain[0]
    if kind == "new":  # the attribute was set to another object during the run
        return _value_of(plain[1], None)
    if kind == "tensor":
        dtype, shape, numbers = getattr(torch, plain[1]), plain[2], bytearray(plain[3])
        value = torch.frombuffer(numbers, dtype=torch.uint8).view(dtype) if numbers else torch.empty(0, dtype=dtype)
        return _copy_into(value.view(shape), current, lambda: current.detach().copy_(value.view(shape)))
    if kind == "array":
        array = np.frombuffer(plain[3], dtype=plain[1]).reshape(plain[2]).copy()
        if not isinstance(current, np.ndarray):
            return array[()]
        return _copy_into(array, current, lambda: np.copyto(current, array))
    items = [_value_of(child, None) for child in plain[1]]
    made: Any = dict(zip(items[::2], items[1::2], strict=True)) if kind == "dict" else _CONTAINERS[kind](items)
    if type(current) is not type(made) or kind == "tuple":
        return made
    current.clear()
    current.extend(made) if kind == "list" else current.update(made)
    return current


def _copy_into(value: Any, current: Any, copy: Callable[[], Any]) -> Any:
    """Copy ``value`` into ``current`` and return that, if type, dtype and shape are the same. Else return ``value``."""
    if type(value) is not type(current) or (value.dtype, value.shape) != (current.dtype, current.shape):
        return value
    copy()
    return current


_CONTAINERS: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set}
