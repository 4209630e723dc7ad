"""Dataloaders with a pass that can be resumed in another process.

A :class:`ResumableLoader` wraps a dataloader and tracks the position in its pass. It follows torchdata's convention:
``state_dict`` returns the position, and after ``load_state_dict`` the next iteration yields the rest of the pass. These
are the same samples in the same order, prepared with the same random numbers, also in workers. If the pass was over,
the next iteration is the following pass. There are three kinds:

``MapStyleLoader``
    A ``DataLoader`` with a map-style dataset. Its sampler is iterated again from its initial random state. The indices
    of trained batches are compared with the saved ones and dropped: no sample is loaded.
``StatefulLoader``
    A loader that has ``state_dict`` and ``load_state_dict`` resumes itself, unless its workers drew random numbers that
    are in no state: then its trained batches are loaded again, too.
``ResumableLoader``
    Anything else: the trained batches are loaded again, and dropped, unless its iterator has a state.

A state belongs to one process. It contains the number of trained batches and, in ``set_up``, the batch size and the
number of processes that shared the samples. Together they determine how many samples of the epoch were used. A run with
a different number of processes converts the states (:meth:`MapStyleLoader.convert_state`), if the samples come from an
:class:`~trainer.data.elastic.ElasticSampler`.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, cycle, islice, repeat
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from trainer.data.epochs import objects_with_set_epoch
from trainer.data.worker_random import WorkerRandom, WorkerStates, recorded
from trainer.data.workers import bounded_like
from trainer.state import random_states
from trainer.state.random_states import Generator, State

Batch = Any


class ResumableLoader:
    """A dataloader, or any other iterable of batches, and the position in its pass.

    Iterating it draws the same random numbers as iterating the dataloader. If its iterator has ``get_state`` and
    ``set_state`` (grain's), a resume uses them; otherwise it loads the earlier batches again. Subclasses avoid this.

    Args:
        loader: the dataloader.
        generators: the random generators that it holds. Default: None, they are searched for.

    """

    kind = "replayed"

    def __init__(self, loader: Any, generators: list[Generator] | None = None) -> None:
        self.loader = loader
        self.generators = random_states.find(loader) if generators is None else generators
        self._persists = isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers
        self._records_workers = self._persists and _uses_default_iteration(loader)
        self._begun: State = {}  # the random states when the pass began
        self._started: State = {}  # the random states when the workers were started: in this pass, or an earlier one
        self._first = 0  # number of batches of the pass that an earlier process has yielded
        self._batches = 0  # number of batches that the pass has yielded
        self._workers: WorkerStates | None = None  # None if the states of the workers are not recorded
        self._iterator: Any = None  # that of the pass, if it has a state; or the one that persists
        self._resumed: Iterator[Batch] | None = None  # the pass of the next iteration
        self._finished: State = {}  # the state of a pass that was over, until the next one begins
        self.epoch = 0
        self._shared_epoch: torch.Tensor | None = None  # for persistent workers

    def start_epoch(self, epoch: int) -> None:
        """Set the epoch, also for persistent workers, which have copies of the dataset."""
        self.epoch = epoch
        if self._shared_epoch is not None:
            self._shared_epoch[0] = epoch

    def __getstate__(self) -> dict[str, Any]:
        """Leave the current pass out of copies."""
        return vars(self) | {"_resumed": None, "_iterator": None}

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def has_begun(self) -> bool:
        """Whether the pass has yielded a batch."""
        return self._batches > 0

    def __iter__(self) -> Iterator[Batch]:
        resumed, self._resumed, self._finished = self._resumed, None, {}
        return self._begin() if resumed is None else resumed

    def replays(self, state: State) -> bool:
        """Return whether a resume inside the pass in ``state`` loads the trained batches again."""
        is_in_memory = isinstance(self.loader, Sequence)
        return bool(state.get("batches")) and not is_in_memory and ("iterator" not in state or self._persists)

    def close(self) -> None:
        """Drop the pass. Its position can still be read."""
        self._finished = self._finished or (self._position_state() if self._begun else {})
        self._resumed = self._iterator = None

    def state_dict(self) -> State:
        """Return the position in the pass: tensors and plain containers. {} before the first pass."""
        state = self._finished or (self._position_state() if self._begun else {})
        return {**state, "own": random_states.states_of(self.generators), "epoch": self.epoch} if state else {}

    def load_state_dict(self, state: State) -> list[str]:
        """Restore a position: the next iteration yields the rest of its pass. Changes this process's random states.

        Args:
            state: the return value of :meth:`state_dict`, with an optional key ``is_over``: whether the pass was over.
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
        reasons = _changes(state, self.loader)
        self._resumed = self._resume(state, reasons)
        if state["prefetch_factor"] == self._prefetch_factor:  # otherwise the sampler is ahead by more or fewer batches
            random_states.set_states(self.generators, state["own"])
        return reasons

    def begin_pass(self, *, with_old_workers: bool = False) -> None:
        """Record that a pass begins, with new workers or those of the last pass."""
        self._begun, self._first, self._batches = random_states.capture(own=self.generators), 0, 0
        if not with_old_workers:
            self._started, self._workers = self._begun, None

    @property
    def _prefetch_factor(self) -> int | None:
        return getattr(self.loader, "prefetch_factor", None)

    def _begin(self) -> Iterator[Batch]:
        """Return an iterator over a new pass, with new workers or those of the last pass."""
        is_running = self._persists and self.loader._iterator is not None
        self.begin_pass(with_old_workers=is_running)
        return self._count_batches(iter(self.loader) if is_running else self._start({}))

    def _start(self, starts: dict[int, State] | None) -> Iterator[Batch]:
        """Return an iterator of the dataloader with new workers, which start from the random states ``starts``."""
        iterator: Iterator[Batch]
        if not self._records_workers:
            iterator = iter(self.loader)
        else:
            worker = self._record_workers(starts or {})
            with recorded(self.loader, worker, wraps_dataset=_uses_default_iteration(self.loader)):
                iterator = iter(self.loader)
        self._iterator = iterator if self._keeps(iterator) else None
        return iterator

    def _keeps(self, iterator: Iterator[Batch]) -> bool:
        """Return whether to keep the iterator of a pass."""
        return _has_methods(iterator, "get_state", "set_state")

    def _record_workers(self, starts: dict[int, State]) -> WorkerRandom:
        """Return the functions for new workers, which start from the random states ``starts``."""
        loader, self._shared_epoch = self.loader, None
        self._workers = WorkerStates(starts, loader.num_workers, loader.prefetch_factor)
        if self._persists and objects_with_set_epoch(loader.dataset):
            self._shared_epoch = torch.tensor([self.epoch])
            self._shared_epoch.share_memory_()  # type: ignore[no-untyped-call]
        return WorkerRandom(loader, starts, self._workers.memory, self._shared_epoch)

    def _resume(self, state: State, reasons: list[str]) -> Iterator[Batch]:
        """Return an iterator over the rest of the pass in ``state``. Appends to ``reasons`` why it may differ."""
        if not state["is_first"]:
            reasons += self._lost_by_workers(state)
        random_states.restore(state["started"], own=self.generators)
        iterator = self._begin()
        if self._iterator is not None and "iterator" in state:
            self._iterator.set_state(state["iterator"])
            self._batches = state["batches"]
        else:
            deque(islice(iterator, state["batches"]), maxlen=0)
        self._begun, self._started = state["begun"], state["started"]
        return iterator

    def _skip(self, batches: int) -> Iterator[Batch]:
        """Return an iterator over a new pass without its first ``batches``."""
        iterator = self._begin()
        deque(islice(iterator, batches), maxlen=0)
        return iterator

    def _follow(self, state: State) -> list[str]:
        """Restore everything that affects the pass after the one in ``state``, except random generators.

        Returns:
            The reasons why that pass may be different; empty if it is the same.
        """
        if not self._persists or self.loader._iterator is not None or _changes(state, self.loader):
            return []
        random_states.restore(state["started"], own=self.generators)
        self._start({})  # the loader keeps these workers for the next pass
        self._begun, self._started = state["begun"], state["started"]
        return self._lost_by_workers(state)

    def _lost_by_workers(self, state: State) -> list[str]:
        """Return the reason why persistent workers cannot be started as they were; empty if they can be."""
        if not self._persists or not state.get("have_changed", True):
            return []
        return [
            "the random states and attributes of the dataset in persistent workers, which have changed, are not saved"
            " for this kind of dataloader: use persistent_workers=False, or a map-style dataset with torch's DataLoader"
        ]

    def _position_state(self) -> State:
        state = {
            "kind": self.kind,
            "batches": self._batches,
            "begun": self._begun,
            "started": self._started,
            "is_first": self._started == self._begun,  # the workers, if any, were started for this pass
            "set_up": _settings_of(self.loader) if isinstance(self.loader, DataLoader) else {},
            "prefetch_factor": self._prefetch_factor,
        }
        if self._workers is not None:
            state["have_changed"] = self._workers.have_changed
        if _has_methods(self._iterator, "get_state", "set_state"):
            state["iterator"] = self._iterator.get_state()
        return state

    def _worker_states(self) -> dict[int, State] | None:
        """Return the states of the workers that take turns in a pass; None if they are unknown."""
        if self._workers is None:
            return None
        return self._workers.state_dict(self._first % self.loader.num_workers, self._batches - self._first)

    def _count_batches(self, iterator: Iterator[Any]) -> Iterator[Batch]:
        for batch in map(next, repeat(iterator)):  # not `in iterator`: see `one_pass`
            self._batches += 1
            yield batch


def one_pass(source: Iterable[Any]) -> Iterator[Any]:
    """Begin a pass over ``source``, and return its items.

    Calls ``iter`` only once, because it restarts a loader or sampler that is its own iterator.
    """
    return map(next, repeat(iter(source)))


def to_the_end(iterator: Iterator[Batch], loader: Any, done: int = 0) -> Iterator[Batch]:
    """Return the batches of a pass, and read the sampler to its end before the last batch.

    A ``for`` loop does so after the last batch, and workers read ahead. It runs the code after the last ``yield`` of a
    sampler, which may count epochs, and a ``RandomSampler`` draws from its generator. Other data than a map-style
    dataset is not read beyond its length, because it may be a stream that continues in the next pass.

    Args:
        iterator: the pass.
        loader: the dataloader.
        done: the number of batches that the pass has yielded before. Default: 0.
    """
    if not _is_map_style(loader) or loader.num_workers or (left := (length_of(loader) or 0) - done) <= 0:
        return iterator
    return chain(islice(iterator, left - 1), _read_ahead(iterator))


def _read_ahead(iterator: Iterator[Batch]) -> Iterator[Batch]:
    batches = deque(islice(iterator, 2))  # one, unless the length is an estimate
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


def _has_methods(value: Any, *names: str) -> bool:
    return all(callable(getattr(value, name, None)) for name in names)


def _has_position(value: Any) -> bool:
    return _has_methods(value, "state_dict", "load_state_dict")


def _has_state(value: Any) -> bool:
    """Return whether an object has ``load_state_dict``, and a ``state_dict`` that needs no arguments."""
    if not _has_position(value):
        return False
    try:
        inspect.signature(value.state_dict).bind()
    except (TypeError, ValueError):
        return False
    return True


class StatefulLoader(ResumableLoader):
    """A loader that has ``state_dict`` and ``load_state_dict``, such as torchdata's ``StatefulDataLoader``.

    Its position is read and restored through these methods only. The ``StatefulDataLoader`` does not save the random
    states of its workers; for a map-style dataset, this class does.
    """

    kind = "stateful"

    def __init__(self, loader: Any) -> None:
        # without objects that have `load_state_dict`: inside a pass, it sets their attributes for the next iteration
        super().__init__(loader, random_states.find(loader, unwatched=_has_position))
        is_loader = isinstance(loader, DataLoader)
        is_torchdatas = is_loader and type(loader).load_state_dict.__module__.startswith("torchdata.")
        self._records_workers = is_loader and loader.num_workers > 0 and (is_torchdatas or self._records_workers)
        self._is_generator = is_loader and inspect.isgeneratorfunction(type(loader).__iter__)
        self._attributes = random_states.find(loader) if is_torchdatas or not is_loader else []
        # begins each pass from the start, but without workers its dataset may continue where it was
        own = (loader.dataset if not loader.num_workers else None) if is_torchdatas else loader
        self._lasting: Any = own if _has_state(own) else None
        samplers, dataset = ((loader.sampler, loader.batch_sampler), loader.dataset) if is_loader else ((), None)
        self._samplers = random_states.find(*samplers, unwatched=_has_position, except_in=dataset)

    def _sampler_attributes(self) -> list[Any]:
        return [one for one in map(random_states.without_generators, random_states.states_of(self._samplers)) if one]

    def replays(self, state: State) -> bool:
        """Return whether a resume loads the trained batches again, as its ``state_dict`` lacks states of workers."""
        if not self._records_workers or not state.get("have_changed", True) or not state.get("batches"):
            return False
        return state.get("workers") is None or state["state"].get("_steps_since_snapshot", 0) > 0

    def _resume(self, state: State, reasons: list[str]) -> Iterator[Batch]:
        if self._persists and not state["is_first"]:
            reasons.append("it is not the first pass of persistent workers: use persistent_workers=False")
        elif self.replays(state):
            return super()._resume(state, reasons)
        self.loader.load_state_dict(state["state"])
        random_states.restore(state["begun"], own=self.generators)
        self.begin_pass()
        if self._is_generator:
            iterator = self._iterator = self._late_start(state["begun"])
        else:
            iterator = self._start(state.get("workers"))
        self._begun, self._started = state["begun"], state["started"]
        self._first = self._batches = state["batches"]
        if "sampler" in state and self._sampler_attributes() != state["sampler"]:
            reasons.append("the sampler changes whenever it is iterated, and resuming iterates it more often")
        return self._count_batches(iterator)

    def _begin(self) -> Iterator[Batch]:
        if self._is_generator and self._iterator is not None and (self._first or self._left <= 0):
            with random_states.isolated():
                self._read_to_the_end(self._iterator)
        return super()._begin()

    def _keeps(self, iterator: Iterator[Batch]) -> bool:
        return self._is_generator

    @property
    def _left(self) -> int:
        return (length_of(self.loader) or 0) - self._batches

    def _read_to_the_end(self, iterator: Iterator[Batch]) -> None:
        """Execute the last lines of a generator, which follow its last ``yield``, as a ``for`` loop does.

        A loader that resumes a position may do so in each pass until these lines. The batches that a limit excludes are
        loaded for this in the pass that was resumed.
        """
        deque(islice(iterator, max(self._left, 0) + 1), maxlen=0)

    def _late_start(self, begun: State) -> Iterator[Batch]:
        """Yield the batches of a generator. Its DataLoader draws the seed that it drew after ``begun``.

        It draws this number when the first batch is requested, which must not change the current random states.
        """
        loader, own = self.loader, self.loader.generator
        loader.generator = torch.Generator()
        random_states.set_state(loader.generator, begun["own"][self.generators.index(own)] if own else begun["torch"])
        try:
            iterator = iter(loader)
            first = list(islice(iterator, 1))
        finally:
            loader.generator = own
        yield from chain(first, iterator)

    def _follow(self, state: State) -> list[str]:
        reasons = super()._follow(state)
        if self._lasting is not None and "lasting" in state:
            self._lasting.load_state_dict(state["lasting"])
            if self._is_generator:
                self._batches = state["batches"]
                self._read_to_the_end(iter(self._lasting))
        random_states.set_states(self._attributes, state.get("attributes", []))
        return reasons

    def _position_state(self) -> State:
        state = {**super()._position_state(), "state": self.loader.state_dict()}
        state["sampler"] = self._sampler_attributes()
        state["attributes"] = random_states.states_of(self._attributes)
        if self._lasting is not None:
            state["lasting"] = state["state"] if self._lasting is self.loader else self._lasting.state_dict()
        if state["is_first"] and self._records_workers and not isinstance(self.loader.dataset, IterableDataset):
            state["workers"] = self._worker_states()
        return state


class MapStyleLoader(ResumableLoader):
    """A map-style ``DataLoader``, of a class that iterates as ``DataLoader`` does."""

    kind = "map-style"

    def replays(self, state: State) -> bool:
        """Return False: no sample is loaded again."""
        return False

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader, generators_of(loader))
        sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        max_recent = (loader.prefetch_factor or 0) * loader.num_workers + 2
        self._sampler = _RecordedSampler(sampler, max_recent, self.generators)

    def __iter__(self) -> Iterator[Batch]:
        return to_the_end(super().__iter__(), self.loader, self._batches)

    @property
    def has_begun(self) -> bool:
        """Whether the sampler has yielded the indices of a batch."""
        return self._sampler.drawn > 0

    def convert_state(self, first: State, batches: int, random: State) -> State:
        """Return the state of this process for a pass that was begun by a different number of processes.

        Args:
            first: the state of the first of these processes.
            batches: the number of batches of this process that correspond to their trained batches.
            random: the random states that its workers start from.
        """
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
        }

    def _begin(self) -> Iterator[Batch]:
        running = self.loader._iterator if self._persists else None
        if running is not None and running is self._iterator:
            assert self._workers is not None
            self._workers.end_pass(self._first % self.loader.num_workers, self._sampler.drawn - self._first)
        self.begin_pass(with_old_workers=running is not None)
        if running is None:
            return self._count(self._open({}))
        if running is not self._iterator:  # other code started these workers, with its own sampler
            self._workers = None
        return self._count_batches(iter(self.loader))

    def _count(self, iterator: Iterator[Batch]) -> Iterator[Batch]:
        """Count the batches of workers. Without workers, the sampler does so."""
        return self._count_batches(iterator) if self.loader.num_workers else iterator

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
        worker = self._record_workers(starts)
        loader.check_worker_number_rationality()
        self._sampler.is_silent = silent
        with recorded(view, worker, wraps_dataset=self._shared_epoch is not None):
            iterator: _WorkerIterator = bounded_like(loader, _WorkerIterator(view))
        self._sampler.is_silent = False
        if self._persists:
            loader._iterator = self._iterator = iterator
        return iterator

    def _position_state(self) -> State:
        sampler, loader = self._sampler, self.loader
        if not loader.num_workers:
            self._batches = sampler.drawn
        state = {
            **super()._position_state(),
            "asked": sampler.initial_states,
            "first": sampler.proof_of(0),
            "last": sampler.proof_of(self._batches - 1) if loader.in_order else None,
        }
        return state | ({"workers": self._worker_states()} if loader.num_workers else {"exhausted": sampler.exhausted})

    def _resume(self, state: State, reasons: list[str]) -> Iterator[Batch]:
        loader, workers, batches = self.loader, state.get("workers"), state["batches"]
        if not reasons:
            reasons += random_states.differences(self.generators, state["own"])
        if loader.num_workers and workers is None and state.get("have_changed", True):
            reasons.append("the states of its workers are unknown: other code started them, or they exceed 64 KiB")
        random_states.restore(state["started"], own=self.generators)
        iterator = self._open(workers or {}, silent=True)
        if state["begun"] != state["started"]:
            random_states.restore(state["begun"], own=self.generators)
            iter(self._sampler)
        self._begun, self._started = state["begun"], state["started"]
        random_states.restore(state["asked"], own=self.generators)
        if self._advance(iterator, batches, exhausted=state.get("exhausted", False)):
            reasons.append("the sampler draws from the global random state during the epoch, and so does other code")
        for ordinal, number in {"first": 0, "last": batches - 1}.items() if batches else ():
            saved, current = state[ordinal], self._sampler.proof_of(number)
            if saved is not None and saved != current:
                reasons.append(_order_message(ordinal, saved, current))
                break
        if not loader.in_order and loader.num_workers > 1:
            reasons.append("with in_order=False the order of batches depends on how fast the workers are")
        return self._count(iterator)

    def _advance(self, iterator: Iterator[Batch], batches: int, *, exhausted: bool) -> bool:
        """Skip the first ``batches`` in a pass that was just opened.

        Args:
            iterator: the iterator of the pass.
            batches: the number of yielded batches.
            exhausted: whether a batch was requested after the sampler's last one. A RandomSampler then draws random
                numbers.

        Returns:
            Whether the sampler drew from the global random state after the first batch.
        """
        draws = self._sampler.skip(batches + exhausted)
        self._first = self._batches = batches
        if isinstance(iterator, _WorkerIterator):
            iterator.send_indices(self._sampler.rest(), batches % self.loader.num_workers)
        return draws

    def _skip(self, batches: int) -> Iterator[Batch]:
        self.begin_pass()
        iterator = self._open({}, silent=True)
        self._advance(iterator, batches, exhausted=False)
        return self._count(iterator)

    def _follow(self, state: State) -> list[str]:
        is_stopped = self._persists and self.loader._iterator is None
        if is_stopped and state.get("workers") is not None and not _changes(state, self.loader):
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

    def skip(self, count: int) -> bool:
        """Draw ``count`` batches. Return whether the sampler drew global random numbers after the first one."""
        batches = islice(self.rest(), count)
        next(batches, None)
        before = random_states.capture()
        deque(batches, maxlen=0)
        return before != random_states.capture()

    def proof_of(self, number: int) -> State | None:
        """Return the fingerprint of batch ``number``; None if it was not drawn, or is no longer kept."""
        if number == 0:
            return self._first
        distance = self.drawn - number
        return _fingerprint(self._recent[-distance]) if number > 0 and 0 < distance <= len(self._recent) else None


class _WorkerIterator(_MultiProcessingDataLoaderIter):
    """A pass with worker processes over a map-style dataset."""

    def send_indices(self, indices: Iterator[Any], worker: int) -> None:
        """Send ``indices`` to the workers, the first one to ``worker``. Requires that nothing was sent before."""
        self._sampler_iter = indices
        self._worker_queue_idx_cycle = cycle([*range(worker, self._num_workers), *range(worker)])
        for _ in range(self._prefetch_factor * self._num_workers):
            self._try_put_index()


def _order_message(ordinal: str, saved: State, current: State | None) -> str:
    def text(proof: State) -> str:
        rest = proof["count"] - len(proof["head"])
        return f"{proof['head']}" + (f" and {rest} more" if rest > 0 else "")

    given = "nothing" if current is None else text(current)
    return (
        f"the {ordinal} trained batch of this epoch had the samples {text(saved)}; the same dataset, sampler and seed"
        f" would give them again, but now this batch has {given}"
    )


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


def _changes(state: State, loader: Any) -> list[str]:
    """Return the changed settings that lead to other batches than those that follow the position in ``state``."""
    if not isinstance(loader, DataLoader):
        return []
    saved, current = state["set_up"], _settings_of(loader)
    names = {"samples": "the number of samples", "world_size": "the world size"}
    harmless = set() if state.get("have_changed", True) else {"num_workers", "in_order"}  # nothing is random
    return [
        f"{names.get(name, name)} was {saved[name]} and is {current[name]}"
        for name in current
        if saved.get(name) != current[name] and name not in harmless
    ]


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
