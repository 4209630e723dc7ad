"""Random number generators and their states as plain data: those of the process, and those in other objects.

A state consists of numbers, bytes, lists and dicts: ``torch.load(weights_only=True)`` can read it, ``==`` can compare
it, and a worker process can send it.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from trainer.common.packages import is_users_module
from trainer.state import generators
from trainer.state.snapshot import STATELESS, Rules, Snapshot

Generator = generators.RandomGenerator | Snapshot
State = dict[str, Any]

_GLOBAL: dict[str, generators.RandomGenerator] = {
    "python": generators.OF_PROCESS[0],
    "numpy": generators.OF_PROCESS[1],
    "torch": torch.default_generator,
}
"""The generators of the process, used by ``random.random``, ``np.random.rand`` and ``torch.rand``."""

_DATASETS, _SAMPLERS = 2**10, 2**20
"""Largest number of numbers in an attribute. Those of datasets are read after each batch of a worker, and larger ones
are part of the data. Weights and indices of samplers may change, and workers do not read them."""
_OF_LOADERS = frozenset(vars(DataLoader[Any](Dataset())))
"""Attributes of a DataLoader that torch sets."""


def capture(device: torch.device | None = None, objects: Sequence[Generator] = ()) -> State:
    """Return the current states of the process's generators.

    Args:
        device: device with a generator to include. Default: None, only the host's. The state of a GPU generator is on
            the host, too: no synchronization.
        objects: additional generators to include. Default: none.

    Returns:
        Plain data, about 10 KB. Takes about 60 microseconds, most of them for NumPy.
    """
    state: State = {name: state_of(generator) for name, generator in _GLOBAL.items()}
    if objects:
        state["own"] = states_of(objects)
    if device is not None and device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore(state: State, device: torch.device | None = None, objects: Sequence[Generator] = ()) -> None:
    """Restore the generators.

    Args:
        state: the result of :func:`capture`, or a part of it. Generators that are not in it stay unchanged.
        device: device with a generator to restore. Default: None, only the host's.
        objects: the generators given to :func:`capture`. Default: none.
    """
    for name in _GLOBAL.keys() & state.keys():
        set_state(_GLOBAL[name], state[name])
    set_states(objects, state.get("own", []))
    if device is not None and device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


class Watch:
    """Detects which of the process's generators have been used.

    Args:
        objects: additional generators to watch. Default: none.
    """

    def __init__(self, objects: Sequence[Generator] = ()) -> None:
        self._own = objects
        self._seen = capture(objects=objects)

    def changes(self) -> State:
        """Return the states that have changed since the last call, in the format of :func:`capture`."""
        before, self._seen = self._seen, capture(objects=self._own)
        return {name: state for name, state in self._seen.items() if state != before[name]}


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
    """Return the state of one generator, or the changes of a snapshot."""
    return generator.read() if isinstance(generator, Snapshot) else generators.state_of(generator)


def set_state(generator: Generator, state: Any) -> None:
    """Restore a state that :func:`state_of` returned."""
    if isinstance(generator, Snapshot):
        generator.write(state, resets=True)
    else:
        generators.set_state(generator, state)


def states_of(objects: Sequence[Generator]) -> list[Any]:
    """Return the state of each generator and snapshot."""
    return [state_of(generator) for generator in objects]


def set_states(objects: Sequence[Generator], states: Sequence[Any]) -> None:
    """Restore the state of each generator and snapshot. Objects that do not exist any more are left out."""
    for generator, state in zip(objects, states, strict=False):
        set_state(generator, state)


def without_generators(state: State) -> State:
    """Return the state of a snapshot without random generators."""
    return {path: entry for path, entry in state.items() if ":state" not in entry[1]}


def differences(objects: Sequence[Generator], states: Sequence[Any]) -> list[str]:
    """Return the reasons why :func:`set_states` cannot restore the objects of a dataloader; empty if it can.

    Samplers of torch are excluded, because only their epoch changes, which ``set_epoch`` sets.

    Args:
        objects: as :func:`find` returns them.
        states: the result of :func:`states_of`.
    """
    snapshot = objects[0] if objects else Snapshot()
    assert isinstance(snapshot, Snapshot)
    missing = [name for state in states for name in snapshot.missing(state)]
    missing = [name for name in missing if not re.fullmatch(r"torch\..*Sampler", name)]
    if not missing:
        return []
    return [f"{', '.join(missing)} of the data had changed, and the data has another number of these objects now"]


def find(*roots: Any, except_in: Any = None, unwatched: Callable[[Any], bool] = lambda _: False) -> list[Generator]:
    """Return the snapshot of the objects of a dataloader, which includes random generators, or [] if it has no objects.

    The walk follows attributes, containers, bound methods and ``functools.partial``. The attributes of datasets,
    samplers and objects of the user's classes are part of the state. Of other objects, only the generators are.

    Args:
        roots: the objects to begin with. Their order is part of the paths.
        except_in: an object to exclude, with its attributes. Default: None.
        unwatched: returns whether the attributes of an object, and of all objects in it, are not part of the state. The
            objects in a DataLoader are. Default: no object is excluded.
    """

    def is_part(value: Any) -> bool:
        return is_watched(value) and not unwatched(value)

    def ignored(value: Any) -> Set[str] | None:
        if isinstance(value, DataLoader):
            return _OF_LOADERS if is_part(value) else vars(value).keys()
        return frozenset() if is_part(value) else None

    rules = Rules(ignored, limit=lambda holder: _SAMPLERS if isinstance(holder, Sampler) else _DATASETS, of_data=True)
    objects = {str(number): root for number, root in enumerate(roots)}
    snapshot = Snapshot(objects, rules, [except_in, *_GLOBAL.values()])
    return [snapshot] if snapshot else []


def is_watched(value: Any) -> bool:
    """Return whether the attributes of an object are part of the state of the data.

    This is true for datasets, samplers and objects of the user's classes, including subclasses of DataLoader, but not
    for modules and parts of a framework.
    """
    is_excluded = isinstance(value, (nn.Module, type)) or type(value) is DataLoader
    if is_excluded or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    return all(_is_users(base) for base in type(value).__mro__)


@cache
def _is_users(base: type) -> bool:
    root = base.__module__.partition(".")[0]
    if root == "trainer":  # its state is stored elsewhere
        return False
    if issubclass(base, (Dataset, Sampler)) or base in STATELESS or base is DataLoader:
        return True
    return base.__module__ == "collections.abc" or is_users_module(base.__module__)
