"""Dataloaders with a pass that can be resumed in another process.

A :class:`ResumableLoader` wraps a dataloader and tracks the position in its pass. It follows torchdata's convention:
``state_dict`` returns the position, and after ``load_state_dict`` the next iteration yields the rest of the pass. These
are the same samples in the same order, prepared with the same random numbers, also in workers. If the pass was over,
the next iteration is the following pass. There are three kinds:

``MapStyleLoader``
    A ``DataLoader`` with a map-style dataset. Its sampler is iterated again from its initial random state. The indices
    of trained batches are compared with the saved ones and dropped: no sample is loaded.
``StatefulLoader``
    A loader that has ``state_dict`` and ``load_state_dict`` resumes itself.
``ResumableLoader``
    Anything else: the trained batches are loaded again, and dropped.

A state belongs to one process. It contains the number of trained batches and, in ``set_up``, the batch size and the
number of processes that shared the samples. Together they determine how many samples of the epoch were used. A run with
a different number of processes converts the states (:meth:`MapStyleLoader.convert_states`), if the samples come from an
:class:`~trainer.data.elastic.ElasticSampler`.
"""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import chain, cycle, islice, repeat
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, StackDataset, Subset, TensorDataset
from torch.utils.data import default_collate as _collate
from torch.utils.data import default_convert as _convert
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from trainer.data.elastic import ElasticSampler
from trainer.data.epochs import objects_with_set_epoch
from trainer.data.worker_random import Marked, WorkerRandom, WorkerStates
from trainer.data.workers import bounded_like
from trainer.state import random_states
from trainer.state.attributes import AttributeChanges
from trainer.state.random_states import Generator, State

Batch = Any


class ResumableLoader:
    """A dataloader, or any other iterable of batches, and the position in its pass.

    Iterating it draws the same random numbers as iterating the dataloader. A resume loads the earlier batches again;
    subclasses avoid this. Worker processes that persist (``persistent_workers=True``) are started again as they were at
    the beginning of the pass: with their random states, and with the changed attributes of their datasets.

    Args:
        loader: the dataloader.
        generators: the random generators that it holds. Default: None, they are searched for.

    Attributes:
        replays: whether a resume loads the trained batches again.
    """

    kind = "replayed"

    def __init__(self, loader: Any, generators: list[Generator] | None = None) -> None:
        self.loader = loader
        self.generators = random_states.find(loader) if generators is None else generators
        self.replays = not isinstance(loader, Sequence)  # a list has its batches in memory
        self._persists = isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers
        # whether its iterators can be made to send the random states of workers
        self._can_have_worker_states = self._persists and _uses_default_iteration(loader)
        self._has_worker_states = False  # whether batches come with these states
        self._begun: State = {}  # the random states when the pass began
        self._started: State = {}  # the random states when the workers were started: in this pass, or an earlier one
        self._batches = 0  # number of batches that the pass has yielded
        self._workers = WorkerStates({})  # the random states of the workers after these batches
        self._resumed: Iterator[Batch] | None = None  # the pass of the next iteration
        self._finished: State = {}  # the state of a pass that was over, until the next one begins
        self.epoch = 0
        self._shared_epoch: torch.Tensor | None = None  # for persistent workers

    def start_epoch(self, epoch: int) -> None:
        """Set the epoch, also for persistent workers, which have copies of the dataset."""
        self.epoch = epoch
        if self._shared_epoch is not None:
            self._shared_epoch[0] = epoch

    def _share_epoch(self) -> torch.Tensor | None:
        """Return the number of the epoch in shared memory, if workers persist and the dataset has ``set_epoch``."""
        self._shared_epoch = None
        if self._persists and objects_with_set_epoch(self.loader.dataset):
            self._shared_epoch = torch.tensor([self.epoch])
            self._shared_epoch.share_memory_()  # type: ignore[no-untyped-call]
        return self._shared_epoch

    def __getstate__(self) -> dict[str, Any]:
        """Leave the current pass out of copies."""
        return vars(self) | {"_resumed": None}

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def has_begun(self) -> bool:
        """Whether the pass has yielded a batch."""
        return self._batches > 0

    def __iter__(self) -> Iterator[Batch]:
        resumed, self._resumed, self._finished = self._resumed, None, {}
        return self._begin() if resumed is None else resumed

    def state_dict(self) -> State:
        """Return the position in the pass: tensors and plain containers. {} before the first pass."""
        state = self._finished or (self._position_state() if self._begun else {})
        return {**state, "own": random_states.states_of(self.generators), "epoch": self.epoch} if state else {}

    def load_state_dict(self, state: State) -> list[str]:
        """Restore a position: the next iteration yields the rest of its pass. Changes this process's random states.

        Args:
            state: the return value of :meth:`state_dict`, with two optional keys: ``is_over``, whether the pass was
                over; ``inside``, whether the state was saved in the middle of the batch that follows the trained ones.
                If the state is of another kind of loader, ``batches`` batches are skipped, and nothing else is
                restored.

        Returns:
            The reasons why the following batches may differ from those of an uninterrupted run; empty if they do not.
            If the pass was over, changed settings are no reason, because data may change between two epochs.
        """
        self._resumed, self._finished = None, {}
        if not state:
            return []
        if state.get("is_over"):
            self._finished = state
            if state["kind"] != self.kind:
                return []
            if self._persists and "epoch" in state:
                for part in objects_with_set_epoch(self.loader.dataset):  # new workers copy the dataset, with its epoch
                    part.set_epoch(state["epoch"])
                self.epoch = state["epoch"]
            reasons = self._follow(state)
            random_states.set_states(self.generators, state["own"])
            return reasons
        if state["kind"] != self.kind:
            self._resumed = self._skip(state["batches"])
            kind = type(self.loader).__name__
            return [f"the dataloader is of another kind than the one that was saved: it is now a {kind}"]
        reasons = _changes(state["set_up"], self.loader)
        self._resumed = self._resume(state, reasons)
        if state["prefetch_factor"] == self._prefetch_factor:  # otherwise the sampler is ahead by more or fewer batches
            random_states.set_states(self.generators, state["own"])
        return reasons

    def begin_pass(self, *, with_old_workers: bool = False) -> None:
        """Record that a pass begins, with new workers or those of the last pass."""
        self._begun, self._batches = random_states.capture(own=self.generators), 0
        if not with_old_workers:
            self._started = self._begun

    def take(self, marked: Marked) -> Batch:
        """Return the batch that a worker has sent, and record the worker's state."""
        self._batches += 1
        return self._workers.take(marked)

    @property
    def _prefetch_factor(self) -> int | None:
        return getattr(self.loader, "prefetch_factor", None)

    def _begin(self) -> Iterator[Batch]:
        """Return an iterator over a new pass, with new workers or those of the last pass."""
        running = self.loader._iterator if self._persists else None
        self._has_worker_states = self._can_have_worker_states and (running is None or _owner_of(running) is self)
        if running is None or not self._has_worker_states:
            self.begin_pass(with_old_workers=running is not None)
        if not self._has_worker_states:  # not supported, or other code started the persistent workers
            return self._count_batches(one_pass(self.loader))
        return self._open({}) if running is None else iter(self.loader)

    def _open(self, starts: dict[int, State]) -> Iterator[Batch]:
        """Return an iterator of the dataloader with new workers, which start from the random states ``starts``."""
        iterator: Iterator[Batch] = iter(self._start_workers(starts, iter))
        return iterator

    def _start_workers(self, starts: dict[int, State], make: Callable[[Any], Any]) -> Any:
        """Return an iterator of the dataloader with new workers.

        Args:
            starts: the states that the workers start from.
            make: makes the iterator.
        """
        loader, own = self.loader, (self.loader.worker_init_fn, self.loader.collate_fn)
        in_worker = WorkerRandom(*own, starts, epoch=self._share_epoch())
        self._workers = WorkerStates(starts)
        loader.worker_init_fn, loader.collate_fn = in_worker.start, in_worker.collate
        try:
            iterator = make(loader)
        finally:
            loader.worker_init_fn, loader.collate_fn = own
        kind: Any = type(iterator)
        iterator.__class__ = _with_owner(kind)
        iterator.owner = weakref.ref(self)
        return iterator

    def _resume(self, state: State, reasons: list[str]) -> Iterator[Batch]:
        """Return an iterator over the rest of the pass in ``state``. Appends to ``reasons`` why it may differ."""
        reasons += self._unknown_worker_states(state, "at_start")
        random_states.restore(state.get("started") or state["begun"], own=self.generators)
        iterator = self._skip(state["batches"], state.get("at_start"))
        self._begun, self._started = state["begun"], state.get("started", {})
        return iterator

    def _skip(self, batches: int, starts: dict[int, State] | None = None) -> Iterator[Batch]:
        """Return an iterator over a new pass without its first ``batches``."""
        if starts and self._can_have_worker_states:
            self._has_worker_states = True
            self.begin_pass()
            iterator = self._open(starts)
        else:
            iterator = self._begin()
        deque(islice(iterator, batches), maxlen=0)
        return iterator

    def _follow(self, state: State) -> list[str]:
        """Restore everything that affects the pass after the one in ``state``, except random generators.

        Returns:
            The reasons why that pass may be different; empty if it is the same.
        """
        reasons: list[str] = []
        if self.restarts_workers(state):
            self._restart_workers(state, reasons)
        return reasons

    def restarts_workers(self, state: State) -> bool:
        """Return whether persistent workers are started as they were at the end of the pass in ``state``."""
        return self._persists and self.loader._iterator is None and not _changes(state["set_up"], self.loader)

    def _restart_workers(self, state: State, reasons: list[str]) -> None:
        """Start persistent workers, which the loader keeps, as they were at the end of a pass.

        Batches that they had prepared, and that were not used, are prepared again.
        """
        if not (unknown := self._unknown_worker_states(state, "at_start")):
            self._resume(state, reasons)
        reasons += unknown

    def _unknown_worker_states(self, state: State, key: str) -> list[str]:
        """Return why the states of persistent workers cannot be restored; empty if they can be.

        Args:
            state: the state of the loader.
            key: the states of the workers that are needed: ``"workers"``, the current ones, or ``"at_start"``, those at
                the start of the pass.
        """
        if not self._persists or _is_deterministic(self.loader):
            return []
        if not self._can_have_worker_states or state.get(key) is None:
            is_first = key == "at_start" and state.get("is_first")
            return [] if is_first else ["the position of the persistent workers is unknown"]
        own = (worker.get("own", [[]])[-1] for worker in state[key].values())
        lost = sorted({name for states in own for name in AttributeChanges.lost(states)})
        if not lost or not isinstance(self.loader.dataset, IterableDataset):
            return []
        return [
            f"{', '.join(lost)} changed in the persistent workers and cannot be stored: use persistent_workers=False,"
            " or give the dataset `state_dict` and `load_state_dict`"
        ]

    def _position_state(self) -> State:
        state = self._common_state()
        if self._persists:
            state["is_first"] = self._started == self._begun  # the workers were started for this pass
        if self._has_worker_states:
            workers = self._workers.state_dict()
            state.update(workers=workers, at_start=WorkerStates.at_start_of_pass(workers), started=self._started)
        return state

    def _common_state(self) -> State:
        return {
            "kind": self.kind,
            "batches": self._batches,
            "begun": self._begun,
            "set_up": _settings_of(self.loader) if isinstance(self.loader, DataLoader) else {},
            "prefetch_factor": self._prefetch_factor,
        }

    def _count_batches(self, iterator: Iterator[Any]) -> Iterator[Batch]:
        for batch in iterator:
            self._batches += 1
            yield batch


def one_pass(source: Iterable[Any]) -> Iterator[Any]:
    """Begin a pass over ``source``, and return its items.

    Calls ``iter`` only once, because it restarts a loader or sampler that is its own iterator.
    """
    return map(next, repeat(iter(source)))


def to_the_end(
    iterator: Iterator[Batch], loader: Any, done: int = 0, before: Callable[[], Any] = lambda: None
) -> Iterator[Batch]:
    """Return the batches of a pass, and read the sampler to its end before the last batch.

    A ``for`` loop does so after the last batch, and workers read ahead. It runs the code after the last ``yield`` of a
    sampler, which may count epochs, and a ``RandomSampler`` draws from its generator. Other data than a map-style
    dataset is not read beyond its length, because it may be a stream that continues in the next pass.

    Args:
        iterator: the pass.
        loader: the dataloader.
        done: the number of batches that the pass has yielded before. Default: 0.
        before: called before the end is read. Default: a no-op.
    """
    if not _is_map_style(loader) or loader.num_workers or (left := (length_of(loader) or 0) - done) <= 0:
        return iterator
    return chain(islice(iterator, left - 1), _read_ahead(iterator, before))


def _read_ahead(iterator: Iterator[Batch], before: Callable[[], Any]) -> Iterator[Batch]:
    batches = deque(islice(iterator, 1))
    before()
    batches += islice(iterator, 1)  # none, unless the length is an estimate
    while batches:
        yield batches.popleft()
    yield from iterator


def _is_map_style(loader: Any) -> bool:
    return _uses_default_iteration(loader) and not isinstance(loader.dataset, IterableDataset)


def resumable(loader: Any, epoch: int = 0) -> ResumableLoader:
    """Return a :class:`ResumableLoader` around ``loader``, and set its epoch."""
    made: ResumableLoader
    if _has_state(loader):
        made = StatefulLoader(loader)
    elif _is_map_style(loader):
        made = MapStyleLoader(loader)
    else:
        made = ResumableLoader(loader)
    made.start_epoch(epoch)
    return made


def generators_of(loader: Any) -> list[Generator]:
    """Return the random generators and attributes that a dataloader keeps in this process from pass to pass."""
    if not isinstance(loader, DataLoader):
        return random_states.find(loader)
    samplers = loader.generator, loader.sampler, loader.batch_sampler
    return random_states.find(*samplers, loader.dataset, loader.collate_fn)


def _uses_default_iteration(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and type(loader)._get_iterator is DataLoader._get_iterator
    )


def _has_state(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


class StatefulLoader(ResumableLoader):
    """A loader that has ``state_dict`` and ``load_state_dict``, such as torchdata's ``StatefulDataLoader``.

    Such a loader does not save the random states of its workers, so this class saves them.
    """

    kind = "stateful"

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        is_torchs = isinstance(loader, DataLoader)
        # without objects that have `load_state_dict`: inside a pass, it sets their attributes for the next iteration
        is_torchdatas = is_torchs and type(loader).load_state_dict.__module__.startswith("torchdata.")
        find = partial(random_states.find, unwatched=_has_state if is_torchdatas else lambda _: True)
        self._attributes = [generator for generator in self.generators if isinstance(generator, AttributeChanges)]
        self.generators = find(loader)
        self.replays = False
        self._can_have_worker_states = is_torchs and loader.num_workers > 0
        # a DataLoader begins each pass from the start, but without workers its dataset may continue where it was
        lasting: Any = loader.dataset if isinstance(loader, DataLoader) else loader
        self._lasting: Any = None if self._can_have_worker_states or not _has_state(lasting) else lasting
        samplers, dataset = ((loader.sampler, loader.batch_sampler), loader.dataset) if is_torchs else ((), None)
        found = find(*samplers, except_in=dataset)
        self._sampler_attributes = [one for one in found if isinstance(one, AttributeChanges)]

    def keep_position(self) -> None:
        """Record the position before the iterator of the dataloader is dropped, because only the iterator knows it."""
        if self._begun and isinstance(self.loader, DataLoader) and self.loader._iterator is not None:
            self._finished = self._finished or self._position_state()

    def _resume(self, state: State, reasons: list[str]) -> Iterator[Batch]:
        starts = self._load(state, reasons)
        random_states.restore(state["begun"], own=self.generators)
        if self._can_have_worker_states:
            self._has_worker_states = True
            iterator = self._start_workers(starts, partial(_attributes_of_later_pass(state), iter))
        else:
            iterator = self._begin()
        self._continue_from(state)
        if "sampler" in state and random_states.states_of(self._sampler_attributes) != state["sampler"]:
            reasons.append("the sampler changes whenever it is iterated, and resuming iterates it more often")
        return iter(iterator)

    def _load(self, state: State, reasons: list[str]) -> dict[int, State]:
        """Load the state into the loader. Returns the states that the workers are to start from."""
        if state.get("inside"):
            reasons.append(_INSIDE_A_BATCH)
        replayed, is_from_start = _replayed_by_workers(state["state"])
        reasons += self._unknown_worker_states(state, "at_start" if is_from_start else "workers")
        if self._can_have_worker_states and replayed and not is_from_start and not _is_deterministic(self.loader):
            reasons.append(f"snapshot_every_n_steps makes workers prepare {replayed} batches again; set it to 1")
        self.loader.load_state_dict(state["state"])
        starts: dict[int, State] = state.get("at_start" if is_from_start else "workers") or {}
        return starts

    def _continue_from(self, state: State) -> None:
        self._begun, self._batches = state["begun"], state["batches"]
        self._started = state.get("started", {})
        self._workers = WorkerStates(state.get("workers", {}))

    def _restart_workers(self, state: State, reasons: list[str]) -> None:
        loader, starts = self.loader, self._load(state, reasons)
        random_states.restore(state["begun"], own=self.generators)
        make = partial(_attributes_of_later_pass(state), type(loader)._get_iterator)
        loader._iterator = bounded_like(loader, self._start_workers(starts, make))
        self._continue_from(state)

    def _follow(self, state: State) -> list[str]:
        if self._lasting is not None and "lasting" in state:
            self._lasting.load_state_dict(state["lasting"])
        reasons = super()._follow(state)
        random_states.set_states(self._attributes, state.get("attributes", []))
        return reasons

    def _position_state(self) -> State:
        state = {**super()._position_state(), "state": self.loader.state_dict()}
        state["sampler"] = random_states.states_of(self._sampler_attributes)
        state["attributes"] = random_states.states_of(self._attributes)
        if self._lasting is not None:
            state["lasting"] = state["state"] if self._lasting is self.loader else self._lasting.state_dict()
        return state


def _attributes_of_later_pass(state: State) -> Callable[[Callable[[Any], Any], Any], Any]:
    """Return a function that makes an iterator of a loader as in the pass of ``state``.

    An iterator that starts workers draws their seed, and a later pass of persistent workers draws no seed. For a later
    pass, a temporary seed is drawn from a separate generator, so that the loader's generator does not advance. The
    saved seed then replaces the temporary one.
    """

    def make(begin: Callable[[Any], Any], loader: Any) -> Any:
        generator = loader.generator
        if not state.get("is_first", True):
            loader.generator = torch.Generator()
        try:
            return begin(loader)
        finally:
            loader.generator = generator

    return make


def _replayed_by_workers(state: State) -> tuple[int, bool]:
    """Return how many batches the workers of a StatefulDataLoader load again, and whether from the beginning."""
    snapshot = state.get("_snapshot", {})
    workers = snapshot.get("_worker_snapshots", {}).values()
    fetchers = [worker.get("fetcher_state") for worker in workers if worker.get("dataset_state") is None]
    is_from_start = any(fetcher is not None and fetcher.get("dataset_iter_state") is None for fetcher in fetchers)
    return state.get("_steps_since_snapshot", 0), is_from_start


class MapStyleLoader(ResumableLoader):
    """A map-style ``DataLoader``, of a class that iterates as ``DataLoader`` does."""

    kind = "map-style"

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader, generators_of(loader))
        self.replays = False
        sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        max_recent = (loader.prefetch_factor or 0) * loader.num_workers + 2
        self._sampler = _RecordedSampler(sampler, max_recent, self.generators)
        self._can_have_worker_states = self._has_worker_states = True
        self._running: weakref.ref[_WorkerIterator] | None = None
        # when a pass with in_order=False was resumed:
        self._late: list[int] = []  # the numbers of the batches that had been sampled, but had not arrived
        self._drawn_before = 0  # the number of batches that had been sampled
        self._before_end: list[Any] = []  # the states of the generators before the end of the sampler was read

    def __iter__(self) -> Iterator[Batch]:
        iterator, self._before_end = super().__iter__(), []
        return to_the_end(iterator, self.loader, self._batches, self._note_end)

    def _note_end(self) -> None:
        self._before_end = random_states.states_of(self.generators)

    def state_dict(self) -> State:
        """Return the position in the pass: tensors and plain containers. {} before the first pass."""
        state, before = super().state_dict(), self._before_end
        return state | {"before_end": before} if state and before not in ([], state["own"]) else state

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_running": None}

    @property
    def has_begun(self) -> bool:
        """Whether the sampler has yielded the indices of a batch."""
        return self._sampler.drawn > 0

    def convert_states(self, states: Sequence[State], batches: int, random: State) -> State:
        """Return the state of this process for a pass that was begun by a different number of processes.

        Args:
            states: the states of those processes.
            batches: the number of batches of this process that correspond to their trained batches.
            random: the random states that its workers start from.
        """
        first = states[0]
        return {
            "kind": self.kind,
            "batches": batches,
            "begun": random,
            "started": random,
            "asked": first["asked"],  # the first process draws the order
            "own": first["own"],
            "prefetch_factor": -1,  # equals that of no loader, so that generators are not restored
            "set_up": {**_settings_of(self.loader), "samples": first["set_up"]["samples"]},
            "workers": {},
            "first": None,
            "last": None,
            "former": [{name: state[name] for name in ("set_up", "batches", "first", "last")} for state in states],
        }

    def begin_pass(self, *, with_old_workers: bool = False) -> None:
        """Record that a pass begins, with new workers or those of the last pass."""
        super().begin_pass(with_old_workers=with_old_workers)
        self._late, self._drawn_before = [], 0

    def _open(self, starts: dict[int, State], *, silent: bool = False) -> Iterator[Batch]:
        """Return an iterator of the dataloader that uses the recorded sampler. The dataloader keeps its own sampler.

        Args:
            starts: initial random states of the workers.
            silent: whether to send no indices to the workers yet. Default: False.
        """
        loader, view = self.loader, copy.copy(self.loader)

        vars(view)["sampler" if loader.batch_sampler is None else "batch_sampler"] = self._sampler
        if not loader.num_workers:
            return iter(view)
        self._workers = WorkerStates(starts, loader.num_workers, loader.prefetch_factor)
        own = (loader.worker_init_fn, loader.collate_fn)
        in_worker = WorkerRandom(*own, starts, self._workers.memory, self._share_epoch())
        vars(view).update(collate_fn=in_worker.collate, worker_init_fn=in_worker.start)
        loader.check_worker_number_rationality()
        self._sampler.is_silent = silent
        iterator: _WorkerIterator = bounded_like(loader, _WorkerIterator(view, self))
        self._sampler.is_silent = False
        self._running = weakref.ref(iterator)
        if self._persists:
            loader._iterator = iterator
        return iterator

    def _position_state(self) -> State:
        sampler, loader = self._sampler, self.loader
        if not loader.num_workers:
            self._batches = sampler.drawn
        state = {
            **self._common_state(),
            "started": self._started,
            "asked": sampler.initial_states,
            "first": sampler.proof_of(0),
            "last": sampler.proof_of(self._batches - 1) if loader.in_order else None,
        }
        if not loader.num_workers:
            state["exhausted"] = sampler.exhausted
        elif self._has_worker_states:
            state["workers"] = self._workers.state_dict()
        if loader.num_workers and not loader.in_order:
            state["drawn"], state["late"] = self._out_of_order()
        return state

    def _out_of_order(self) -> tuple[int, list[int]]:
        """Return the number of sampled batches, and the numbers of those that have not arrived."""
        iterator = None if self._running is None else self._running()
        if iterator is None:
            return self._batches, []
        late, before = self._late, self._drawn_before
        numbers = [late[i] if i < len(late) else before + i - len(late) for i in iterator._task_info]
        return self._sampler.drawn, sorted(numbers)

    def _resume(self, state: State, reasons: list[str]) -> Iterator[Batch]:
        loader, workers, is_fixed = self.loader, state.get("workers"), _is_deterministic(self.loader)
        if not reasons:
            reasons += random_states.differences(self.generators, state["own"])
        if state.get("inside") and not is_fixed:
            reasons.append(_INSIDE_A_BATCH)
        self._has_worker_states = not loader.num_workers or workers is not None or is_fixed
        if not self._has_worker_states:
            reasons.append("the position of the worker processes is unknown")
        random_states.restore(state["started"], own=self.generators)
        iterator = self._open(workers or {}, silent=True)
        if state["begun"] != state["started"]:
            random_states.restore(state["begun"], own=self.generators)
            iter(self._sampler)
        self._begun, self._started = state["begun"], state["started"]
        random_states.restore(state["asked"], own=self.generators)
        late, batches = state.get("late", []), state["batches"]
        if self._advance(iterator, batches, state["drawn"] if late else batches, late, state.get("exhausted", False)):
            reasons.append("the sampler draws from the global random state during the epoch, and so does other code")
        for ordinal, number in {"first": 0, "last": batches - 1}.items() if batches else ():
            saved, current = state[ordinal], self._sampler.proof_of(number)
            if saved is not None and saved != current and not (ordinal == "last" and state.get("inside")):
                reasons.append(_order_message(ordinal, saved, current))
                break
        reasons += _order_differences(loader, state.get("former", []))[:1]
        if not loader.in_order and loader.num_workers > 1:
            reasons.append("with in_order=False the order of batches depends on how fast the workers are")
        return iterator

    def _advance(self, iterator: Iterator[Batch], batches: int, drawn: int, late: list[int], exhausted: bool) -> bool:
        """Skip the batches that were sampled before, in a pass that was just opened.

        Args:
            iterator: the iterator of the pass.
            batches: the number of yielded batches.
            drawn: the number of sampled batches; more than ``batches`` if batches arrive out of order.
            late: the numbers of sampled batches that were not yielded.
            exhausted: whether a batch was requested after the sampler's last one. A RandomSampler then draws random
                numbers.

        Returns:
            Whether the sampler drew from the global random state after the first batch.
        """
        left, draws = self._sampler.skip(drawn + exhausted, late)
        self._batches, self._late, self._drawn_before = batches, list(late), drawn
        if isinstance(iterator, _WorkerIterator):
            iterator.send_indices(chain(left, self._sampler.rest()), batches % self.loader.num_workers)
        return draws

    def _skip(self, batches: int, starts: dict[int, State] | None = None) -> Iterator[Batch]:
        self.begin_pass()
        iterator = self._open({}, silent=True)
        self._advance(iterator, batches, batches, [], exhausted=False)
        return iterator

    def _follow(self, state: State) -> list[str]:
        is_stopped = self._persists and self.loader._iterator is None
        if is_stopped and state.get("workers") is not None and not _changes(state["set_up"], self.loader):
            self._resume(state, [])  # starts persistent workers
        return []


class _RecordedSampler:
    """Replaces the sampler of a dataloader, and records its batches.

    Args:
        sampler: yields the indices of one batch after the other.
        max_recent: number of the last batches to keep.
        generators: the generators that it may draw from.

    Attributes:
        drawn: number of batches that it has yielded in this pass.
        initial_states: the random states before the first batch; {} before that.
        exhausted: whether a batch was requested after its last one.
        is_silent: whether to yield nothing.
    """

    def __init__(self, sampler: Any, max_recent: int, generators: list[Generator]) -> None:
        self._sampler = sampler
        self._generators = generators
        self._recent: deque[Any] = deque(maxlen=max_recent)
        self._first: State | None = None
        self._indices: Iterator[Any] = iter(())
        self.drawn = 0
        self.initial_states: State = {}
        self.exhausted = self.is_silent = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_indices": iter(())}

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        self.drawn, self.initial_states, self.exhausted, self._first = 0, {}, False, None
        self._recent.clear()
        self._indices = one_pass(self._sampler)
        return iter(()) if self.is_silent else self.rest()

    def rest(self) -> Iterator[Any]:
        """Yield the batches that are left."""
        if not self.drawn:
            self.initial_states = random_states.capture(own=self._generators)
        for indices in self._indices:
            if not self.drawn:
                self._first = _fingerprint(indices)
            self.drawn += 1
            self._recent.append(indices)
            yield indices
        self.exhausted = True

    def skip(self, count: int, except_of: Container[int]) -> tuple[list[Any], bool]:
        """Draw ``count`` batches.

        Returns:
            The batches with numbers in ``except_of``, and whether the sampler drew from the global random state after
            the first batch.
        """
        batches, before = [], None
        for number, indices in enumerate(islice(self.rest(), count)):
            if number == 0:
                before = random_states.capture()
            if number in except_of:
                batches.append(indices)
        return batches, before is not None and before != random_states.capture()

    def proof_of(self, number: int) -> State | None:
        """Return the fingerprint of batch ``number``; None if it was not drawn, or is no longer kept."""
        if number == 0:
            return self._first
        distance = self.drawn - number
        return _fingerprint(self._recent[-distance]) if number > 0 and 0 < distance <= len(self._recent) else None


class _OwnedIterator:
    """A mixin for a pass with workers that send their states with each batch. It yields the batches without states.

    Attributes:
        owner: a weak reference to the loader that receives the states. With a strong one, the two would refer to each
            other, and the garbage collector could free this iterator in a forked worker.
    """

    owner: weakref.ref[ResumableLoader]

    def _next_data(self) -> Batch:
        marked: Marked = super()._next_data()  # type: ignore[misc]
        owner = self.owner()
        return marked[0] if owner is None else owner.take(marked)

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False, **options: Any) -> None:
        owner = self.owner()
        if not first_iter and owner is not None:
            self._drain(owner)
            owner.begin_pass(with_old_workers=True)
        super()._reset(loader, first_iter, **options)  # type: ignore[misc]

    def _drain(self: Any, owner: ResumableLoader) -> None:
        """Receive the prepared, unused batches of a pass that ends: they have changed the states of workers, too."""
        self._sampler_iter = iter(())
        interval = vars(self).get("_snapshot_interval")
        self._snapshot_interval = 0  # torchdata's: take no snapshots of these batches
        for _ in range(len(self._task_info)):
            try:
                owner.take(super()._next_data())  # type: ignore[misc]
            except StopIteration:
                break
            except Exception:  # an error in a batch that is not used is not raised
                continue
        self._snapshot_interval = interval


def _owner_of(iterator: Any) -> Any:
    """Return the loader that receives the states of an iterator's workers, or None."""
    return iterator.owner() if isinstance(iterator, _OwnedIterator) else None


@cache
def _with_owner(kind: Any) -> type:
    """Return a subclass of an iterator class that is also an :class:`_OwnedIterator`."""
    return type(kind.__name__, (_OwnedIterator, kind), {})


class _WorkerIterator(_OwnedIterator, _MultiProcessingDataLoaderIter):
    """A pass with worker processes over a map-style dataset.

    Args:
        loader: the dataloader, with methods of a :class:`WorkerRandom` as ``worker_init_fn`` and ``collate_fn``.
        owner: the loader that receives the states.
    """

    def __init__(self, loader: DataLoader[Any], owner: MapStyleLoader) -> None:
        self.owner = weakref.ref(owner)
        super().__init__(loader)

    def send_indices(self, indices: Iterator[Any], worker: int) -> None:
        """Send ``indices`` to the workers, the first one to ``worker``. Requires that nothing was sent before."""
        self._sampler_iter = indices
        self._worker_queue_idx_cycle = cycle([*range(worker, self._num_workers), *range(worker)])
        for _ in range(self._prefetch_factor * self._num_workers):
            self._try_put_index()


_INSIDE_A_BATCH = "the checkpoint was written inside a batch, which had been prepared already"


def _order_message(ordinal: str, saved: State, current: State | None) -> str:
    def text(proof: State) -> str:
        rest = proof["count"] - len(proof["head"])
        return f"{proof['head']}" + (f" and {rest} more" if rest > 0 else "")

    given = "nothing" if current is None else text(current)
    return (
        f"the {ordinal} trained batch of this epoch had the samples {text(saved)}; the same dataset, sampler and seed"
        f" would give them again, but now this batch has {given}"
    )


def _order_differences(loader: DataLoader[Any], former: list[State]) -> list[str]:
    """Return why an epoch begun by a different number of processes had other samples; empty if it had the same."""
    sampler, reasons = getattr(loader.batch_sampler, "sampler", None), []
    for rank, state in enumerate(former):
        batch_size, processes = state["set_up"]["batch_size"], state["set_up"]["world_size"]
        if not isinstance(sampler, ElasticSampler) or processes != len(former):
            break  # several processes had the same samples
        for ordinal, number in ("first", 0), ("last", state["batches"] - 1):
            saved, current = state[ordinal], _fingerprint(sampler.batch_of(number, rank, processes, batch_size))
            if saved is not None and saved != current:
                reasons.append(_order_message(ordinal, saved, current))
    return reasons


def _settings_of(loader: DataLoader[Any]) -> State:
    """Return the settings that determine the order and content of batches."""
    dataset: Any = loader.dataset
    sampler = loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
    return {
        "num_workers": loader.num_workers,
        "persistent_workers": bool(loader.persistent_workers and loader.num_workers),
        "batch_size": getattr(loader.batch_sampler, "batch_size", loader.batch_size),
        "drop_last": bool(getattr(loader.batch_sampler, "drop_last", loader.drop_last)),
        "samples": None if isinstance(dataset, IterableDataset) else length_of(dataset),
        "world_size": getattr(sampler, "num_replicas", 1),
        "in_order": loader.in_order,
    }


def length_of(dataset: Any) -> int | None:
    """Return the number of samples of a dataset, or None if it has no length."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _changes(saved: State, loader: Any) -> list[str]:
    """Return the changed settings that lead to other batches."""
    if not isinstance(loader, DataLoader):
        return []
    current = _settings_of(loader)
    names = {"samples": "the number of samples", "world_size": "the world size"}
    harmless = {"num_workers", "in_order"} if _is_deterministic(loader) else set()
    return [
        f"{names.get(name, name)} was {saved[name]} and is {current[name]}"
        for name in current
        if saved.get(name) != current[name] and name not in harmless
    ]


def _is_deterministic(loader: DataLoader[Any]) -> bool:
    """Return whether the datasets and ``collate_fn`` are plain ones of torch, which draw no random numbers."""

    def is_fixed(dataset: Any) -> bool:
        if type(dataset) is Subset:
            return is_fixed(dataset.dataset)
        if type(dataset) is ConcatDataset:
            return all(map(is_fixed, dataset.datasets))
        if type(dataset) is StackDataset:
            parts = dataset.datasets
            return all(map(is_fixed, parts.values() if isinstance(parts, dict) else parts))
        return type(dataset) in (TensorDataset, list, tuple, range)

    return loader.collate_fn in (_collate, _convert) and is_fixed(loader.dataset)


def _fingerprint(indices: Any) -> State:
    """Return a fingerprint of a batch's indices."""
    plain = _to_plain(indices)
    flat = plain if isinstance(plain, list) else [plain]
    head = [index if isinstance(index, int) else repr(index)[:40] for index in flat[:4]]
    return {"head": head, "count": len(flat), "digest": hashlib.sha256(repr(plain).encode()).hexdigest()}


def _to_plain(indices: Any) -> Any:
    if isinstance(indices, torch.Tensor | np.ndarray | np.generic):
        return indices.tolist()
    if isinstance(indices, list | tuple):
        return [_to_plain(index) for index in indices]
    if isinstance(indices, dict):
        return [[repr(key), _to_plain(value)] for key, value in indices.items()]
    return indices if isinstance(indices, int | float | str | bytes | None) else type(indices).__qualname__
