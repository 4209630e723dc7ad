"""The random states of a dataloader's worker processes: sent with their batches, and restored in new workers.

A worker draws numbers for each sample, and is some batches ahead of the training. Thus it sends the states of its
generators with each batch after which they have changed: the last ones received are those after the last trained batch.

Seeds computed from the index of a batch would need no states, but then a run would not equal the plain loop.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from trainer.data.loader_parts import objects_with_set_epoch
from trainer.state import random_states
from trainer.state.random_states import State

Batch = Any

EPOCH = "epoch"
"""Key in the states of a worker: the epoch of its copy of the dataset."""


class WorkerRandom:
    """Wraps ``worker_init_fn``, ``collate_fn`` and the dataset of a dataloader in its workers.

    Args:
        loader: the dataloader.
        starts: the initial states by worker. A missing worker or generator starts from its seed.
        epoch: the epoch, for copies of a dataset that has ``set_epoch``.
        sends: whether to send states: a batch becomes (batch, worker, its pickled states or None if they are those of
            the last batch).
    """

    def __init__(self, loader: DataLoader[Any], starts: dict[int, State], epoch: int, *, sends: bool) -> None:
        self._init, self._collate = loader.worker_init_fn, loader.collate_fn
        self._starts, self._sends = starts, sends
        self._shared = torch.tensor([epoch, bool(starts)]).share_memory_()  # type: ignore[no-untyped-call]
        self._dataset: Any = None
        self._number = 0
        self._values: Any = None
        self._watch: random_states.Watch | None = None
        self._states: State = {}  # of the generators that were used

    def attributes(self, dataset: Any, *, wraps: bool) -> dict[str, Any]:
        """Return the attributes of a dataloader that starts these workers."""
        dataset = WorkerDataset(dataset, self) if wraps else dataset
        return {"worker_init_fn": self.start, "collate_fn": self.collate, "dataset": dataset}

    @property
    def have_changed(self) -> bool:
        """Whether a worker has drawn random numbers, or has changed attributes of its dataset."""
        return bool(self._shared[1])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the copies of the dataset. A worker does so at its next sample."""
        self._shared[0] = epoch

    # --- in a worker ---

    def start(self, worker: int) -> None:
        """Initialize a worker, as its ``worker_init_fn``."""
        info = get_worker_info()
        assert info is not None
        if isinstance(info.dataset, WorkerDataset):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # for functions of the user; `info` is frozen
        self._dataset, self._number = info.dataset, worker
        if self._init is not None:
            self._init(worker)
        objects = random_states.find(self._dataset, self._collate)
        self._values = memoryview(self._shared.numpy())  # faster to read
        self._states = {EPOCH: self._values[0], **self._starts.get(worker, {})}
        random_states.restore(self._states, objects=objects)
        self._watch = random_states.Watch(objects)

    def collate(self, samples: Any) -> Batch:
        """Collate samples into a batch, as the ``collate_fn`` of a worker."""
        batch = self._collate(samples)
        has_changed = self.record()
        return (batch, self._number, pickle.dumps(self._states) if has_changed else None) if self._sends else batch

    def record(self) -> bool:
        """Return whether the states have changed since the last batch."""
        assert self._watch is not None
        changes = self._watch.changes()
        if changes:
            self._states |= changes
            self._values[1] = 1
        return bool(changes)

    def follow_epoch(self) -> None:
        """Set the epoch of the worker's copy of the dataset if it has changed."""
        if self._values[0] != self._states[EPOCH]:
            self._states[EPOCH] = self._values[0]
            for dataset in objects_with_set_epoch(self._dataset):
                dataset.set_epoch(self._values[0])


class WorkerDataset:
    """A dataset in persistent workers. It follows the epoch, and records changes after the last batch of a pass.

    Args:
        dataset: the user's dataset.
        worker: sets the epoch, and records the changes.
    """

    def __init__(self, dataset: Any, worker: WorkerRandom) -> None:
        self.dataset, self._worker = dataset, worker
        if hasattr(dataset, "__getitems__"):
            self.__getitems__ = self._items

    def __getitem__(self, index: Any) -> Any:
        self._worker.follow_epoch()
        return self.dataset[index]

    def _items(self, indices: Any) -> Any:
        self._worker.follow_epoch()
        return self.dataset.__getitems__(indices)

    def __iter__(self) -> Iterator[Any]:
        self._worker.follow_epoch()
        yield from self.dataset
        self._worker.record()


@contextmanager
def recorded(loader: DataLoader[Any], worker: WorkerRandom, *, wraps: bool) -> Iterator[None]:
    """Return a context in which ``loader`` starts these workers. The loader is not changed."""
    attributes = worker.attributes(loader.dataset, wraps=wraps)
    before = {name: vars(loader)[name] for name in attributes}
    vars(loader).update(attributes)
    try:
        yield
    finally:
        vars(loader).update(before)


def states_of(received: dict[int, Any]) -> dict[int, State]:
    """Return states of workers as plain data. Those that were sent are pickled."""
    return {
        worker: pickle.loads(states) if isinstance(states, bytes) else states for worker, states in received.items()
    }
