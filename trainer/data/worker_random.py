"""The random states of a dataloader's worker processes: sent along with their batches, and restored in new workers.

A worker draws numbers for each sample, and is some batches ahead of the training. The states of its generators after
the last batch that was trained are known to the worker alone; so each batch brings along those that have changed.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

from trainer.state import random_states
from trainer.state.random_states import State

Batch = Any
Marked = tuple[Batch, int, bytes]
"""What the workers send: a batch, the worker's index, and its random states that have changed, pickled; b"" for none.

The thread that pins memory looks into tuples, and not into bytes."""


class WorkerRandom:
    """What runs in the workers around a dataloader's own ``worker_init_fn`` and ``collate_fn``.

    Args:
        init: the dataloader's ``worker_init_fn``.
        collate: its ``collate_fn``.
        starts: the states to go on from, by worker. A worker or a generator that is missing starts from its seed.
    """

    def __init__(
        self, init: Callable[[int], None] | None, collate: Callable[[Any], Batch], starts: dict[int, State]
    ) -> None:
        self._init = init
        self._collate = collate
        self._starts = starts
        self._worker = -1
        self._watch: random_states.Watch | None = None

    def start(self, worker: int) -> None:
        """The worker's ``worker_init_fn``."""
        if self._init is not None:
            self._init(worker)
        info = get_worker_info()
        assert info is not None
        self._worker = worker
        own = random_states.find(info.dataset, self._collate)
        random_states.restore(self._starts.get(worker, {}), own=own)
        self._watch = random_states.Watch(own)

    def collate(self, samples: Any) -> Marked:
        """The worker's ``collate_fn``."""
        assert self._watch is not None
        batch = self._collate(samples)
        changes = self._watch.changes()
        return batch, self._worker, pickle.dumps(changes) if changes else b""


class WorkerStates:
    """The random states of workers after their batches that have arrived.

    Args:
        starts: those that they have gone on from, by worker.
    """

    def __init__(self, starts: dict[int, State]) -> None:
        self._states = {worker: dict(state) for worker, state in starts.items()}

    def take(self, marked: Marked) -> Batch:
        """The batch that has arrived."""
        batch, worker, changes = marked
        if changes:
            self._states.setdefault(worker, {}).update(pickle.loads(changes))
        return batch

    def state_dict(self) -> dict[int, State]:
        """By worker: of the generators that have been drawn from."""
        return {worker: random_states.plain(state) for worker, state in self._states.items()}
