"""Random number generators and their states as plain data: those of the process, and those in other objects.

A state consists of numbers, bytes, lists and dicts: ``torch.load(weights_only=True)`` can read it, ``==`` can compare
it, and a worker process can send it.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from trainer.state import generator_memory
from trainer.state.attributes import AttributeChanges, is_watched

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState | AttributeChanges
State = dict[str, Any]

_GLOBAL: dict[str, Generator] = {
    "python": vars(random)["getstate"].__self__,
    "numpy": vars(np.random)["get_state"].__self__,
    "torch": torch.default_generator,
}
"""The generators of the process, used by ``random.random``, ``np.random.rand`` and ``torch.rand``."""

_MAX_OBJECTS = 1000
"""Largest number of objects that :func:`find` inspects."""
_MAX_ITEMS = 64
"""Containers with more items than this are data, and :func:`find` does not inspect them."""
_TYPES_WITHOUT_GENERATORS = (str, bytes, int, float, type, ModuleType, FunctionType, torch.Tensor, np.ndarray)


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
    generators: dict[str, Generator] = {
        "python": random.Random(seed),
        "numpy": np.random.RandomState(list(seed)),
        "torch": torch.Generator().manual_seed(int.from_bytes(seed[:8], "big") - 2**63),
    }
    return {name: state_of(generator) for name, generator in generators.items()}


def state_of(generator: Generator) -> Any:
    """Return the state of one generator."""
    return generator_memory.decoded(_reader_of(generator)())


def set_state(generator: Generator, state: Any) -> None:
    """Restore a state that :func:`state_of` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        version, numbers, gauss = state
        generator.setstate((version, tuple(array("I", numbers)), gauss))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_with_arrays(state))
    elif isinstance(generator, AttributeChanges):
        generator.write(state)
    else:
        generator.bit_generator.state = _with_arrays(state)


def states_of(generators: Sequence[Generator]) -> list[Any]:
    """Return the state of each generator."""
    return [state_of(generator) for generator in generators]


def set_states(generators: Sequence[Generator], states: Sequence[Any]) -> None:
    """Restore the state of each generator. No-op if the number of random generators has changed."""
    if _count(generators) == len(states) - len(_attributes_in(states)):
        for generator, state in zip(generators, states, strict=False):
            set_state(generator, state)


def differences(generators: Sequence[Generator], states: Sequence[Any]) -> list[str]:
    """Return the reasons why :func:`set_states` cannot restore the generators of a dataloader; empty if it can.

    Args:
        generators: as :func:`find` returns them.
        states: the result of :func:`states_of`. Older checkpoints have no states of :class:`AttributeChanges`.
    """
    attributes = _attributes_in(states)
    saved, current = len(states) - len(attributes), _count(generators)
    if saved != current:
        return [f"the dataloader had {saved} random generators and has {current}"]
    watched = next(
        (generator for generator in generators if isinstance(generator, AttributeChanges)), AttributeChanges([])
    )
    missing = [name for state in attributes for name in watched.missing(state)]
    if missing:
        return [f"attributes of {', '.join(missing)} had changed, and the data has another number of these objects now"]
    return []


def _count(generators: Sequence[Generator]) -> int:
    """Return the number of random generators."""
    return sum(not isinstance(generator, AttributeChanges) for generator in generators)


def _attributes_in(states: Sequence[Any]) -> list[Any]:
    return [state for state in states if AttributeChanges.has_read(state)]


def find(*roots: Any, except_in: Any = None, unwatched: Callable[[Any], bool] = lambda _: False) -> list[Generator]:
    """Return the generators that can be reached from ``roots`` through attributes and short containers, each once.

    The last one is the :class:`AttributeChanges` of the inspected objects of the user's classes, if there are any.

    Args:
        roots: the objects to begin with; their order, and that of their attributes, determines the order of the result.
        except_in: an object to exclude, with its attributes. Default: None.
        unwatched: returns whether to exclude an object, and all objects in it, from the :class:`AttributeChanges`. Not
            called for a DataLoader. Default: no object is excluded.
    """
    found: list[Generator] = []
    watched: list[Any] = []
    seen = {id(except_in), *map(id, _GLOBAL.values())}
    queue = [(root, True) for root in roots]
    while queue and len(seen) < _MAX_OBJECTS:
        value, is_data = queue.pop(0)
        if id(value) in seen or value is None or isinstance(value, _TYPES_WITHOUT_GENERATORS):
            continue
        seen.add(id(value))
        children: list[Any] = []
        if isinstance(value, Generator):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            children = list(value) if len(value) <= _MAX_ITEMS else []
        elif isinstance(value, dict):
            children = list(value.values()) if len(value) <= _MAX_ITEMS else []
        elif isinstance(value, MethodType):
            children = [value.__self__]
        elif isinstance(value, partial):
            children = [value.func, value.args, value.keywords]
        else:
            children = _attributes_of(value)
            if is_data and is_watched(value) and not unwatched(value):
                watched.append(value)
            else:  # the objects of a module or a framework are not part of the data
                is_data = is_data and isinstance(value, DataLoader)
        queue += [(child, is_data) for child in children]
    return [*found, AttributeChanges(watched)] if watched else found


def _attributes_of(value: Any) -> list[Any]:
    try:
        attributes = object.__getattribute__(value, "__dict__")  # bypasses a proxy's attribute access
    except AttributeError:
        return []
    return list(attributes.values()) if isinstance(attributes, dict) else []


def _reader_of(generator: Generator) -> Callable[[], Any]:
    read = None
    if isinstance(generator, random.Random | np.random.RandomState):
        read = generator_memory.reader_of(generator)
    return read or partial(_state_of, generator)


def _state_of(generator: Generator) -> Any:
    """Return the state of a generator that cannot be read from memory."""
    if isinstance(generator, AttributeChanges):
        return generator.read()
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        version, numbers, gauss = generator.getstate()
        return [version, array("I", numbers).tobytes(), gauss]
    if isinstance(generator, np.random.RandomState):
        return generator_memory.numpy_as_bytes(generator.get_state(legacy=False))
    return generator_memory.numpy_as_bytes(generator.bit_generator.state)


def _with_arrays(state: dict[str, Any]) -> dict[str, Any]:
    """Invert ``numpy_as_bytes``."""
    kind = np.uint32 if state["bit_generator"] == "MT19937" else np.uint64

    def array_of(value: Any) -> Any:
        return np.frombuffer(value, dtype=kind) if isinstance(value, bytes) else value

    numbers = {key: array_of(value) for key, value in state["state"].items()}
    return {**{key: array_of(value) for key, value in state.items()}, "state": numbers}
