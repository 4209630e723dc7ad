"""The dataloaders of one stage, ready to run: ``trainer.data.batches.Loaders`` over Lightning's CombinedLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader, _MaxSizeCycle
from torch.utils.data import SequentialSampler

from trainer.data.batches import Batch
from trainer.data.position import Place, SampledPlace, StatefulPlace, place_of

Watch = Callable[[Iterable[Any]], Iterable[Any]]
"""Puts a profiler's clock around the fetching of each item."""

_FETCHING = {
    RunningStage.TRAINING: "[_TrainingEpochLoop].train_dataloader_next",
    RunningStage.VALIDATING: "[_EvaluationLoop].val_next",
    RunningStage.TESTING: "[_EvaluationLoop].test_next",
    RunningStage.PREDICTING: "[_PredictionLoop].predict_next",
}
"""What Lightning's profilers call the fetching of a batch."""


class LoaderSet:
    """The dataloaders of one stage, ready to run. Implements ``trainer.data.batches.Loaders``.

    Args:
        combined: the dataloaders, prepared.
        limits: batches to run of each.
        has_length: whether the length of each is known.
        watch: put around a source of batches, by a profiler; None for nothing.

    Attributes:
        on_open: called with each iterator of the training's dataloaders that has workers. DataSource, likewise.
        made_in: the epoch in which they were made; -inf for none that counts. DataSource, when they are made.
        remade_every: epochs after which they are made anew; 0 for never. DataSource, likewise.
    """

    def __init__(
        self, combined: CombinedLoader, limits: list[float], has_length: bool, watch: Watch | None = None
    ) -> None:
        self.combined = combined
        self._limits = limits
        self._has_length = has_length
        self._watch = _unwatched if watch is None else watch
        self._awaited: list[dict[str, Any]] = []
        self._opened: Iterator[Any] | None = None
        self._places: list[Place] = []
        self._taken_up: dict[str, Any] = {}
        self.on_open: Callable[[Any], None] | None = None
        self.made_in = float("-inf")
        self.remade_every = 0

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a Trainer has no pass under way."""
        return vars(self) | {"_opened": None}

    @property
    def limits(self) -> list[float]:
        """Batches to run of each dataloader."""
        return self._limits

    @property
    def is_sequential(self) -> bool:
        """Whether one dataloader follows the other."""
        return bool(self.combined._mode == "sequential")

    @property
    def has_length(self) -> bool:
        """Whether the length of each is known."""
        return self._has_length

    def state_dicts(self) -> list[dict[str, Any]]:
        """The places of those dataloaders that keep theirs."""
        if self._awaited:
            return list(self._awaited)
        if not self._places:
            return self.combined._state_dicts()
        return [place.loader_state() for place in self._places if isinstance(place, StatefulPlace)]

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """Go on from what ``state_dicts`` returned, unless a position says more."""
        self._awaited, self._opened = states, None

    def _load_awaited(self) -> bool:
        states, self._awaited = self._awaited, []
        self.combined._load_state_dicts(states)
        return bool(states)

    def num_batches(self) -> float:
        """Batches in one pass; inf where nobody knows."""
        return self._together(self._limits)

    def start_epoch(self, epoch: int) -> None:
        """Distributed samplers shuffle by the epoch's number."""
        for loader in self.combined.flattened:
            _set_sampler_epoch(loader, epoch)

    @property
    def _is_plain(self) -> bool:
        """Whether there is one dataloader, to be iterated without CombinedLoader's machinery (10 microseconds)."""
        flattened = self.combined.flattened
        return len(flattened) == 1 and self.combined.iterables is flattened[0]

    def batches(self, limit: float = float("inf")) -> Iterator[tuple[Batch, int, int]]:
        """Begin a pass: (batch, batch_idx, dataloader_idx); of each dataloader, at most ``limit`` batches."""
        self.combined.limits = limits = [min(own, limit) for own in self._limits]
        count = self._together(limits)
        source = iter(self.combined.flattened[0] if self._is_plain else _begun(self.combined))
        watched = self._watch(_one_ahead(source) if count == float("inf") else source)
        batches = islice(watched, None if count == float("inf") else int(count))
        return ((batch, index, 0) for index, batch in enumerate(batches)) if self._is_plain else batches

    # --- training, whose passes can be taken up ---

    def open(self) -> None:
        """Begin a pass of training: that draws random numbers, and fetches a batch where their number is not known."""
        self._opened = None  # its workers end
        self._load_awaited()
        source = self._begin()
        self._opened = chain(list(islice(source, 1)), source) if self.num_batches() == float("inf") else source

    def training_pass(self) -> Iterator[Batch]:
        """The pass that was opened, or one that begins now: of each batch, what a step gets."""
        if self._opened is None:
            self.open()
        assert self._opened is not None
        opened, self._opened = self._watch(self._opened), None
        return iter(opened) if self._is_plain else (batch for batch, *_ in opened)

    def close(self) -> None:
        """Give up the pass, and shut down the workers."""
        self._opened = None
        self.combined.reset()

    def _begin(self) -> Iterator[Any]:
        places = self.places()
        if self._is_plain:
            return iter(places[0])
        self.combined.limits = self._limits
        return self.begin_together()

    def places(self) -> list[Place]:
        """Where each of the dataloaders is."""
        if not self._places:
            self._places = [place_of(loader) for loader in self.combined.flattened]
            for place in self._places:
                place.reads_ahead = not self._has_length
                if isinstance(place, SampledPlace):
                    place.on_open = self.on_open
        return self._places

    def begin_together(self) -> Iterator[Any]:
        """Begin a pass over all of them, or go on with the one that was taken up."""
        combined, taken_up = self.combined, self._taken_up
        self._taken_up = {}
        loaders, combined._flattened = combined._flattened, self.places()
        try:
            begun = _begun(combined)
        finally:
            combined._flattened = loaders
        if taken_up:
            assert combined._iterator is not None
            combined._iterator._idx = taken_up["index"]
            if isinstance(combined._iterator, _MaxSizeCycle):
                combined._iterator._consumed = list(taken_up["over"])
        return begun

    def position(self) -> dict[str, Any]:
        """Where the pass of training is."""
        states = [place.state_dict() for place in self.places()]
        position = {"loaders": states, "made_in": self.made_in}
        if (together := self.combined._iterator) is not None:
            position["index"], position["over"] = together._idx, list(getattr(together, "_consumed", ()))
        return position

    def recall(self, position: dict[str, Any], epoch: int) -> bool:
        """Learn from a position when the dataloaders were made; returns whether those would still be used."""
        made_in = position["made_in"]
        if self.remade_every and epoch - made_in >= self.remade_every:
            return False
        self.made_in = made_in
        return True

    def begin_after(self, position: dict[str, Any]) -> None:
        """Take over from a pass that was over what the next one depends on."""
        self._awaited = []
        self.close()
        if len(position["loaders"]) == len(self.places()):
            for place, state in zip(self.places(), position["loaders"], strict=True):
                if state:
                    place.begin_after(state)

    def take_up(self, position: dict[str, Any], consumed: int | None) -> list[str]:
        """Have the next pass be what is left of that one."""
        states, places, self._awaited = position["loaders"], self.places(), []
        self.close()
        if len(states) != len(places):
            self._skip(consumed or max(state["consumed"] for state in states))
            return [f"there were {len(states)} dataloaders and are {len(places)}"]
        reasons, is_one = [], len(places) == 1
        for place, state in zip(places, states, strict=True):
            if place.drops and state["consumed"]:
                _warn_of_dropping(place, state["consumed"])
            reasons += place.take_up(state, consumed if is_one else None)
        if consumed is not None and not is_one:
            reasons.append("it was written inside a batch")
        self._taken_up = {"index": 0, "over": [], **position}
        return reasons

    def skip(self, count: int) -> int:
        """Have the next pass begin after its first ``count`` batches. Returns how many are still to be dropped."""
        self.close()
        if self._load_awaited():
            return 0
        places = self.places()
        if count < self.num_batches() and not all(map(_is_repeatable, places)):
            rank_zero_warn(
                "You're resuming from a checkpoint that ended before the epoch ended and your dataloader is not"
                " resumable. The batches that were trained are left out; in another order they are others."
                " Consider using an end-of-epoch checkpoint or make your dataloader"
                " resumable by implementing the `state_dict` / `load_state_dict` interface.",
                category=PossibleUserWarning,
            )
        return self._skip(count)

    def _skip(self, count: int) -> int:
        places = self.places()
        if len(places) > 1 and any(not isinstance(place, SampledPlace) or len(place) < count for place in places):
            return count
        for place in places:
            place.skip(count)
        self._taken_up = {"index": count, "over": [False] * len(places)}
        return 0

    def _together(self, counts: list[float]) -> float:
        """Batches of a pass in which each dataloader has so many."""
        if self.is_sequential:
            return sum(counts)
        return min(counts) if self.combined._mode == "min_size" else max(counts)


class DrawnLoaderSet(LoaderSet):
    """Dataloaders whose batches a step draws itself. Implements ``trainer.data.batches.DrawnLoaders``.

    Args:
        combined: the dataloaders, prepared.
        limits: batches to run of each.
        fetcher: keeps count of what is drawn.
        profiler: times the fetching of each batch.
        stage: what the profiler is to call it.
    """

    def __init__(
        self,
        combined: CombinedLoader,
        limits: list[float],
        fetcher: _DataLoaderIterDataFetcher,
        profiler: Profiler,
        stage: RunningStage,
    ) -> None:
        super().__init__(combined, limits, has_length=True)  # nobody can look ahead of a step that draws
        self.fetcher = fetcher
        fetcher._start_profiler = partial(profiler.start, _FETCHING[stage])
        fetcher._stop_profiler = partial(profiler.stop, _FETCHING[stage])

    @property
    def is_done(self) -> bool:
        """Whether the last batch of the pass has been drawn, as far as is known."""
        return self.fetcher.done

    @property
    def last(self) -> tuple[Batch, int, int]:
        """The batch drawn last, its index, and its dataloader's; (None, 0, 0) before the first."""
        return self.fetcher._batch, self.fetcher._batch_idx, self.fetcher._dataloader_idx

    def iterator(self) -> Iterator[tuple[Batch, int, int]]:
        """What a step draws from."""
        return next(self.fetcher)  # type: ignore[arg-type]

    def batches(self, limit: float = float("inf")) -> Iterator[tuple[Batch, int, int]]:
        """Begin a pass: for each step, what the step before it drew last."""
        self.combined.limits = [min(own, limit) for own in self.limits]
        self.fetcher.setup(self.combined)
        iter(self.fetcher)
        return self._steps()

    def open(self) -> None:
        """Begin a pass of training, of which steps draw."""
        self._opened = None
        self._load_awaited()
        self.combined.limits, drawn = self.limits, int(self._taken_up.get("drawn", 0))
        self.fetcher.setup(_Beginning(self))  # type: ignore[arg-type]
        iter(self.fetcher)
        self.fetcher.fetched = drawn
        self.fetcher.done = self.fetcher.length is not None and drawn >= self.fetcher.length
        # a loop would take None for a batch that is missing
        self._opened = (((), *where) if batch is None else (batch, *where) for batch, *where in self._steps())

    @property
    def _is_plain(self) -> bool:
        return False  # nobody would keep count

    def position(self) -> dict[str, Any]:
        """Where the pass of training is."""
        return {**super().position(), "drawn": self.fetcher.fetched}

    def take_up(self, position: dict[str, Any], consumed: int | None) -> list[str]:
        """Have the next pass be what is left of that one."""
        inside = [] if consumed is None else ["it was written inside a step, which had drawn batches already"]
        return super().take_up(position, None) + inside

    def skip(self, count: int) -> int:
        """Have the next pass begin after its first ``count`` steps, as if each had drawn one batch."""
        left = super().skip(count)
        self._taken_up["drawn"] = count - left
        return left

    def _steps(self) -> Iterator[tuple[Batch, int, int]]:
        while not self.is_done:
            yield self.last


def _begun(combined: CombinedLoader) -> Iterator[tuple[Batch, int, int]]:
    """A pass over ``combined``, which has begun: iterating ``combined`` itself would begin it again."""
    iter(combined)
    return iter(combined.__next__, object())


def _one_ahead(source: Iterator[Any]) -> Iterator[Any]:
    """``source``; each item is fetched before the one before it is handed out, the first one now."""

    def rest() -> Iterator[Any]:
        while ahead:
            item = ahead.pop()
            ahead.extend(islice(source, 1))
            yield item

    ahead = list(islice(source, 1))
    return rest()


class _Beginning:
    """A CombinedLoader for who begins its passes himself.

    Args:
        loaders: whose passes of training it begins.
    """

    def __init__(self, loaders: LoaderSet) -> None:
        self._loaders = loaders

    def __iter__(self) -> Iterator[Any]:
        self._loaders.begin_together()
        return self._loaders.combined

    def __len__(self) -> int:
        return len(self._loaders.combined)

    def reset(self) -> None:
        """Shut down what runs."""
        self._loaders.combined.reset()


def _is_repeatable(place: Place) -> bool:
    """Whether a pass can be gone on with, though nobody knows where it was: by who keeps its place, or has an order."""
    return isinstance(place, StatefulPlace) or isinstance(getattr(place.loader, "sampler", None), SequentialSampler)


def _warn_of_dropping(place: Place, count: int) -> None:
    rank_zero_warn(
        f"Resuming inside an epoch: a {type(place.loader).__name__} cannot skip batches, so the first {count} are"
        " loaded and dropped. What follows is exact if it gives the same batches in the same order again. It would cost"
        " nothing with a map-style dataset, or with a dataloader that has `state_dict` and `load_state_dict`"
        " (torchdata's StatefulDataLoader).",
        category=PossibleUserWarning,
    )


def watch_of(profiler: Profiler, stage: RunningStage) -> Watch | None:
    """What times the fetching of a stage's batches; None where nobody asks."""
    return None if isinstance(profiler, PassThroughProfiler) else partial(_watched, profiler, _FETCHING[stage])


def _unwatched(source: Iterable[Any]) -> Iterable[Any]:
    return source


def _watched(profiler: Profiler, name: str, source: Iterable[Any]) -> Iterator[Any]:
    """``source``, with the time to fetch each item on the profiler's account."""
    iterator, end = iter(source), object()
    while True:
        with profiler.profile(name):
            item = next(iterator, end)
        if item is end:
            return
        yield item
