"""The random states of a dataloader's worker processes: sent along with their batches, and restored in new workers.

A worker draws numbers for each sample, and is some batches ahead of the training. The states of its generators after
the last batch that was trained are known to the worker alone; so each batch brings along those that have changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from trainer.state import random_states
from trainer.state.random_states import State


class Carrier:
    """A batch on its way to the main process, with the worker it comes from and what has changed there.

    Args:
        batch: what the dataloader's ``collate_fn`` returned.
        worker: the worker's index.
        changes: the states of the generators that the worker has drawn from since its last batch.
    """

    __slots__ = ("batch", "changes", "worker")

    def __init__(self, batch: Any, worker: int, changes: State) -> None:
        self.batch = batch
        self.worker = worker
        self.changes = changes

    def __reduce__(self) -> tuple[Any, ...]:
        return Carrier, (self.batch, self.worker, self.changes)

    def pin_memory(self, *device: Any) -> Carrier:
        """The same with a batch in pinned memory: the dataloader's thread calls this."""
        batch = pin_memory(self.batch, *device)  # type: ignore[no-untyped-call]
        return Carrier(batch, self.worker, self.changes)


class WorkerRandom:
    """What runs in the workers around a dataloader's own ``worker_init_fn`` and ``collate_fn``.

    Args:
        init: the dataloader's ``worker_init_fn``.
        collate: its ``collate_fn``.
        starts: the states to go on from, by worker. A worker or a generator that is missing starts from its seed.
    """

    def __init__(
        self, init: Callable[[int], None] | None, collate: Callable[[Any], Any], starts: dict[int, State]
    ) -> None:
        self._init = init
        self._collate = collate
        self._starts = starts
        self._worker = -1
        self._own: list[random_states.Generator] = []
        self._last: State = {}

    def start(self, worker: int) -> None:
        """The worker's ``worker_init_fn``."""
        if self._init is not None:
            self._init(worker)
        info = get_worker_info()
        assert info is not None
        self._worker = worker
        self._own = random_states.find(info.dataset, self._collate)
        random_states.restore(self._starts.get(worker, {}), own=self._own)
        self._last = random_states.capture(own=self._own)

    def collate(self, samples: Any) -> Carrier:
        """The worker's ``collate_fn``."""
        batch = self._collate(samples)
        last, self._last = self._last, random_states.capture(own=self._own)
        changes = {name: state for name, state in self._last.items() if state != last[name]}
        return Carrier(batch, self._worker, changes)
