"""The random states of a dataloader's worker processes: sent along with their batches, and put back in new ones.

A worker draws numbers for each sample, and is some batches ahead of the training. What its generators' states were
after the last batch that was trained only the worker could know; so each batch brings along what has changed.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from trainer.state import generators

States = dict[str, Any]
"""Of one worker: packed states by the generator's name. One that nobody has drawn from is missing."""


class Carrier:
    """A batch on its way to the main process, with the worker it comes from and what has changed there.

    Args:
        batch: what the dataloader's ``collate_fn`` returned.
        worker: the worker's index.
        changes: the states of the generators that the worker has drawn from since its batch before.
    """

    __slots__ = ("batch", "changes", "worker")

    def __init__(self, batch: Any, worker: int, changes: States) -> None:
        self.batch = batch
        self.worker = worker
        self.changes = changes

    def __reduce__(self) -> tuple[Any, ...]:
        return Carrier, (self.batch, self.worker, self.changes)

    def pin_memory(self, *device: Any) -> Carrier:
        """What the dataloader's thread asks for: the same with a batch in pinned memory."""
        batch = pin_memory(self.batch, *device)  # type: ignore[no-untyped-call]
        return Carrier(batch, self.worker, self.changes)


class WorkerRandom:
    """What runs in the workers around a dataloader's own ``worker_init_fn`` and ``collate_fn``.

    Args:
        init: the dataloader's ``worker_init_fn``.
        collate: its ``collate_fn``.
        starts: the states to go on from, by worker; who is missing starts from its seed.
    """

    def __init__(
        self, init: Callable[[int], None] | None, collate: Callable[[Any], Any], starts: dict[int, States]
    ) -> None:
        self._init = init
        self._collate = collate
        self._starts = starts
        self._worker = -1
        self._own: list[generators.Generator] = []
        self._last: dict[str, Any] = {}

    def start(self, worker: int) -> None:
        """The worker starts (its ``worker_init_fn``)."""
        if self._init is not None:
            self._init(worker)
        info = get_worker_info()
        assert info is not None
        self._worker = worker
        self._own = generators.find(info.dataset, self._collate)
        for name, packed in self._starts.get(worker, {}).items():
            _set(name, packed, self._own)
        self._last = self._now()

    def collate(self, samples: Any) -> Carrier:
        """A batch is made (its ``collate_fn``)."""
        batch = self._collate(samples)
        last, self._last = self._last, self._now()
        changes = {
            name: _packed(name, state) for name, state in self._last.items() if not _is_same(name, state, last[name])
        }
        return Carrier(batch, self._worker, changes)

    def _now(self) -> dict[str, Any]:
        states: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if self._own:
            states["own"] = generators.states_of(self._own)
        return states


def _is_same(name: str, a: Any, b: Any) -> bool:
    if name == "python":
        return bool(a == b)
    if name == "numpy":
        return bool(a[2:] == b[2:] and np.array_equal(a[1], b[1]))
    return generators.is_same(a, b)


def _packed(name: str, state: Any) -> Any:
    """``state`` in few bytes: a tensor would reach the main process by way of a shared file, which costs more."""
    if name == "python":
        version, numbers, gauss = state
        return [version, array("I", numbers).tobytes(), gauss]
    if name == "numpy":
        _, numbers, *rest = state
        return [numbers.tobytes(), *rest]
    if name == "torch":
        return state.numpy().tobytes()
    return [own.numpy().tobytes() if isinstance(own, torch.Tensor) else own for own in state]


def _set(name: str, packed: Any, own: list[generators.Generator]) -> None:
    if name == "python":
        version, numbers, gauss = packed
        random.setstate((version, tuple(array("I", numbers)), gauss))
    elif name == "numpy":
        numbers, *rest = packed
        np.random.set_state(("MT19937", np.frombuffer(numbers, dtype=np.uint32), *rest))
    elif name == "torch":
        torch.set_rng_state(_tensor(packed))
    else:
        generators.set_states(own, [_tensor(one) if isinstance(one, bytes) else one for one in packed])


def _tensor(packed: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def plain(states: Any) -> Any:
    """States for a checkpoint: tensors in place of bytes."""
    if isinstance(states, bytes):
        return _tensor(states)
    if isinstance(states, dict):
        return {key: plain(value) for key, value in states.items()}
    return [plain(value) for value in states] if isinstance(states, list) else states


def packed(states: Any) -> Any:
    """The other way round."""
    if isinstance(states, torch.Tensor):
        return states.numpy().tobytes()
    if isinstance(states, dict):
        return {key: packed(value) for key, value in states.items()}
    return [packed(value) for value in states] if isinstance(states, list) else states
