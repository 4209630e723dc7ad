"""The dataloaders of one stage, ready to run: ``trainer.data.Loaders`` over Lightning's CombinedLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import SequentialSampler

from trainer.data import Batch

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
    """The dataloaders of one stage, ready to run. Implements ``trainer.data.Loaders``.

    Args:
        combined: the dataloaders, prepared.
        limits: batches to run of each.
        has_length: whether the length of each is known.
        watch: put around a source of batches, by a profiler; None for nothing.
    """

    def __init__(
        self, combined: CombinedLoader, limits: list[float], has_length: bool, watch: Watch | None = None
    ) -> None:
        self.combined = combined
        self._limits = limits
        self._has_length = has_length
        self._watch = _unwatched if watch is None else watch
        self._goes_on = False

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

    @property
    def goes_on(self) -> bool:
        """Whether the dataloaders go on by themselves where a checkpoint was written."""
        return self._goes_on

    @property
    def is_repeatable(self) -> bool:
        """Whether a pass that was left can be gone on with exactly: by who keeps its place, or has a fixed order."""
        return all(
            isinstance(loader, _Stateful) or isinstance(getattr(loader, "sampler", None), SequentialSampler)
            for loader in self.combined.flattened
        )

    def state_dicts(self) -> list[dict[str, Any]]:
        """The places of those dataloaders that keep theirs."""
        return self.combined._state_dicts()

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """Go on from what ``state_dicts`` returned."""
        self.combined._load_state_dicts(states)
        self._goes_on = bool(states)

    def num_batches(self) -> float:
        """Batches in one pass; inf where nobody knows."""
        return self._together(self._limits)

    def start_epoch(self, epoch: int) -> None:
        """Distributed samplers shuffle by the epoch's number."""
        for loader in self.combined.flattened:
            _set_sampler_epoch(loader, epoch)

    def only(self) -> Iterable[Batch] | None:
        """The one plain dataloader, iterated without CombinedLoader's machinery (about 10 microseconds a batch)."""
        flattened = self.combined.flattened
        is_plain = len(flattened) == 1 and self.combined.iterables is flattened[0]
        return self._watch(flattened[0]) if is_plain else None

    def batches(self, limit: float = float("inf")) -> Iterator[tuple[Batch, int, int]]:
        """One pass: (batch, batch_idx, dataloader_idx); of each dataloader, at most ``limit`` batches."""
        limits = [min(own, limit) for own in self._limits]
        count = self._together(limits)
        stop = None if count == float("inf") else int(count)
        only = self.only()
        if only is not None:
            return ((batch, batch_idx, 0) for batch_idx, batch in enumerate(islice(only, stop)))
        self.combined.limits = limits
        return islice(self._watch(self.combined), stop)

    def _together(self, counts: list[float]) -> float:
        """Batches of a pass in which each dataloader has so many."""
        if self.is_sequential:
            return sum(counts)
        return min(counts) if self.combined._mode == "min_size" else max(counts)


class DrawnLoaderSet(LoaderSet):
    """Dataloaders whose batches a step draws itself. Implements ``trainer.data.DrawnLoaders``.

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
    def is_repeatable(self) -> bool:
        """Whether a pass that was left can be gone on with: nobody knows how many batches the steps have drawn."""
        return all(isinstance(loader, _Stateful) for loader in self.combined.flattened)

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

    def only(self) -> None:
        """None: a plain iterator would not keep count."""

    def batches(self, limit: float = float("inf")) -> Iterator[tuple[Batch, int, int]]:
        """For each step of a pass, what the step before it drew last."""
        self.combined.limits = [min(own, limit) for own in self.limits]
        self.fetcher.setup(self.combined)
        iter(self.fetcher)
        while not self.is_done:
            batch, batch_idx, dataloader_idx = self.last
            # a loop would take None for a batch that is missing
            yield () if batch is None else batch, batch_idx, dataloader_idx


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
