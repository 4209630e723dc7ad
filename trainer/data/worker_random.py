"""The random states of a dataloader's worker processes: kept up to date, and restored in new workers.

A worker draws numbers for each sample, and is some batches ahead of the training. Only the worker knows the states of
its generators after the last trained batch, and only a checkpoint needs them. Thus a worker writes them into shared
memory after each batch. Batches are distributed to the workers in turn, so their number determines the place to read.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from trainer.data.epochs import objects_with_set_epoch
from trainer.state import random_states
from trainer.state.random_states import State

Batch = Any

EPOCH = "epoch"
"""Key in the states of a worker: the epoch of its copy of the dataset."""
PLACE = 2**16
"""Size in bytes. The global generators take 10,000 bytes, and each generator of a dataset takes up to 5,000."""
_HEADER = struct.Struct("qq")
"""The number of batches that the worker has prepared, and the size of its states: 0 if they have never changed."""


class WorkerRandom:
    """Wraps ``worker_init_fn``, ``collate_fn`` and the dataset of a dataloader in its workers.

    Args:
        loader: the dataloader.
        starts: the initial states by worker. A missing worker or generator starts from its seed.
        memory: the shared memory of :class:`WorkerStates`: uint8, shape (workers, places, bytes).
        epoch: a tensor in shared memory with the number of the epoch, for the worker's copy of a dataset that has
            ``set_epoch``: int64, shape (1,). None if the copy already has it.
    """

    def __init__(
        self, loader: DataLoader[Any], starts: dict[int, State], memory: torch.Tensor, epoch: torch.Tensor | None = None
    ) -> None:
        self._init, self._collate = loader.worker_init_fn, loader.collate_fn
        self._starts, self._memory, self._epoch = starts, memory, epoch
        self._dataset: Any = None
        self._places: list[memoryview] = []
        self._number: Any = None
        self._watch: random_states.Watch | None = None
        self._states: State = {}  # of the generators that were used
        self._pickled = b""
        self._batches = 0

    def start(self, worker: int) -> None:
        """Initialize a worker, as its ``worker_init_fn``."""
        info = get_worker_info()
        assert info is not None
        if isinstance(info.dataset, WorkerDataset):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # for functions of the user; `info` is frozen
        self._dataset = info.dataset
        if self._init is not None:
            self._init(worker)
        self._places = [memoryview(place.numpy()) for place in self._memory[worker]]
        own = random_states.find(self._dataset, self._collate)
        self._states = dict(self._starts.get(worker, {}))
        random_states.restore(self._states, own=own)
        self._watch = random_states.Watch(own)
        if self._epoch is not None:
            self._number = memoryview(self._epoch.numpy())  # type: ignore[arg-type]
            self._states.setdefault(EPOCH, self._number[0])

    def collate(self, samples: Any) -> Batch:
        """Collate samples into a batch, as the ``collate_fn`` of a worker."""
        batch = self._collate(samples)
        self._batches += 1
        self.record()
        return batch

    def record(self) -> None:
        """Write the states after the last batch."""
        assert self._watch is not None
        if changes := self._watch.changes():
            self._states |= changes
            self._pickled = pickle.dumps(self._states)
        place, end = self._places[self._batches % len(self._places)], _HEADER.size + len(self._pickled)
        _HEADER.pack_into(place, 0, self._batches, len(self._pickled))
        if end <= len(place):
            place[_HEADER.size : end] = self._pickled

    def follow_epoch(self) -> None:
        """Set the epoch of the worker's copy of the dataset if it has changed."""
        if self._number is not None and self._number[0] != self._states[EPOCH]:
            self._states[EPOCH] = self._number[0]
            for part in objects_with_set_epoch(self._dataset):
                part.set_epoch(self._number[0])


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
def recorded(loader: DataLoader[Any], worker: WorkerRandom, *, wraps_dataset: bool) -> Iterator[None]:
    """Return a context in which ``loader`` starts workers that record their states. The loader is not changed."""
    names = "worker_init_fn", "collate_fn", "dataset"
    own = {name: vars(loader)[name] for name in names}
    dataset = WorkerDataset(loader.dataset, worker) if wraps_dataset else loader.dataset
    vars(loader).update(worker_init_fn=worker.start, collate_fn=worker.collate, dataset=dataset)
    try:
        yield
    finally:
        vars(loader).update(own)


class WorkerStates:
    """The random states of workers after the batches that were yielded.

    Args:
        starts: their initial states, by worker.
        workers: number of workers.
        ahead: largest number of batches that a worker is ahead of the training. The worker has a place for each of
            them, one for the last batch taken, and one for a batch that has arrived and is lost by an error or an
            interrupt.

    Attributes:
        memory: the shared memory for :class:`WorkerRandom`.
    """

    def __init__(self, starts: dict[int, State], workers: int, ahead: int) -> None:
        self._starts = starts
        self.memory = torch.zeros(workers, ahead + 2, PLACE, dtype=torch.uint8)
        self.memory.share_memory_()  # type: ignore[no-untyped-call]
        self._earlier = [0] * workers  # batches of earlier passes, by worker

    def end_pass(self, first: int, prepared: int) -> None:
        """Count the batches that were prepared in a pass: one after the other from worker ``first`` on."""
        self._earlier = self._counts(first, prepared)

    def _counts(self, first: int, batches: int) -> list[int]:
        workers = len(self._earlier)
        return [
            earlier + len(range((worker - first) % workers, batches, workers))
            for worker, earlier in enumerate(self._earlier)
        ]

    @property
    def have_changed(self) -> bool:
        """Whether a worker has drawn random numbers, or has changed attributes of its dataset."""
        return bool(self.memory[:, :, 8 : _HEADER.size].any())

    def state_dict(self, first: int, batches: int) -> dict[int, State] | None:
        """Return the states of the generators that were used, by worker; None if they are unknown.

        Args:
            first: the worker of the first batch that was yielded in this pass.
            batches: the number of batches that were yielded.
        """
        states = dict(self._starts)
        for worker, count in enumerate(self._counts(first, batches)):
            if not count:
                continue
            place = self.memory[worker, count % self.memory.shape[1]].numpy().tobytes()
            written, size = _HEADER.unpack_from(place)
            if written != count or _HEADER.size + size > len(place):
                return None
            if size:
                states[worker] = random_states.decoded(pickle.loads(place[_HEADER.size : _HEADER.size + size]))
        return states
