"""Random number generators and their states as plain data: those of the process, and those in other objects.

A state consists of numbers, bytes, lists and dicts: ``torch.load(weights_only=True)`` can read it, ``==`` can compare
it, and a worker process can send it.
"""

from __future__ import annotations

import dis
import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from functools import cache, partial
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from trainer.packages import is_users_module
from trainer.state import generator_memory, generators
from trainer.state.attributes import AttributeChanges, is_watched
from trainer.state.containers import CONTAINERS, items_of

Generator = generators.RandomGenerator | AttributeChanges
State = dict[str, Any]

_GLOBAL: dict[str, Generator] = {
    "python": vars(random)["getstate"].__self__,
    "numpy": vars(np.random)["get_state"].__self__,
    "torch": torch.default_generator,
}
"""The generators of the process, used by ``random.random``, ``np.random.rand`` and ``torch.rand``."""

_MAX_OBJECTS = 10_000
"""Largest number of objects that :func:`find` inspects."""
_MAX_ITEMS = 1000
"""Containers with more items than this are data, and :func:`find` does not inspect them."""
_OF_LOADERS = frozenset(vars(DataLoader[Any](Dataset())))
"""Attributes of a DataLoader that torch sets."""
_PLAIN = {str, bytes, int, float, bool, type(None)}
_TYPES_WITHOUT_GENERATORS = (*_PLAIN, type, ModuleType, torch.Tensor, np.ndarray)
_PARTS_OF_A_RUN = ("trainer", "lightning", "pytorch_lightning")
"""Packages with objects that :func:`find` does not enter if they are global variables, such as a Trainer."""


def capture(device: torch.device | None = None, own: Sequence[Generator] = ()) -> State:
    """Return the current states of the process's generators.

    Args:
        device: device with a generator to include. Default: None, only the host's. The state of a GPU generator is on
            the host, too: no synchronization.
        own: additional generators to include. Default: none.

    Returns:
        Plain data, about 10 KB. Takes about 5 microseconds.
    """
    state: State = {name: state_of(generator) for name, generator in _GLOBAL.items()}
    if own:
        state["own"] = states_of(own)
    if device is not None and device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore(state: State, device: torch.device | None = None, own: Sequence[Generator] = ()) -> None:
    """Restore the generators.

    Args:
        state: the result of :func:`capture`, or a part of it. Generators that are not in it stay unchanged.
        device: device with a generator to restore. Default: None, only the host's.
        own: the generators given to :func:`capture`. Default: none.
    """
    for name in _GLOBAL.keys() & state.keys():
        set_state(_GLOBAL[name], state[name])
    set_states(own, state.get("own", []))
    if device is not None and device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


class Watch:
    """Detects which of the process's generators have been used. Costs less than :func:`capture`.

    Args:
        own: additional generators to watch. Default: none.
    """

    def __init__(self, own: Sequence[Generator] = ()) -> None:
        self._readers = {name: _reader_of(generator) for name, generator in _GLOBAL.items()}
        if own:
            readers = [_reader_of(generator) for generator in own]
            self._readers["own"] = lambda: [read() for read in readers]
        self._seen = {name: read() for name, read in self._readers.items()}

    def changes(self) -> State:
        """Return the states that have changed since the last call. :func:`decoded` converts them to plain data."""
        changes: State = {}
        for name, read in self._readers.items():
            if (seen := read()) != self._seen[name]:
                self._seen[name] = changes[name] = seen
        return changes


def decoded(changes: State) -> State:
    """Convert the result of :meth:`Watch.changes` to the format of :func:`capture`. Returns a new dict."""
    read = generator_memory.decoded
    return {name: list(map(read, state)) if name == "own" else read(state) for name, state in changes.items()}


@contextmanager
def isolated() -> Iterator[None]:
    """Restore the process's generators on the host at the end of a ``with`` block."""
    state = capture()
    try:
        yield
    finally:
        restore(state)


def derived(state: State, number: int) -> State:
    """Return random states for an additional process, which depend only on ``state`` and the process's ``number``."""
    seed = hashlib.sha256(f"{number} {sorted(state.items())!r}".encode()).digest()
    fresh: dict[str, Generator] = {
        "python": random.Random(seed),
        "numpy": np.random.RandomState(list(seed)),
        "torch": torch.Generator().manual_seed(int.from_bytes(seed[:8], "big") - 2**63),
    }
    return {name: state_of(generator) for name, generator in fresh.items()}


def state_of(generator: Generator) -> Any:
    """Return the state of one generator."""
    return generator_memory.decoded(_reader_of(generator)())


def set_state(generator: Generator, state: Any) -> None:
    """Restore a state that :func:`state_of` returned."""
    if isinstance(generator, AttributeChanges):
        generator.write(state)
    else:
        generators.set_state(generator, state)


def states_of(own: Sequence[Generator]) -> list[Any]:
    """Return the state of each generator."""
    return [state_of(generator) for generator in own]


def set_states(own: Sequence[Generator], states: Sequence[Any]) -> None:
    """Restore the state of each generator. No-op if the number of random generators has changed."""
    if _count(own) == len(states) - len(_attributes_in(states)):
        for generator, state in zip(own, states, strict=False):
            set_state(generator, state)


def differences(own: Sequence[Generator], states: Sequence[Any]) -> list[str]:
    """Return the reasons why :func:`set_states` cannot restore the generators of a dataloader; empty if it can.

    Args:
        own: as :func:`find` returns them.
        states: the result of :func:`states_of`. Older checkpoints have no states of :class:`AttributeChanges`.
    """
    attributes = _attributes_in(states)
    saved, current = len(states) - len(attributes), _count(own)
    if saved != current:
        return [f"the dataloader had {saved} random generators and has {current}"]
    watched = next((generator for generator in own if isinstance(generator, AttributeChanges)), AttributeChanges([]))
    missing = [name for state in attributes for name in watched.missing(state)]
    if missing:
        return [f"attributes of {', '.join(missing)} had changed, and the data has another number of these objects now"]
    return []


def _count(own: Sequence[Generator]) -> int:
    """Return the number of random generators."""
    return sum(not isinstance(generator, AttributeChanges) for generator in own)


def _attributes_in(states: Sequence[Any]) -> list[Any]:
    return [state for state in states if AttributeChanges.has_read(state)]


def find(*roots: Any, except_in: Any = None, unwatched: Callable[[Any], bool] = lambda _: False) -> list[Generator]:
    """Return the generators that can be reached from ``roots``, each once.

    The search follows attributes, containers and, in the user's code, attributes of classes and the variables that
    functions read: their defaults, those of enclosing functions, and global ones. The last item is the
    :class:`AttributeChanges` of the inspected objects of the user's classes and of the objects that hold a generator,
    if there are any.

    Args:
        roots: the objects to begin with; their order, and that of their attributes, determines the order of the result.
        except_in: an object to exclude, with its attributes. Default: None.
        unwatched: returns whether to exclude an object, and all objects in it, from the :class:`AttributeChanges`. Not
            called for torch's DataLoader. Default: no object is excluded.
    """
    found: list[Generator] = []
    watched: list[Any] = []
    holders: list[Any] = []
    classes: set[type] = set()
    seen = {id(except_in), *map(id, _GLOBAL.values())}
    queue = deque((root, True) for root in roots)
    while queue and len(seen) < _MAX_OBJECTS:
        value, is_data = queue.popleft()
        if id(value) in seen or isinstance(value, _TYPES_WITHOUT_GENERATORS):
            continue
        seen.add(id(value))
        children = items_of(value, _MAX_ITEMS)
        if generators.is_random(value):
            found.append(value)
        elif isinstance(value, FunctionType):
            children = _variables_of(value)
        elif isinstance(value, MethodType):
            children = [value.__self__, value.__func__]
        elif isinstance(value, partial):
            children = [value.func, value.args, value.keywords]
        elif type(value) not in CONTAINERS:
            children += _attributes_of(value)
            if is_data and is_watched(value) and not unwatched(value):
                watched.append(value)
            else:  # the objects of a module or a framework are not part of the data
                is_data = is_data and isinstance(value, DataLoader)
                if isinstance(getattr(value, "__dict__", None), dict) and any(map(generators.is_random, children)):
                    holders.append(value)
            if type(value) not in classes:
                classes.add(type(value))
                queue.extend((child, False) for child in _attributes_of_classes(type(value)))
        queue.extend((child, is_data) for child in children if type(child) not in _PLAIN)
    return [*found, AttributeChanges(watched, holders, ignored=_of_torch)] if watched or holders else found


def _of_torch(value: Any) -> Set[str]:
    """Return the attributes that torch sets on an object of a user's subclass of DataLoader."""
    return _OF_LOADERS if isinstance(value, DataLoader) and is_watched(value) else frozenset()


def _attributes_of(value: Any) -> list[Any]:
    try:
        attributes = object.__getattribute__(value, "__dict__")  # bypasses a proxy's attribute access
    except AttributeError:
        attributes = {}
    found = list(attributes.values()) if isinstance(attributes, dict) else []
    kind: Any = type(value)
    for slot in _slots_of(kind):
        with suppress(AttributeError):
            found.append(slot.__get__(value))
    return found


@cache
def _slots_of(kind: type) -> list[Any]:
    slotted = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return [slot for own in slotted for slot in own.values() if isinstance(slot, MemberDescriptorType)]


def _attributes_of_classes(kind: type) -> list[Any]:
    """Return the functions and other attributes of a class and its bases, as far as they are the user's."""
    own = [value for base in kind.__mro__ if is_users_module(base.__module__) for value in vars(base).values()]
    return [value.fget if isinstance(value, property) else getattr(value, "__func__", value) for value in own]


def _variables_of(function: FunctionType) -> list[Any]:
    """Return the variables that a function of the user reads and does not assign."""
    names = function.__globals__
    if not is_users_module(names.get("__name__", "")):
        return []
    found = [names[name] for name in _globals_in(function.__code__) if name in names]
    found = [value for value in found if type(value).__module__.partition(".")[0] not in _PARTS_OF_A_RUN]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it has no value yet
            found.append(cell.cell_contents)
    return [*found, function.__defaults__, function.__kwdefaults__, vars(function).get("__wrapped__")]


@cache
def _globals_in(code: CodeType) -> list[str]:
    """Return the names of the global variables that a function reads, also in functions inside of it."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _globals_in(constant)]
    return [one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")] + inner


def _reader_of(generator: Generator) -> Callable[[], Any]:
    return generator.read if isinstance(generator, AttributeChanges) else generators.reader_of(generator)
