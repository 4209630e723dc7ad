"""The attributes and random generators of the user's modules, datamodule and callbacks, and of the objects in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.errors import join_first
from trainer.packages import is_users_module
from trainer.state import generators
from trainer.state.attributes import ABSTRACT, AttributeChanges
from trainer.state.containers import items_of
from trainer.state.module_numbers import ModuleNumbers
from trainer.state.outside_modules import OutsideModules
from trainer.state.plain_values import Limits, memory_of

_PLAIN = {str, bytes, int, float, complex, bool, type(None), Tensor, nn.Parameter}
_LIMITS = Limits(items=2**22, elements=2**22, is_data=False)
_MAX_OBJECTS = 20_000
"""Largest number of objects that are inspected."""
_MAX_ITEMS = 1000
"""Containers with more items than this are not inspected."""
_HOOKS = {("on_save_checkpoint", "on_load_checkpoint"), ("get_extra_state", "set_extra_state")}
"""A class of the user that defines both methods of a pair saves itself, with the objects in its attributes."""
_STATE = ("state_dict", "load_state_dict")
"""Another such pair, for objects that the Trainer saves. For a module, it saves the weights."""
_STATEFUL = (Optimizer, LRScheduler, GradScaler)
_SAVED_BY_OTHERS = ("lightning.", "trainer.", "torch.distributed.")
"""Packages with subclasses of these types that wrap the Trainer's objects, or run collectives in ``state_dict``."""


class ProgramState:
    """Random generators, and attributes of objects that changed since this instance was created.

    Their state is saved and restored as plain data. The search for objects follows containers, submodules, and the
    attributes of the user's classes.

    Args:
        roots: the module, the datamodule and the callbacks. Their order determines the order of the state.
        is_base: returns whether a class of the user may have a class of another package as a base. Default: none.
        ignored: returns the attributes of an object that its bases set, or that are saved elsewhere. Default: none.
        packages: installed packages whose classes are the user's, too. Default: none.
        saved: objects that are saved elsewhere, such as the Trainer's optimizers and schedules. Default: none.
        of_modules: attributes that every module has, which are saved elsewhere. Default: none.

    Attributes:
        module_numbers: the numbers in attributes of modules of other packages.
        stateful: optimizers, schedules and loss scalers that were found, and are not saved elsewhere.
        outside_modules: the weights of modules that were found outside of the module's tree.
    """

    def __init__(
        self,
        roots: Sequence[Any] = (),
        *,
        is_base: Callable[[type], bool] = lambda _: False,
        ignored: Callable[[Any], Set[str]] = lambda _: frozenset(),
        packages: Set[str] = frozenset(),
        saved: Collection[Any] = (),
        of_modules: Set[str] = frozenset(),
    ) -> None:
        self._generators: list[generators.RandomGenerator] = []
        self.stateful: list[Any] = []
        owned = set(map(id, saved))
        modules = [root for root in roots if isinstance(root, nn.Module)]
        inside = {id(part) for module in modules for part in module.modules()}
        watched: list[Any] = []
        outside: list[nn.Module] = []
        others: list[nn.Module] = []
        seen: set[int] = set()
        queue = deque(roots)
        while queue and len(seen) < _MAX_OBJECTS:
            value = queue.popleft()
            if id(value) in seen or type(value) in _PLAIN:
                continue
            seen.add(id(value))
            if generators.is_random(value):
                self._generators.append(value)
            elif isinstance(value, nn.Module):
                queue.append(vars(value).get("_modules"))  # a scripted module has none
                outside += [value] * (id(value) not in inside)
            queue.extend(items_of(value, _MAX_ITEMS))
            kind: type = type(value)
            if isinstance(value, _STATEFUL) and id(value) not in owned:
                self.stateful += [value] * (not kind.__module__.startswith(_SAVED_BY_OTHERS))
            if not _is_to_be_saved(kind, is_base, packages):
                others += [value] * (isinstance(value, nn.Module) and not _saves_itself(kind, packages))
                continue
            not_own = ignored(value)
            queue.extend(one for name, one in vars(value).items() if name not in not_own)
            watched.append(value)

        def elsewhere() -> Set[int]:
            return memory_of(one for part in modules for one in (*part.parameters(), *part.buffers()))

        self.outside_modules = OutsideModules(outside, elsewhere() if outside else frozenset())
        self.module_numbers = ModuleNumbers(others, of_modules)
        self._attributes = AttributeChanges(
            watched,
            limits=_LIMITS,
            ignored=ignored,
            max_objects=_MAX_OBJECTS,
            elsewhere=elsewhere,
        )

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return ProgramState, ()  # a spawned process begins its own

    def read(self) -> list[Any]:
        """Return the states of the random generators and, as the last item, the changed attributes."""
        return [*map(generators.state_of, self._generators), self._attributes.read()]

    @contextmanager
    def as_in(self, state: list[Any]) -> Iterator[None]:
        """Return a context with a state of :meth:`read`.

        Its exit restores the random generators, and the attributes that have not changed inside.
        """
        before = [*map(generators.state_of, self._generators)]
        self.write(state)
        written = self._attributes.read()
        try:
            yield
        finally:
            for generator, own in zip(self._generators, before, strict=True):
                generators.set_state(generator, own)
            self._attributes.undo(written)

    def write(self, state: list[Any]) -> list[str]:
        """Restore the state that :meth:`read` returned, and return a message for each part that is not restored.

        If an attribute of an object cannot be restored, the object keeps all its attributes, because they may belong
        together. Objects that do not exist any more are left out.

        Args:
            state: the state. [] leaves everything unchanged.
        """
        if not state:
            return []
        *saved, attributes = state
        problems = []
        if len(saved) == len(self._generators):
            for generator, own in zip(self._generators, saved, strict=True):
                generators.set_state(generator, own)
        else:
            problems.append(
                f"The modules and callbacks had {len(saved)} random generators, and have {len(self._generators)} now:"
                " these are not restored."
            )
        changed, lost_in = self._attributes, self._attributes.lost
        attributes = [entry for entry in attributes if entry[0] in changed.names]
        if lost := sorted(set(lost_in(attributes))):
            problems.append(
                f"The checkpoint lacks attributes that its run changed: {join_first(lost, 5)}. These objects start with"
                " their initial attributes. If the training depends on them, save and load them in"
                " `on_save_checkpoint` and `on_load_checkpoint`; register large tensors as buffers."
            )
        if missing := changed.missing(attributes):
            problems.append(
                f"The attributes of {join_first(missing, 5)} are not restored: there is another number of these objects"
                " now."
            )
        changed.write([[name, {} if lost_in([[name, own]]) else own] for name, own in attributes])
        return problems


@cache
def _is_to_be_saved(kind: type, is_base: Callable[[type], bool], packages: Set[str]) -> bool:
    """Return whether the attributes of the objects of a class are saved.

    The class must be the user's, have a ``__dict__`` and no other bases than ``is_base`` allows, and not save itself.
    """
    own, others = _bases(kind, packages)
    return bool(own and kind.__dictoffset__ and all(map(is_base, others)) and not _saves_itself(kind, packages))


@cache
def _saves_itself(kind: type, packages: Set[str]) -> bool:
    """Return whether a class of the user defines a pair of methods that the Trainer calls to save it."""
    own, others = _bases(kind, packages)
    is_saved_by_trainer = not issubclass(kind, nn.Module) and (others or hasattr(kind, "__iter__"))
    pairs = {*_HOOKS, _STATE} if is_saved_by_trainer else _HOOKS
    return any(all(any(name in vars(base) for base in own) for name in pair) for pair in pairs)


def _bases(kind: type, packages: Set[str]) -> tuple[list[type], set[type]]:
    """Return the bases of a class that are the user's, and those of other packages, except the ones without a state."""
    own = [base for base in kind.__mro__ if is_users_module(base.__module__) or package_of(base) in packages]
    others = {base for base in kind.__mro__ if base not in own and not base.__module__.startswith("torch.distributed.")}
    return own, others - ABSTRACT


def package_of(kind: type) -> str:
    """Return the top-level package of a class."""
    return kind.__module__.partition(".")[0]
