"""The random states of a dataloader's worker processes: kept up to date, and restored in new workers.

A worker draws numbers for each sample, and is some batches ahead of the training. Only the worker knows the states of
its generators after the last trained batch, and only a checkpoint needs them. Thus a worker writes them into shared
memory, and sends their position with each batch.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from trainer.data.epochs import objects_with_set_epoch
from trainer.state import random_states
from trainer.state.random_states import State

Batch = Any
Marked = tuple[Batch, int, int | bytes | None]
"""The items that workers send: a batch, the worker's index, and the position of its random states in shared memory. The
last item is the pickled states themselves if they have no place there, and None if they have not changed since the
previous batch.

States are pickled, because the thread that pins memory searches nested containers for tensors, but not bytes."""

EPOCH = "epoch"
"""Key in the states of a worker: the epoch of its copy of the dataset."""
BEGAN, PASSES, ENDS_LATE = "began", "passes", "ends_late"
"""Keys in the states of a worker with an iterable dataset: the states when the pass began, the number of passes that
have begun, and whether the states changed after the last batch of a pass."""
PLACE = 2**14
"""Size in bytes. The global generators take 10,000 bytes, and each generator of a dataset takes up to 5,000."""


class WorkerRandom:
    """Wraps ``worker_init_fn`` and ``collate_fn`` of a dataloader in its workers.

    Args:
        init: the dataloader's ``worker_init_fn``.
        collate: its ``collate_fn``.
        starts: the initial states by worker. A missing worker or generator starts from its seed.
        memory: the shared memory of :class:`WorkerStates`, if any: uint8, shape (workers, places, bytes).
        epoch: a tensor in shared memory with the number of the epoch, for the worker's copy of a dataset that has
            ``set_epoch``: int64, shape (1,). None if the copy already has it.
    """

    def __init__(
        self,
        init: Callable[[int], None] | None,
        collate: Callable[[Any], Batch],
        starts: dict[int, State],
        memory: torch.Tensor | None = None,
        epoch: torch.Tensor | None = None,
    ) -> None:
        self._epoch = epoch
        self._follower: _EpochFollower | None = None
        self._init = init
        self._collate = collate
        self._starts = starts
        self._memory = memory
        self._places: Iterator[tuple[int, memoryview]] = iter(())  # of this worker, in turn, with their numbers
        self._worker = -1
        self._watch: random_states.Watch | None = None
        self._states: State = {}  # of the generators that were used
        self._has_news = False  # the states have changed outside of a batch

    def start(self, worker: int) -> None:
        """Initialize a worker, as its ``worker_init_fn``."""
        if self._init is not None:
            self._init(worker)
        info = get_worker_info()
        assert info is not None
        self._worker = worker
        if self._memory is not None:
            self._places = cycle(enumerate(memoryview(place.numpy()) for place in self._memory[worker]))
        own = random_states.find(info.dataset, self._collate)
        self._states = dict(self._starts.get(worker, {}))
        random_states.restore(self._states, own=own)
        self._watch = random_states.Watch(own)
        if isinstance(info.dataset, IterableDataset):
            _call_before(info.dataset, {"__iter__": self._begin_pass})
        if self._epoch is not None and (parts := objects_with_set_epoch(info.dataset)):
            self._follower = _EpochFollower(self._epoch, parts, self._states.get(EPOCH))
            _call_before(info.dataset, dict.fromkeys(_READS, self._follower))

    def _begin_pass(self) -> None:
        """Record the states before the dataset is iterated, including changes after the last batch of the last pass."""
        if self._watch is not None:
            changes = self._watch.changes()
            self._states.update(changes)
            own = {name: state for name, state in self._states.items() if name not in (BEGAN, PASSES, ENDS_LATE, EPOCH)}
            ends_late = bool(changes) and self._states.get(PASSES, 0) > 0
            self._states |= {BEGAN: random_states.decoded(own), PASSES: self._states.get(PASSES, 0) + 1}
            self._states[ENDS_LATE] = ends_late or self._states.get(ENDS_LATE, False)
            self._has_news = True

    def collate(self, samples: Any) -> Marked:
        """Collate samples into a batch, as the ``collate_fn`` of a worker."""
        assert self._watch is not None
        batch = self._collate(samples)
        changes = self._watch.changes()
        if not changes and not self._has_news:
            return batch, self._worker, None
        self._has_news = False
        self._states.update(changes)
        if self._follower is not None:
            self._states[EPOCH] = self._follower.epoch
        return batch, self._worker, self._written(pickle.dumps(self._states))

    def _written(self, states: bytes) -> int | bytes:
        """Write ``states`` and return the number of their place; return ``states`` if there is no place."""
        if self._memory is None or len(states) > PLACE:
            return states
        number, place = next(self._places)
        place[: len(states)] = states
        return number


_READS = ("__iter__", "__getitem__", "__getitems__")
"""The methods that a worker calls to read a dataset."""


class _EpochFollower:
    """Calls ``set_epoch`` of a worker's copy of a dataset if the epoch has changed.

    Args:
        shared: the number of the epoch, in memory that is shared with the training process.
        parts: the parts of the dataset that have ``set_epoch``.
        epoch: the epoch of the copy; None if it was created in the current epoch.
    """

    def __init__(self, shared: torch.Tensor, parts: list[Any], epoch: int | None) -> None:
        numbers: Any = shared.numpy()
        self._number = memoryview(numbers)
        self._parts = parts
        self.epoch = self._number[0] if epoch is None else epoch

    def __call__(self) -> None:
        if self._number[0] != self.epoch:
            self.epoch = self._number[0]
            for part in self._parts:
                part.set_epoch(self.epoch)


def _call_before(dataset: Any, calls: dict[str, Callable[[], None]]) -> None:
    """Wrap methods of a dataset to call a function first, if its class can be replaced by a subclass."""
    kind: Any = type(dataset)

    def preceded(method: Callable[..., Any], call: Callable[[], None]) -> Callable[..., Any]:
        def run(self: Any, *args: Any) -> Any:
            call()
            return method(self, *args)

        return run

    methods = {name: preceded(getattr(kind, name), call) for name, call in calls.items() if hasattr(kind, name)}
    with suppress(TypeError):
        dataset.__class__ = type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__})


class WorkerStates:
    """The random states of workers after their batches that have arrived.

    Args:
        starts: their initial states, by worker.
        workers: number of workers that write into shared memory. Default: 0, they send their states.
        ahead: largest number of batches that a worker is ahead of the training. The worker has a place for each of
            them, one for the last batch taken, and one for a batch that has arrived and is lost by an error or an
            interrupt.

    Attributes:
        memory: the shared memory for :class:`WorkerRandom`; None if the workers send their states.
    """

    def __init__(self, starts: dict[int, State], workers: int = 0, ahead: int = 0) -> None:
        self._starts = starts
        self._marks: dict[int, int | bytes] = {}
        self.memory: torch.Tensor | None = None
        if workers:
            self.memory = torch.empty(workers, ahead + 2, PLACE, dtype=torch.uint8)
            self.memory.share_memory_()  # type: ignore[no-untyped-call]

    def take(self, marked: Marked) -> Batch:
        """Return the batch that has arrived, and record its states."""
        batch, worker, mark = marked
        if mark is not None:
            self._marks[worker] = mark
        return batch

    def state_dict(self) -> dict[int, State]:
        """Return the states of the generators that were used, by worker."""
        current = {worker: pickle.loads(self._read(worker, mark)) for worker, mark in self._marks.items()}
        return {worker: random_states.decoded(state) for worker, state in {**self._starts, **current}.items()}

    @staticmethod
    def at_start_of_pass(states: dict[int, State]) -> dict[int, State] | None:
        """Return the states of workers with an iterable dataset when the pass began; None if one is not known.

        Args:
            states: the current states, from :meth:`state_dict`.
        """
        passes = max((state.get(PASSES, 0) for state in states.values()), default=0)
        known = {}
        for worker, state in states.items():
            is_current, ends_late = state.get(PASSES) == passes, state.get(ENDS_LATE, True)
            if not is_current and ends_late:  # it has not sent a batch of this pass
                return None
            began = state[BEGAN] if is_current else state
            known[worker] = {**began, PASSES: passes - 1, ENDS_LATE: ends_late}
        return known

    def _read(self, worker: int, mark: int | bytes) -> bytes:
        if isinstance(mark, bytes):
            return mark
        assert self.memory is not None
        place: bytes = self.memory[worker, mark].numpy().tobytes()
        return place
