"""Dataloaders with a pass that can be resumed in another process.

A :class:`ResumableLoader` wraps a dataloader and tracks the position in its pass. It follows torchdata's convention:
``state_dict`` returns the position, and after ``load_state_dict`` the next iteration yields the rest of the pass. These
are the same samples in the same order, prepared with the same random numbers, also in workers. If the pass was over,
the next iteration is the following pass. There are three kinds:

``MapStyleLoader``
    A ``DataLoader`` with a map-style dataset. Its sampler is iterated again from its initial random state. The indices
    of the last trained batch are compared with the saved ones: no sample is loaded.
``StatefulLoader``
    A loader that has ``state_dict`` and ``load_state_dict`` resumes itself, unless its workers have changed: they are
    in no state, so its trained batches are loaded again.
``ResumableLoader``
    Anything else: the trained batches are loaded again, and dropped, unless its iterator has a state.

A state belongs to one process. It contains the number of trained batches and, in ``set_up``, the batch size and the
number of processes that shared the samples. Together they determine how many samples of the epoch were used. A run with
a different number of processes converts the states (:meth:`MapStyleLoader.convert_state`), if the samples come from an
:class:`~trainer.data.elastic_sampling.ElasticSampler`.
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
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from trainer.data.loader_parts import objects_with_set_epoch
from trainer.data.worker_random import WorkerRandom, recorded, states_of
from trainer.data.workers import bounded_like
from trainer.errors import rank_zero_warn
from trainer.state import random_states
from trainer.state.generators import is_random
from trainer.state.random_states import Generator, State
from trainer.state.snapshot import Snapshot, differences

Batch = Any

_LONG = 40
"""Number of characters of the samples in a message."""


class ResumableLoader:
    """A dataloader, or any other iterable of batches, and the position in its pass.

    Iterating it draws the same random numbers as iterating the dataloader. If its iterator has ``get_state`` and
    ``set_state`` (grain's), a resume uses them; otherwise it loads the earlier batches again. Subclasses avoid this.

    Args:
        loader: the dataloader.
        generators: the random generators that it holds. Default: None, they are searched for.
        shares_iterator: whether a DataLoader with persistent workers shares its iterator with other code that iterates
            it. Default: False, a copy of the DataLoader is iterated.
    """

    kind = "replayed"

    def __init__(
        self, loader: Any, generators: list[Generator] | None = None, *, shares_iterator: bool = False
    ) -> None:
        self.loader = loader
        self.generators = random_states.find(loader) if generators is None else generators
        self.persists = isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers
        self._records_workers = self.persists and _uses_default_iteration(loader)
        self._begun: State = {}  # the random states when the pass began
        self._started: State = {}  # the random states when the workers were started: in this pass, or an earlier one
        self._batches = 0  # number of batches that the pass has yielded
        self._worker: WorkerRandom | None = None  # None if the states of the workers are not recorded
        self._is_copied = self.persists and not shares_iterator
        self._running: Any = _copied(loader) if self._is_copied else loader  # it has the persistent workers
        self._iterator: Any = None  # that of the pass, if it is needed
        self._resumed: Iterator[Batch] | None = None  # the pass of the next iteration
        self._finished: State = {}  # the state of a pass that was over, until the next one begins
        self._copied: Snapshot | None = None  # the dataset that persistent workers have copied; None after a warning
        self._sent: State = {}  # its changes since then that the workers follow
        self.epoch = 0

    def warn_of_stale_copies(self) -> None:
        """Warn once if the dataset has changed while persistent workers have copies of it."""
        if self._copied is None:
            return
        now, objects, names = self._copied.read(), self._copied.objects, list[str]()
        for path, name in sorted(differences(now, self._sent) | differences(self._sent, now)):
            value = getattr(objects[path], name, None)
            is_seen = isinstance(value, Tensor) and value.is_shared()  # type: ignore[no-untyped-call]
            if not (is_seen or name[0] == ":" or is_random(value)):
                names.append(f"{type(objects[path]).__name__}.{name}")
        if names:
            self._copied = None
            rank_zero_warn(
                f"{', '.join(names)} changed while persistent workers of the dataloader have copies of the dataset from"
                " before, so they never see the change. Use DataLoader(persistent_workers=False), or change the"
                " dataset in a method `set_epoch(epoch)`, which is also called in the workers."
            )

    def _note_copies(self) -> None:
        if self.persists:
            snapshots: list[Any] = random_states.find(self.loader.dataset)
            self._copied, self._sent = (snapshots[0], snapshots[0].read()) if snapshots else (None, {})

    def start_epoch(self, epoch: int) -> None:
        """Set the epoch, also for persistent workers, which have copies of the dataset."""
        self.epoch = epoch
        if self._copied is not None:
            self._sent = self._copied.read()
        if self._worker is not None:
            self._worker.set_epoch(epoch)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the current pass out of copies."""
        return vars(self) | {"_resumed": None, "_iterator": None, "_running": self.loader, "_late": None}

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def has_begun(self) -> bool:
        """Whether the pass has yielded a batch."""
        return self._batches > 0

    def __iter__(self) -> Iterator[Batch]:
        resumed, self._resumed, self._finished = self._resumed, None, {}
        return to_the_end(self._begin() if resumed is None else resumed, self.loader, self._batches)

    def replays(self, state: State) -> bool:
        """Return whether a resume inside the pass in ``state`` loads the trained batches again."""
        is_in_memory = isinstance(self.loader, Sequence)
        return bool(state.get("batches")) and not is_in_memory and ("iterator" not in state or self.persists)

    def close(self) -> None:
        """Drop the pass. Its position can still be read."""
        self._finished = self._finished or (self._position_state() if self._begun else {})
        self._resumed = self._iterator = None
        if self.persists:
            vars(self._running)["_iterator"] = None

    def state_dict(self) -> State:
        """Return the position in the pass: tensors and plain containers. {} before the first pass."""
        state = self._finished or (self._position_state() if self._begun else {})
        return {**state, "own": random_states.states_of(self.generators), "epoch": self.epoch} if state else {}

    def load_state_dict(self, state: State) -> list[str]:
        """Restore a position: the next iteration yields the rest of its pass. Changes this process's random states.

        Args:
            state: the return value of :meth:`state_dict`, with an optional key ``is_over``, whether the pass was over.
                Without ``own``, random generators of the dataloader are not restored. If the state is of another kind
                of loader, ``batches`` batches are skipped, and nothing else is restored.

        Returns:
            The reasons why the following batches may differ from those of an uninterrupted run; empty if they do not.
            If the pass was over, changed settings are no reason, because data may change between two epochs.
        """
        self._resumed, self._finished, reasons = None, {}, list[str]()
        if not state:
            return []
        if state.get("is_over"):
            self._finished = state
            if state["kind"] != self.kind:
                return []
            if self.persists and "epoch" in state:
                for dataset in objects_with_set_epoch(self.loader.dataset):  # new workers copy it, with its epoch
                    dataset.set_epoch(state["epoch"])
                self.epoch = state["epoch"]
            reasons = self._follow(state)
        elif state["kind"] != self.kind:
            self._resumed = self._skip(state["batches"])
            class_ = type(self.loader).__name__
            return [f"the dataloader is of another kind than the one that was saved: it is now a {class_}"]
        else:
            reasons = _changes(state, self.loader)
            self._resumed = self._resume(state, reasons)
        random_states.set_states(self.generators, state.get("own", []))
        return reasons

    def _begin(self) -> Iterator[Batch]:
        """Return an iterator over a new pass, with new workers or those of the last pass."""
        is_running = self.persists and self._running._iterator is not None
        self._begun, self._batches = random_states.capture(objects=self.generators), 0
        if is_running:
            self.warn_of_stale_copies()
            return self._count_batches(iter(self._running))
        self._started = self._begun
        return self._count_batches(self._start({}))

    def _start(self, starts: dict[int, State]) -> Iterator[Batch]:
        """Return an iterator of the dataloader with new workers, which start from the random states ``starts``."""
        iterator: Iterator[Batch]
        self._note_copies()
        if self._is_copied:
            self._running = _copied(self.loader)
        if not self._records_workers:
            iterator = iter(self._running)
        else:
            self._worker = WorkerRandom(self.loader, starts, self.epoch, sends=False)
            with recorded(self._running, self._worker, wraps=_uses_default_iteration(self.loader)):
                iterator = iter(self._running)
        if self._is_copied:
            iterator = bounded_like(self.loader, iterator)
        self._iterator = iterator if _has_methods(iterator, "get_state", "set_state") else None
        return iterator

    def _resume(self, state: State, reasons: list[str]) -> Iterator[Batch]:
        """Return an iterator over the rest of the pass in ``state``. Appends to ``reasons`` why it may differ."""
        reasons += self._lost_by_workers(state)
        random_states.restore(state["started"], objects=self.generators)
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
        if not self.persists or self._running._iterator is not None or _changes(state, self.loader):
            return []
        random_states.restore(state["started"], objects=self.generators)
        self._start({})  # these workers stay for the next pass
        self._begun, self._started = state["begun"], state["started"]
        return self._lost_by_workers({**state, "is_first": False})

    def _lost_by_workers(self, state: State) -> list[str]:
        """Return the reason why persistent workers cannot be started as they were; empty if they can be."""
        if not self.persists or state["is_first"] or not state.get("have_changed", True):
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
            "set_up": _settings_of(self.loader),
        }
        if self._worker is not None:
            state["have_changed"] = self._worker.have_changed
        if self._iterator is not None:
            state["iterator"] = self._iterator.get_state()
        return state

    def _count_batches(self, iterator: Iterator[Any]) -> Iterator[Batch]:
        for batch in map(next, repeat(iterator)):  # not `in iterator`: see `one_pass`
            self._batches += 1
            yield batch


def _copied(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy of a dataloader with a separate iterator."""
    view = copy.copy(loader)
    vars(view)["_iterator"] = None
    vars(view).pop("_get_iterator", None)  # creates the iterators of the other one
    return view


def one_pass(source: Iterable[Any]) -> Iterator[Any]:
    """Begin a pass over ``source``, and return its items.

    Calls ``iter`` only once, because it restarts a loader or sampler that is its own iterator.
    """
    return map(next, repeat(iter(source)))


def to_the_end(iterator: Iterator[Batch], loader: Any, done: int = 0) -> Iterator[Batch]:
    """Return the batches of a pass. Before the last one, read a generator, or a DataLoader without workers, to its end.

    A ``for`` loop does so after the last batch, and workers read ahead. It runs the code after the last ``yield``,
    which may count epochs, and a ``RandomSampler`` draws from its generator. Other iterators are not read beyond their
    length, because they may be streams that continue in the next pass.

    Args:
        iterator: the pass.
        loader: the dataloader.
        done: the number of batches that the pass has yielded before. Default: 0.
    """
    is_generator = inspect.isgeneratorfunction(getattr(type(loader), "__iter__", None))
    is_loader = _uses_default_iteration(loader) or _has_state(loader)
    has_end = is_generator or (is_loader and getattr(loader, "num_workers", 1) == 0)
    left = (length_of(loader) or 0) - done
    return chain(islice(iterator, left - 1), _read_ahead(iterator)) if has_end and left > 0 else iterator


def _read_ahead(iterator: Iterator[Batch]) -> Iterator[Batch]:
    batches = deque(islice(iterator, 2))  # one, unless the length is an estimate
    while batches:
        yield batches.popleft()
    yield from iterator


def resumable(loader: Any, epoch: int = 0, *, uses_state: bool = True) -> ResumableLoader:
    """Return a :class:`ResumableLoader` around ``loader``, and set its epoch.

    Args:
        loader: the dataloader.
        epoch: the epoch. Default: 0.
        uses_state: whether a ``state_dict`` of the dataloader is used. Default: True.
    """
    wrapped: ResumableLoader
    if uses_state and _has_state(loader):
        wrapped = StatefulLoader(loader)
    elif _uses_default_iteration(loader) and not isinstance(loader.dataset, IterableDataset):
        wrapped = MapStyleLoader(loader)
    else:
        wrapped = ResumableLoader(loader, shares_iterator=uses_state and not _uses_default_iteration(loader))
    wrapped.start_epoch(epoch)
    return wrapped


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

    Its position is read and restored through these methods only.
    """

    kind = "stateful"

    def __init__(self, loader: Any) -> None:
        # without objects that have `load_state_dict`: inside a pass, it sets their attributes for the next iteration
        super().__init__(loader, random_states.find(loader, unwatched=_has_position), shares_iterator=True)
        is_loader = isinstance(loader, DataLoader)
        is_torchdatas = is_loader and type(loader).load_state_dict.__module__.startswith("torchdata.")
        self._records_workers = is_torchdatas and loader.num_workers > 0
        self._is_generator = is_loader and inspect.isgeneratorfunction(type(loader).__iter__)
        # begins each pass from the start, but without workers its dataset may continue where it was
        lasting = (loader.dataset if not loader.num_workers else None) if is_torchdatas else loader
        self._lasting: Any = lasting if _has_state(lasting) else None
        self._late: Iterator[Batch] | None = None  # the pass that a generator has resumed
        samplers, dataset = ((loader.sampler, loader.batch_sampler), loader.dataset) if is_loader else ((), None)
        self._samplers = random_states.find(*samplers, unwatched=_has_position, except_in=dataset)

    def _sampler_attributes(self) -> list[Any]:
        states = map(random_states.without_generators, random_states.states_of(self._samplers))
        return [state for state in states if state]

    def replays(self, state: State) -> bool:
        """Return whether a resume loads the trained batches again, as its ``state_dict`` lacks states of workers."""
        return bool(state.get("batches") and state.get("have_changed"))

    def _resume(self, state: State, reasons: list[str]) -> Iterator[Batch]:
        if self.replays(state):
            return super()._resume(state, reasons)
        if self.persists and not state["is_first"]:
            reasons.append("it is not the first pass of persistent workers: use persistent_workers=False")
        self.loader.load_state_dict(state["state"])
        random_states.restore(state["begun"], objects=self.generators)
        if self._is_generator:
            iterator = self._late = self._late_start(state["begun"])
        else:
            iterator = self._start({})
        self._begun, self._started, self._batches = state["begun"], state["started"], state["batches"]
        if self._sampler_attributes() != state["sampler"]:
            reasons.append("the sampler changes whenever it is iterated, and resuming iterates it more often")
        return self._count_batches(iterator)

    def _begin(self) -> Iterator[Batch]:
        if self._late is not None:
            late, self._late = self._late, None
            with random_states.isolated():
                self._read_to_the_end(late)
        return super()._begin()

    def _read_to_the_end(self, iterator: Iterator[Batch]) -> None:
        """Execute the last lines of a generator, which follow its last ``yield``, in a pass that a limit has cut.

        A loader that resumes a position may do so in each pass until these lines.
        """
        deque(islice(iterator, max((length_of(self.loader) or 0) - self._batches, 0) + 1), maxlen=0)

    def _late_start(self, begun: State) -> Iterator[Batch]:
        """Yield the batches of a generator. Its DataLoader draws the seed that it drew after ``begun``.

        It draws this number when the first batch is requested, which must not change the current random states.
        """
        loader, generator = self.loader, self.loader.generator
        loader.generator = torch.Generator()
        random_states.set_state(loader.generator, begun["torch"])
        try:
            iterator = iter(loader)
            first = list(islice(iterator, 1))
        finally:
            loader.generator = generator
        yield from chain(first, iterator)

    def _follow(self, state: State) -> list[str]:
        reasons = super()._follow(state)
        if self._lasting is not None and "lasting" in state:
            self._lasting.load_state_dict(state["lasting"])
            if self._is_generator:
                self._batches = state["batches"]
                self._read_to_the_end(iter(self._lasting))
        return reasons

    def _position_state(self) -> State:
        state = {**super()._position_state(), "state": self.loader.state_dict(), "sampler": self._sampler_attributes()}
        if self._lasting is not None:
            state["lasting"] = state["state"] if self._lasting is self.loader else self._lasting.state_dict()
        return state


class MapStyleLoader(ResumableLoader):
    """A map-style ``DataLoader``, of a class that iterates as ``DataLoader`` does."""

    kind = "map-style"

    def replays(self, state: State) -> bool:
        """Return False: no sample is loaded again."""
        return False

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        max_recent = (loader.prefetch_factor or 0) * loader.num_workers + 2
        self._sampler = _RecordedSampler(sampler, max_recent, self.generators)
        self._received: dict[int, Any] = {}  # the states of the workers after the last batch

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
            "set_up": {**_settings_of(self.loader), "samples": first["set_up"]["samples"]},
            "workers": {},
            "last": "",
        }

    def _start(self, starts: dict[int, State], *, silent: bool = False) -> Iterator[Batch]:
        """Return an iterator of a copy of the dataloader that uses the recorded sampler.

        Args:
            starts: initial random states of the workers.
            silent: whether to send no indices to the workers yet. Default: False.
        """
        loader, view = self.loader, _copied(self.loader)
        vars(view)["sampler" if loader.batch_sampler is None else "batch_sampler"] = self._sampler
        if not loader.num_workers:
            return iter(view)
        self._note_copies()
        self._received, self._worker = dict(starts), WorkerRandom(loader, starts, self.epoch, sends=True)
        wraps = self.persists and bool(objects_with_set_epoch(loader.dataset))
        vars(view).update(self._worker.attributes(loader.dataset, wraps=wraps))
        self._running = view
        self._sampler.is_silent = silent
        iterator: Iterator[Batch] = bounded_like(loader, iter(view))
        self._sampler.is_silent = False
        return iterator

    def _count_batches(self, iterator: Iterator[Any]) -> Iterator[Batch]:
        return self._receive(iterator) if self.loader.num_workers else iterator  # otherwise, the sampler counts

    def _receive(self, iterator: Iterator[Any]) -> Iterator[Batch]:
        for batch, worker, states in iterator:
            self._batches += 1
            if states is not None:
                self._received[worker] = states
            yield batch

    def _position_state(self) -> State:
        sampler, has_workers = self._sampler, bool(self.loader.num_workers)
        if not has_workers:
            self._batches = sampler.drawn
        return {
            **super()._position_state(),
            "asked": sampler.initial_states,
            "last": sampler.describe(self._batches - 1) if self.loader.in_order else "",
            "workers": states_of(self._received),
            "exhausted": sampler.exhausted and not has_workers,
        }

    def _resume(self, state: State, reasons: list[str]) -> Iterator[Batch]:
        loader, batches = self.loader, state["batches"]
        if not reasons:
            reasons += random_states.differences(self.generators, state.get("own", []))
        random_states.restore(state["started"], objects=self.generators)
        iterator = self._start(state["workers"], silent=True)
        if state["begun"] != state["started"]:
            random_states.restore(state["begun"], objects=self.generators)
            iter(self._sampler)
        self._begun, self._started = state["begun"], state["started"]
        random_states.restore(state["asked"], objects=self.generators)
        if self._advance(iterator, batches, exhausted=state.get("exhausted", False)):
            reasons.append("the sampler draws from the global random state during the epoch, and so does other code")
        saved, current = state["last"], self._sampler.describe(batches - 1)
        if saved and saved != current:
            reasons.append(
                f"the last trained batch had the samples {saved}; the same dataset, sampler and seed would give them"
                f" again, but now this batch has {current or 'nothing'}"
            )
        if not loader.in_order and loader.num_workers > 1:
            reasons.append("with in_order=False the order of batches depends on how fast the workers are")
        return self._count_batches(iterator)

    def _advance(self, iterator: Any, batches: int, *, exhausted: bool = False) -> bool:
        """Skip the first ``batches`` in a pass that was just opened, and send the others to its workers.

        Args:
            iterator: the iterator of the pass.
            batches: the number of yielded batches.
            exhausted: whether a batch was requested after the sampler's last one. A RandomSampler then draws random
                numbers. Default: False.

        Returns:
            Whether the sampler drew from the global random state after the first batch.
        """
        draws, workers = self._sampler.skip(batches + exhausted), self.loader.num_workers
        self._batches = batches
        if workers:
            iterator._sampler_iter = self._sampler.rest()
            iterator._worker_queue_idx_cycle = cycle([*range(batches % workers, workers), *range(batches % workers)])
            for _ in range(self.loader.prefetch_factor * workers):
                iterator._try_put_index()
        return draws

    def _skip(self, batches: int) -> Iterator[Batch]:
        self._begun = self._started = random_states.capture(objects=self.generators)
        iterator = self._start({}, silent=True)
        self._advance(iterator, batches)
        return self._count_batches(iterator)

    def _follow(self, state: State) -> list[str]:
        is_stopped = self.persists and self._running._iterator is None
        if is_stopped and state["workers"] is not None and not _changes(state, self.loader):
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
        self._indices: Iterator[Any] = iter(())
        self.drawn = 0
        self.initial_states: State = {}
        self.exhausted = self.is_silent = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_indices": iter(())}

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        self.drawn, self.initial_states, self.exhausted = 0, {}, False
        self._recent.clear()
        self._indices = one_pass(self._sampler)
        return iter(()) if self.is_silent else self.rest()

    def rest(self) -> Iterator[Any]:
        """Yield the batches that are left."""
        if not self.drawn:
            self.initial_states = random_states.capture(objects=self._generators)
        for indices in self._indices:
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

    def describe(self, number: int) -> str:
        """Return the samples of batch ``number`` as a short text; "" if it was not drawn, or is no longer kept."""
        distance = self.drawn - number
        if number < 0 or not 0 < distance <= len(self._recent):
            return ""
        text = repr(_to_plain(self._recent[-distance]))
        return text if len(text) <= _LONG else f"{text[:_LONG]}... ({hashlib.sha256(text.encode()).hexdigest()})"


def _settings_of(loader: Any) -> State:
    """Return the settings of a DataLoader that determine the order and content of batches; {} of another loader."""
    if not isinstance(loader, DataLoader):
        return {}
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
        "prefetch_factor": loader.prefetch_factor,  # the sampler is ahead by as many batches
    }


def length_of(dataset: Any) -> int | None:
    """Return the number of samples of a dataset, or None if it has no length."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _changes(state: State, loader: Any) -> list[str]:
    """Return the changed settings that lead to other batches than those that follow the position in ``state``."""
    saved, current = state["set_up"], _settings_of(loader)
    names = {"samples": "the number of samples", "world_size": "the world size"}
    harmless = set() if state.get("have_changed", True) else {"num_workers", "prefetch_factor", "in_order"}
    return [
        f"{names.get(name, name)} was {saved[name]} and is {current[name]}"
        for name in current
        if saved.get(name) != current[name] and name not in harmless
    ]


def _to_plain(indices: Any) -> Any:
    if isinstance(indices, torch.Tensor | np.ndarray | np.generic):
        return indices.tolist()
    if isinstance(indices, list | tuple):
        return [_to_plain(index) for index in indices]
    if isinstance(indices, dict):
        return [[repr(key), _to_plain(value)] for key, value in indices.items()]
    return indices if isinstance(indices, int | float | str | bytes | None) else type(indices).__qualname__
