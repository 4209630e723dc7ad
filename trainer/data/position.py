"""Where a pass over a dataloader stands, and how another process goes on from there.

A :class:`Place` goes along with a dataloader and knows where its pass is. What it remembers is enough to open the
dataloader again at that very batch: with the samples that are left in their order, and the random numbers with which
they would have been prepared, in the workers too. There are three kinds:

``SampledPlace``
    A map-style ``DataLoader``. Its sampler is asked again for the indices, from the random state that it started from;
    those of batches that have been trained are compared with what was seen, and dropped: no sample is loaded.
``StatefulPlace``
    A loader that has ``state_dict`` and ``load_state_dict`` goes on by itself.
``CountedPlace``
    Anything else: what has been trained is loaded again, and dropped.
"""

from __future__ import annotations

import copy
import hashlib
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain, cycle, islice
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, StackDataset, Subset, TensorDataset
from torch.utils.data import default_collate as _collate
from torch.utils.data import default_convert as _convert
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from trainer.data import worker_random
from trainer.data.worker_random import Carrier, WorkerRandom
from trainer.state import generators as own_generators
from trainer.state import random_states

Batch = Any
State = dict[str, Any]


class Place(Protocol):
    """A dataloader, and where the pass over it stands.

    Iterating begins a pass, with nothing else happening than in iterating the dataloader itself; or goes on with one
    that was taken up.
    """

    loader: Any
    reads_ahead: bool
    """Whether the batch that was fetched last counts as one that has not been: who asks is always one ahead."""

    def __iter__(self) -> Iterator[Batch]:
        """The next pass, or what is left of the one that was taken up."""

    def __len__(self) -> int:
        """The dataloader's."""

    @property
    def drops(self) -> bool:
        """Whether the batches of a pass that were trained have to be loaded again."""

    def state_dict(self) -> State:
        """Where the pass is: tensors and plain containers. {} before the first."""

    def take_up(self, state: State, consumed: int | None = None) -> list[str]:
        """Open the pass of which ``state_dict`` spoke, where it was. Changes this process's random states.

        Args:
            state: what it returned.
            consumed: batches of it that were trained, if it is not those of ``state``.

        Returns:
            Why what follows may not be what would have followed; empty where it is.
        """

    def begin_after(self, state: State) -> None:
        """Take over from a pass that is over what the next one depends on."""

    def skip(self, count: int) -> None:
        """Have the next pass begin after its first ``count`` batches."""


def place_of(loader: Any) -> Place:
    """The kind of place that ``loader`` can have."""
    if _has_state(loader):
        return StatefulPlace(loader)
    is_plain = (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and type(loader)._get_iterator is DataLoader._get_iterator
    )
    if is_plain and not isinstance(loader.dataset, IterableDataset):
        return SampledPlace(loader)
    return CountedPlace(loader)


def _has_state(thing: Any) -> bool:
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


class _Start:
    """The random states from which something starts: what is kept of them costs little (15 microseconds).

    Args:
        generators: those that the dataloader carries with it.
    """

    def __init__(self, generators: list[own_generators.Generator]) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._own = own_generators.states_of(generators)

    def state_dict(self) -> State:
        """In tensors and plain containers."""
        with random_states.isolated():
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            torch.set_rng_state(self._torch)
            return {"random": random_states.capture(), "own": self._own}


def _stated(start: _Start | State | None) -> State | None:
    return start.state_dict() if isinstance(start, _Start) else start


def _start_from(state: State, generators: list[own_generators.Generator]) -> None:
    random_states.restore(state["random"])
    own_generators.set_states(generators, state["own"])


class _Pass:
    """What the three kinds of places have in common.

    Args:
        loader: the dataloader.
        generators: that it carries with it.
    """

    kind = ""

    def __init__(self, loader: Any, generators: list[own_generators.Generator]) -> None:
        self.loader = loader
        self.reads_ahead = False
        self._generators = generators
        self._draws_here = not getattr(loader, "num_workers", 0)
        self._begun: _Start | State | None = None
        self._opened: Iterator[Batch] | None = None
        self._before: State | None = None
        self._marked: State | None = None
        self._ahead: _Start | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a Trainer has no pass under way."""
        return vars(self) | {"_opened": None} | ({"_iterator": None} if "_iterator" in vars(self) else {})

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        opened, self._opened = self._opened, None
        if opened is not None:
            return opened
        self._marked = self._ahead = None
        iterator = self._begin()
        return self._one_ahead(iterator, None, []) if self.reads_ahead else iterator

    def state_dict(self) -> State:
        """Where the pass is."""
        if self._begun is None:
            before = self._before
            return {**before, "own": own_generators.states_of(self._generators)} if before else {}
        state = {**(self._here() if self._marked is None else self._marked)}
        state["own"] = own_generators.states_of(self._generators)
        state["ahead"] = None if self._ahead is None else self._ahead.state_dict()
        return state

    def begin_after(self, state: State) -> None:
        """Take over from a pass that is over what the next one depends on."""
        self._opened, self._before = None, state
        if state["kind"] == self.kind:
            own_generators.set_states(self._generators, state["own"])

    def _begin(self) -> Iterator[Batch]:
        raise NotImplementedError

    def _here(self) -> State:
        raise NotImplementedError

    def _go_on(self, iterator: Iterator[Batch], state: State) -> None:
        """Have the next pass be what ``iterator`` has left."""
        own = state["own"]
        own_generators.set_states(self._generators, own)
        self._opened = self._one_ahead(iterator, state["ahead"], own) if self.reads_ahead else iterator

    def _one_ahead(self, iterator: Iterator[Batch], ahead: State | None, own: list[Any]) -> Iterator[Batch]:
        """The batches of ``iterator``; before each, what ``state_dict`` is to say while it is the one ahead.

        Args:
            iterator: of the dataloader.
            ahead: the random states with which the first one had been fetched; None where it had not been.
            own: the states that the loader's generators have afterwards.
        """
        end = object()
        while True:
            self._marked = self._here()
            with nullcontext() if ahead is None else random_states.isolated():
                if ahead is not None:
                    _start_from(ahead, self._generators)
                self._ahead = _Start(self._generators) if self._draws_here else None
                batch = next(iterator, end)
            if ahead is not None:
                own_generators.set_states(self._generators, own)
                ahead = None
            if batch is end:
                return
            yield batch


class _Loading(_Pass):
    """The place of a loader that has no sampler to ask.

    Args:
        loader: any iterable of batches.
    """

    def __init__(self, loader: Any) -> None:
        super().__init__(loader, own_generators.find(loader))
        self._consumed = 0

    def skip(self, count: int) -> None:
        """Have the next pass begin after its first ``count`` batches."""
        iterator = self._begin()
        deque(islice(iterator, count), maxlen=0)
        self._opened = iterator

    def _begin(self) -> Iterator[Batch]:
        self._begun, self._consumed = _Start(self._generators), 0
        return self._counted(iter(self.loader))

    def _here(self) -> State:
        set_up = _set_up_of(self.loader) if isinstance(self.loader, DataLoader) else {}
        return {"kind": self.kind, "consumed": self._consumed, "begun": _stated(self._begun), "set_up": set_up}

    def _counted(self, iterator: Iterator[Batch]) -> Iterator[Batch]:
        for batch in iterator:
            self._consumed += 1
            yield batch


class CountedPlace(_Loading):
    """The place of a loader that can do nothing but load."""

    kind = "counted"

    @property
    def drops(self) -> bool:
        """Whether batches have to be loaded again: not where they are all there."""
        return not isinstance(self.loader, Sequence)

    def take_up(self, state: State, consumed: int | None = None) -> list[str]:
        """Open the pass of which ``state_dict`` spoke, by loading what came before."""
        if state["kind"] != self.kind:
            self.skip(state["consumed"] if consumed is None else consumed)
            return [_other_kind(self.loader)]
        _start_from(state["begun"], self._generators)
        iterator = self._begin()
        deque(islice(iterator, state["consumed"] if consumed is None else consumed), maxlen=0)
        self._go_on(iterator, state)
        return _changes(state["set_up"], self.loader)


class StatefulPlace(_Loading):
    """The place of a loader that has ``state_dict`` and ``load_state_dict``.

    torchdata's ``StatefulDataLoader`` is one. The random states of its workers, which it does not keep, are kept here.
    """

    kind = "stateful"
    drops = False

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._workers: dict[int, worker_random.States] = {}
        self._starts: dict[int, worker_random.States] = {}
        self._has_workers = isinstance(loader, DataLoader) and loader.num_workers > 0
        # a DataLoader begins each pass anew; but not, if it has no workers, its dataset
        lasting: Any = loader.dataset if isinstance(loader, DataLoader) else loader
        self._lasting: Any = None if self._has_workers or not _has_state(lasting) else lasting
        # workers that stay go on with batches that nobody has asked for
        self._knows_workers = self._has_workers and not loader.persistent_workers

    def take_up(self, state: State, consumed: int | None = None) -> list[str]:
        """Open the pass of which ``state_dict`` spoke: the loader does it."""
        if state["kind"] != self.kind:
            self.skip(state["consumed"] if consumed is None else consumed)
            return [_other_kind(self.loader)]
        reasons = _changes(state["set_up"], self.loader)
        if consumed not in (None, state["consumed"]):
            reasons.append(_INSIDE_A_BATCH)
        if self._has_workers and not self._knows_workers and not _is_deterministic(self.loader):
            reasons.append("what its persistent_workers had drawn is not known")
        if self._knows_workers and "workers" in state:
            replayed, is_from_start = _replayed_by_workers(state["state"])
            self._starts = {} if is_from_start else worker_random.packed(state["workers"])
            if replayed and not _is_deterministic(self.loader):
                reasons.append(f"its snapshot_every_n_steps has workers prepare {replayed} batches again; 1 would not")
        _start_from(state["begun"], self._generators)
        self.loader.load_state_dict(state["state"])
        iterator = self._begin()
        self._begun, self._consumed = state["begun"], state["consumed"]
        self._workers = worker_random.packed(state.get("workers", {}))
        self._go_on(iterator, state)
        return reasons

    def begin_after(self, state: State) -> None:
        """Take over from a pass that is over what the next one depends on."""
        super().begin_after(state)
        if state["kind"] == self.kind and self._lasting is not None and "after" in state:
            self._lasting.load_state_dict(state["after"])

    def state_dict(self) -> State:
        """Where the pass is."""
        state = super().state_dict()
        if state and self._lasting is not None:
            state["after"] = self._lasting.state_dict()
        return state

    def loader_state(self) -> Any:
        """What the loader says of itself."""
        return self.loader.state_dict() if self._marked is None else self._marked["state"]

    def _here(self) -> State:
        state = {**super()._here(), "state": self.loader.state_dict()}
        return {**state, "workers": worker_random.plain(self._workers)} if self._knows_workers else state

    def _begin(self) -> Iterator[Batch]:
        if not self._knows_workers:
            return super()._begin()
        loader, starts = self.loader, self._starts
        self._begun, self._consumed, self._starts = _Start(self._generators), 0, {}
        own = loader.worker_init_fn, loader.collate_fn
        in_worker = WorkerRandom(*own, starts)
        loader.worker_init_fn, loader.collate_fn = in_worker.start, in_worker.collate
        try:
            iterator = iter(loader)
        finally:
            loader.worker_init_fn, loader.collate_fn = own
        self._workers = {}
        return self._carried(iterator)

    def _carried(self, iterator: Iterator[Batch]) -> Iterator[Batch]:
        for carrier in iterator:
            self._consumed += 1
            if not isinstance(carrier, Carrier):  # somebody else has started the workers
                yield carrier
                continue
            if carrier.changes:
                self._workers.setdefault(carrier.worker, {}).update(carrier.changes)
            yield carrier.batch


def _replayed_by_workers(state: State) -> tuple[int, bool]:
    """Of a StatefulDataLoader's state: how many batches its workers load again, and whether from the beginning."""
    snapshot = state.get("_snapshot", {})
    workers = snapshot.get("_worker_snapshots", {}).values()
    fetchers = [one.get("fetcher_state") for one in workers if one.get("dataset_state") is None]
    is_from_start = any(fetcher is not None and fetcher.get("dataset_iter_state") is None for fetcher in fetchers)
    return state.get("_steps_since_snapshot", 0), is_from_start


class SampledPlace(_Pass):
    """The place of a map-style ``DataLoader``.

    Args:
        loader: one whose class iterates as ``DataLoader`` does.

    Attributes:
        on_open: called with each iterator that has workers, as soon as there is one.
    """

    kind = "sampled"
    drops = False

    def __init__(self, loader: DataLoader[Any]) -> None:
        dataset, samplers = loader.dataset, (loader.generator, loader.sampler, loader.batch_sampler)
        super().__init__(
            loader,
            own_generators.find(*samplers, except_in=dataset)
            if loader.num_workers
            else own_generators.find(*samplers, dataset, loader.collate_fn),
        )
        kept = (loader.prefetch_factor or 0) * loader.num_workers + 2
        self._sampler = _WatchedSampler(_index_sampler(loader), kept, self._generators)
        self.on_open: Callable[[Any], None] | None = None
        self._created: _Start | State | None = None
        self._was_reset = False
        self._trained = 0
        self._workers: dict[int, worker_random.States] = {}
        self._knows_workers = True
        self._iterator: weakref.ref[_WorkerIterator] | None = None
        self._left_behind: list[int] = []
        self._drawn_before = 0

    def _begin(self) -> Iterator[Batch]:
        loader = self.loader
        if loader.num_workers and loader.persistent_workers and loader._iterator is not None:
            iterator = loader._iterator
            self._knows_workers = isinstance(iterator, _WorkerIterator) and iterator.place() is self
            if self._knows_workers:
                return iter(loader)
            self.begin()  # somebody else has started them
            return self._counted(iter(loader))
        self.begin()
        self._created = self._begun
        return self._open({})

    @property
    def _consumed(self) -> int:
        return self._sampler.drawn if self._draws_here else self._trained

    def begin(self, *, again: bool = False) -> None:
        """A pass begins.

        Args:
            again: with workers that have been there before.
        """
        self._begun = _Start(self._generators)
        self._was_reset, self._trained = again, 0
        self._left_behind, self._drawn_before = [], 0
        if not again:
            self._workers = {}

    def take(self, carrier: Carrier) -> None:
        """A batch has arrived from a worker."""
        self._trained += 1
        self.note(carrier)

    def note(self, carrier: Carrier) -> None:
        """Note a worker's random states."""
        if carrier.changes:
            self._workers.setdefault(carrier.worker, {}).update(carrier.changes)

    def _here(self) -> State:
        sampler, loader, consumed = self._sampler, self.loader, self._consumed
        state = {
            "kind": self.kind,
            "consumed": consumed,
            "begun": _stated(self._begun),
            "created": _stated(self._created) if self._was_reset else None,
            "drawing": _stated(sampler.start),
            "first": sampler.first,
            "last": sampler.said(consumed - 1) if loader.in_order else None,
            "set_up": _set_up_of(loader),
            "prefetch_factor": loader.prefetch_factor,
        }
        if self._draws_here:
            state["is_over"] = sampler.is_over
        else:
            state["workers"] = worker_random.plain(self._workers) if self._knows_workers else None
            if not loader.in_order:
                state["drawn"], state["left_behind"] = self._out_of_order()
        return state

    def _out_of_order(self) -> tuple[int, list[int]]:
        """How many batches the sampler has given, and which of them have not arrived."""
        iterator = None if self._iterator is None else self._iterator()
        if iterator is None:
            return self._trained, []
        behind, before = self._left_behind, self._drawn_before
        numbers = [behind[i] if i < len(behind) else before + i - len(behind) for i in iterator._task_info]
        return self._sampler.drawn, sorted(numbers)

    def take_up(self, state: State, consumed: int | None = None) -> list[str]:
        """Open the pass of which ``state_dict`` spoke: its sampler says again what it said."""
        if state["kind"] != self.kind:
            self.skip(state["consumed"] if consumed is None else consumed)
            return [_other_kind(self.loader)]
        reasons = _changes(state["set_up"], self.loader)
        if len(state["own"]) != len(self._generators) and not reasons:
            reasons.append(
                f"the dataloader had {len(state['own'])} random generators of its own and has {len(self._generators)}"
            )
        workers, created, loader = state.get("workers"), state["created"], self.loader
        consumed = state["consumed"] if consumed is None else consumed
        if consumed != state["consumed"] and not _is_deterministic(loader):
            reasons.append(_INSIDE_A_BATCH)
        self._knows_workers = self._draws_here or workers is not None or _is_deterministic(loader)
        if not self._knows_workers:
            reasons.append("what the worker processes had drawn is not known")
        starts = worker_random.packed(workers or {})
        _start_from(created or state["begun"], self._generators)
        self._sampler.is_silent, self._sampler.is_closed = bool(created), not self._draws_here
        iterator = self._open(starts)
        self._sampler.is_silent = self._sampler.is_closed = False
        if created:
            _start_from(state["begun"], self._generators)
            iter(self._sampler)
        self._begun, self._created = state["begun"], created or state["begun"]
        self._was_reset, self._trained = bool(created), consumed
        self._workers = starts
        if state["drawing"] is not None:
            _start_from(state["drawing"], self._generators)
        replayed = self._skip_in_sampler(iterator, state, consumed)
        if state.get("is_over") and self._draws_here:
            self._sampler.end()
        moved = own_generators.states_of(self._generators)
        draws_on = not own_generators.is_same(self._sampler.own_after_first, moved)
        self._go_on(iterator, state)
        if draws_on and state["prefetch_factor"] != loader.prefetch_factor:
            own_generators.set_states(self._generators, moved)  # the sampler is ahead by another number of batches
        return reasons + replayed

    def _skip_in_sampler(self, iterator: Any, state: State, consumed: int) -> list[str]:
        sampler, behind = self._sampler, state.get("left_behind", [])
        drawn = state["drawn"] if behind else consumed
        left, draws = sampler.skip(drawn, behind)
        reasons = []
        if consumed and state["first"] is not None and (sampler.drawn < drawn or sampler.first != state["first"]):
            reasons.append(_other_order("first", state["first"], sampler.first))
        elif consumed == state["consumed"] and (was := state["last"]) and (last := sampler.said(consumed - 1)) != was:
            reasons.append(_other_order("last", was, last))
        if draws:
            reasons.append("the sampler draws from the global random state during the epoch, as others do")
        if not self._draws_here:
            self._left_behind, self._drawn_before = list(behind), drawn
            if not self.loader.in_order and self.loader.num_workers > 1:
                reasons.append("with in_order=False the order of batches depends on how fast the workers are")
            iterator.go_on(chain(left, sampler.rest()), consumed % self.loader.num_workers)
        return reasons

    def begin_after(self, state: State) -> None:
        """Take over from a pass that is over what the next one depends on: generators, and workers that stay."""
        self._opened, self._before = None, state
        if state["kind"] != self.kind:
            return
        stays = not self._draws_here and self.loader.persistent_workers and self.loader._iterator is None
        if stays and state.get("workers") is not None and not _changes(state["set_up"], self.loader):
            with random_states.isolated():
                self.take_up(state)
        self._opened = None
        own_generators.set_states(self._generators, state["own"])

    def skip(self, count: int) -> None:
        """Have the next pass begin after its first ``count`` batches."""
        self.begin()
        self._created, self._trained = self._begun, count
        self._sampler.is_closed = not self._draws_here
        iterator = self._open({})
        self._sampler.is_closed = False
        self._sampler.skip(count, [])
        if isinstance(iterator, _WorkerIterator):
            self._drawn_before = count
            iterator.go_on(self._sampler.rest(), count % self.loader.num_workers)
        self._opened = iterator

    def _counted(self, iterator: Iterator[Batch]) -> Iterator[Batch]:
        for batch in iterator:
            self._trained += 1
            yield batch

    def _open(self, starts: dict[int, worker_random.States]) -> Iterator[Batch]:
        """An iterator of the dataloader with our sampler in it; the dataloader itself is left as it is."""
        loader, view = self.loader, copy.copy(self.loader)
        vars(view).pop("_get_iterator", None)  # somebody's, around the original's
        vars(view)["sampler" if loader.batch_sampler is None else "batch_sampler"] = self._sampler
        if self._draws_here:
            return iter(view)
        in_worker = WorkerRandom(loader.worker_init_fn, loader.collate_fn, starts)
        vars(view).update(collate_fn=in_worker.collate, worker_init_fn=in_worker.start)
        loader.check_worker_number_rationality()
        iterator = _WorkerIterator(view, self)
        self._iterator = weakref.ref(iterator)
        if self.on_open is not None:
            self.on_open(iterator)
        if loader.persistent_workers:
            loader._iterator = iterator
        return iterator


class _WatchedSampler:
    """The sampler of a dataloader, that is remembered what it has said.

    Args:
        sampler: gives the indices of one batch after the other.
        kept: how many of the last ones to remember.
        generators: that it may draw from.

    Attributes:
        drawn: batches that it has given in this pass.
        start: the random states when it was first asked.
        own_after_first: those of ``generators`` after it had answered.
        first: its first answer.
        is_over: whether it has been asked for more than there was.
        is_closed: give nothing.
        is_silent: do not ask the sampler at all.
    """

    def __init__(self, sampler: Any, kept: int, generators: list[own_generators.Generator]) -> None:
        self._asked = sampler
        self._generators = generators
        self._recent: deque[Any] = deque(maxlen=kept)
        self._indices: Iterator[Any] = iter(())
        self.drawn = 0
        self.start: _Start | None = None
        self.own_after_first: list[Any] = []
        self.first: State | None = None
        self.is_over = self.is_closed = self.is_silent = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_indices": iter(())}

    def __len__(self) -> int:
        return len(self._asked)

    def __iter__(self) -> Iterator[Any]:
        self.drawn, self.start, self.first, self.is_over = 0, None, None, False
        self._recent.clear()
        self._indices = iter(()) if self.is_silent else iter(self._asked)
        return iter(()) if self.is_closed else self.rest()

    def rest(self) -> Iterator[Any]:
        """What it has still to say."""
        if not self.drawn:
            self.start = _Start(self._generators)
        for indices in self._indices:
            if not self.drawn:
                self.first = _proof(indices)
            self.drawn += 1
            self._recent.append(indices)
            yield indices
        self.is_over = True

    def skip(self, count: int, except_of: Sequence[int]) -> tuple[list[Any], bool]:
        """Have it give ``count`` batches that nobody wants.

        Args:
            count: how many.
            except_of: which of them are wanted.

        Returns:
            Those that are wanted, and whether it drew from the global random state after the first.
        """
        self.own_after_first, before = own_generators.states_of(self._generators), None
        wanted = []
        for number, indices in enumerate(islice(self.rest(), count)):
            if number == 0:
                self.own_after_first, before = own_generators.states_of(self._generators), random_states.capture()
            if number in except_of:
                wanted.append(indices)
        return wanted, before is not None and not _is_same_random(before, random_states.capture())

    def end(self) -> None:
        """Ask it for one more, though all have been given: a RandomSampler draws once more for that."""
        deque(self.rest(), maxlen=0)

    def said(self, number: int) -> State | None:
        """The indices of batch ``number``, if it is among the last."""
        back = self.drawn - number
        return _proof(self._recent[-back]) if number >= 0 and 0 < back <= len(self._recent) else None


class _WorkerIterator(_MultiProcessingDataLoaderIter):
    """A pass with worker processes whose batches are carriers; it gives the batches.

    Args:
        loader: the dataloader, with a :class:`WorkerRandom`'s methods in it.
        place: is told what arrives.
    """

    def __init__(self, loader: DataLoader[Any], place: SampledPlace) -> None:
        # weak: a circle would be left to the garbage collector, which runs in forked workers, too
        self.place = weakref.ref(place)
        super().__init__(loader)

    def _next_data(self) -> Batch:
        carrier = super()._next_data()  # type: ignore[no-untyped-call]
        if (place := self.place()) is not None:
            place.take(carrier)
        return carrier.batch

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        place = self.place()
        if not first_iter and place is not None:
            self._sampler_iter = iter(())
            for _ in range(len(self._task_info)):  # batches that nobody has asked for have drawn numbers, too
                try:
                    place.note(super()._next_data())  # type: ignore[no-untyped-call]
                except StopIteration:
                    break
                except Exception:  # what they have come to is nobody's business
                    continue
            place.begin(again=True)
        super()._reset(loader, first_iter)

    def go_on(self, indices: Iterator[Any], worker: int) -> None:
        """Send out ``indices``, the first of them to ``worker``; nothing has been sent before."""
        self._sampler_iter = indices
        self._worker_queue_idx_cycle = cycle([*range(worker, self._num_workers), *range(worker)])
        for _ in range(self._prefetch_factor * self._num_workers):
            self._try_put_index()


_INSIDE_A_BATCH = "it was written inside a batch, which had been prepared already"


def _other_kind(loader: Any) -> str:
    return f"the dataloader is of another kind than the one that was saved: it is now a {type(loader).__name__}"


def _other_order(which: str, was: State, now: State | None) -> str:
    def text(proof: State) -> str:
        more = proof["count"] - len(proof["head"])
        return f"{proof['head']}" + (f" and {more} more" if more > 0 else "")

    given = "nothing" if now is None else text(now)
    return (
        f"the {which} trained batch of this epoch had the samples {text(was)}; the same dataset, sampler and seed would"
        f" give them again, but here it is {given}"
    )


def _index_sampler(loader: DataLoader[Any]) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _set_up_of(loader: DataLoader[Any]) -> State:
    """What decides about the order and content of batches and can be named."""
    dataset: Any = loader.dataset
    sampler = loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
    return {
        "num_workers": loader.num_workers,
        "persistent_workers": bool(loader.persistent_workers and loader.num_workers),
        "batch_size": getattr(loader.batch_sampler, "batch_size", loader.batch_size),
        "drop_last": bool(getattr(loader.batch_sampler, "drop_last", loader.drop_last)),
        "samples": None if isinstance(dataset, IterableDataset) else _length_of(dataset),
        "world_size": getattr(sampler, "num_replicas", 1),
        "in_order": loader.in_order,
    }


def _length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _changes(was: State, loader: Any) -> list[str]:
    """What is set up in another way, so that other batches would follow."""
    if not isinstance(loader, DataLoader):
        return []
    now = _set_up_of(loader)
    names = {"samples": "the number of samples", "world_size": "the world size"}
    harmless = {"num_workers", "in_order"} if _is_deterministic(loader) else set()
    return [
        f"{names.get(name, name)} was {was[name]} and is {now[name]}"
        for name in now
        if was.get(name) != now[name] and name not in harmless
    ]


def _is_deterministic(loader: DataLoader[Any]) -> bool:
    """Whether no random number goes into a sample, as the classes show: torch's own, which hand out what they hold."""

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


def _proof(indices: Any) -> State:
    """What tells one batch's indices from another's."""
    plain = _plain(indices)
    flat = plain if isinstance(plain, list) else [plain]
    digest = hashlib.sha256(repr(plain).encode()).hexdigest()
    return {"head": [_short(one) for one in flat[:4]], "count": len(flat), "digest": digest}


def _short(index: Any) -> Any:
    return index if isinstance(index, int) else repr(index)[:40]


def _plain(indices: Any) -> Any:
    if isinstance(indices, torch.Tensor | np.ndarray | np.generic):
        return indices.tolist()
    if isinstance(indices, list | tuple):
        return [_plain(index) for index in indices]
    if isinstance(indices, dict):
        return [[repr(key), _plain(value)] for key, value in indices.items()]
    return indices if isinstance(indices, int | float | str | bytes | None) else type(indices).__qualname__


def _is_same_random(a: State, b: State) -> bool:
    return all(own_generators.is_same(a[name], b[name]) for name in a)
