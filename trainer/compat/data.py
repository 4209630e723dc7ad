"""Dataloaders: where they come from, made ready for several processes, limited. By Lightning's data connector."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, Literal

from lightning.fabric.utilities.data import _auto_add_worker_init_fn, _set_sampler_epoch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.trainer.connectors.data_connector import (
    _check_dataloader_iterable,
    _DataConnector,
    _DataHookSelector,
    _DataLoaderSource,
    _parse_num_batches,
    _request_dataloader,
    _resolve_overfit_batches,
)
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import _is_dataloader_shuffled, has_len_all_ranks
from lightning.pytorch.utilities.model_helpers import is_overridden

from trainer.data import Batch
from trainer.errors import UnsupportedError

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


class DataSource:
    """Where a run's dataloaders come from: arguments, the module's methods, or a datamodule's.

    Args:
        trainer: the Trainer; Lightning's connector asks it for ranks and strategy.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.connector = _DataConnector(trainer)
        self.datamodule: LightningDataModule | None = None
        self._sources: dict[RunningStage, _DataLoaderSource] = {}
        self._ready: dict[RunningStage, LoaderSet | None] = {}
        self._made_in: dict[RunningStage, float] = {}
        self._outdated: set[RunningStage] = set()

    def attach(self, module: LightningModule, given: dict[RunningStage, Any], datamodule: Any) -> None:
        """Note where each stage's dataloaders will come from.

        Args:
            module: whose ``*_dataloader`` methods are used where nothing else is given.
            given: dataloaders by stage; None for a stage without.
            datamodule: whose methods are used instead, where it is not None.
        """
        self.datamodule = datamodule
        self.connector._datahook_selector = _DataHookSelector(module, datamodule)
        self._ready.clear()
        self._outdated.clear()
        for stage in (
            RunningStage.TRAINING,
            RunningStage.VALIDATING,
            RunningStage.TESTING,
            RunningStage.PREDICTING,
        ):
            loaders = given.get(stage)
            instance = datamodule if datamodule is not None else module if loaders is None else loaders
            self._sources[stage] = _DataLoaderSource(instance, f"{stage.dataloader_prefix}_dataloader")
        if datamodule is not None:
            datamodule.trainer = self._trainer

    def prepare_data(self) -> None:
        """Run ``prepare_data`` where it is due."""
        self.connector.prepare_data()

    def is_defined(self, stage: RunningStage) -> bool:
        """Whether there is anything to ask for dataloaders of ``stage``."""
        return self._sources[stage].is_defined()

    def is_ready(self, stage: RunningStage) -> bool:
        """Whether the dataloaders of ``stage`` have been made already."""
        return stage in self._ready

    def is_due(self, stage: RunningStage) -> bool:
        """Whether the dataloaders of ``stage`` are to be made before its next pass, for the first time or anew."""
        if stage not in self._ready or stage in self._outdated:
            return True
        every = self._trainer.reload_dataloaders_every_n_epochs
        return bool(every) and self._trainer.current_epoch - self._made_in[stage] >= every

    def outdate(self, stage: RunningStage) -> None:
        """Have the dataloaders of ``stage`` made anew before its next pass, training's before its next epoch."""
        self._outdated.add(stage)

    def loaders(self, stage: RunningStage, anew: bool = False) -> LoaderSet | None:
        """The dataloaders of ``stage``, made at the first call; None where there are none or their limit is 0.

        Args:
            stage: whose.
            anew: make them also where they have been made already.
        """
        old = self._ready.get(stage)
        if stage not in self._ready or anew:
            with warnings.catch_warnings():
                # Lightning 2.6.6 asks torch's pytree in a way that torch 2.15 deprecates
                warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
                self._ready[stage] = self._make(stage)
            self._outdated.discard(stage)
            # a sanity check makes those of its epoch's validation, too; but not every epoch has one
            is_extra = self._trainer.sanity_checking and not self._trainer.loop.limits.epoch_validates()
            self._made_in[stage] = float("-inf") if is_extra else self._trainer.current_epoch
        if old is not None and old is not self._ready[stage]:
            old.combined.reset()
        return self._ready[stage]

    def release(self) -> None:
        """Shut down the worker processes of a run that is over."""
        for ready in self._ready.values():
            if ready is not None:
                ready.combined.reset()

    def transfer_hook(self, name: str) -> Any:
        """The user's ``on_before_batch_transfer`` (and so on): the datamodule's or the module's; None for neither."""
        selector = self.connector._datahook_selector
        assert selector is not None
        owner = selector.get_instance(name)
        return getattr(owner, name) if is_overridden(name, owner) else None

    def _make(self, stage: RunningStage) -> LoaderSet | None:
        trainer, source = self._trainer, self._sources[stage]
        limit = getattr(trainer, f"limit_{stage.dataloader_prefix}_batches")
        training, fitting = stage is RunningStage.TRAINING, trainer.state.fn is TrainerFn.FITTING
        optional = fitting and not training
        if limit == 0 or (optional and not source.is_defined()):
            return None  # what is needed and not defined is asked for all the same: that says what is missing
        given = _request_dataloader(source)
        trainer.strategy.barrier(f"{stage.dataloader_prefix}_dataloader()")
        mode: Literal["max_size_cycle", "sequential"] = "max_size_cycle" if training else "sequential"
        combined = given if isinstance(given, CombinedLoader) else CombinedLoader(given, mode)
        if fitting and trainer.overfit_batches > 0:
            _resolve_overfit_batches(combined, stage)
        for loader in combined.flattened:
            _check_dataloader_iterable(loader, source, trainer.state.fn)
        combined.flattened = [self._prepare(loader, stage) for loader in combined.flattened]
        module = trainer.lightning_module
        may_be_empty = module.allow_zero_length_dataloader_with_multiple_devices or (
            self.datamodule is not None and self.datamodule.allow_zero_length_dataloader_with_multiple_devices
        )
        lengths = [
            len(loader) if has_len_all_ranks(loader, trainer.strategy, may_be_empty) else float("inf")
            for loader in combined.flattened
        ]
        limits = [_parse_num_batches(stage, length, limit) for length in lengths]
        return LoaderSet(combined, limits, has_length=float("inf") not in lengths, watch=self._watch_of(stage))

    def _watch_of(self, stage: RunningStage) -> Watch | None:
        profiler = self._trainer.profiler
        return None if isinstance(profiler, PassThroughProfiler) else partial(_watched, profiler, _FETCHING[stage])

    def _prepare(self, loader: Any, stage: RunningStage) -> Any:
        shuffled = stage is RunningStage.TRAINING or _is_dataloader_shuffled(loader)
        if shuffled and stage is not RunningStage.TRAINING:
            rank_zero_warn(
                f"Your `{stage.dataloader_prefix}_dataloader`'s sampler has shuffling enabled,"
                " it is strongly recommended that you turn shuffling off for val/test dataloaders.",
                category=PossibleUserWarning,
            )
        loader = self.connector._prepare_dataloader(loader, shuffle=shuffled, mode=stage)
        loader = self._trainer.strategy.process_dataloader(loader)
        _auto_add_worker_init_fn(loader, self._trainer.global_rank)
        return loader


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


def refuse_dataloader_iter(module: LightningModule) -> None:
    """``training_step(self, dataloader_iter)`` is not supported yet.

    Raises:
        UnsupportedError: a step of ``module`` takes it.
    """
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        code = getattr(getattr(module, name, None), "__code__", None)
        if code is not None and "dataloader_iter" in code.co_varnames[: code.co_argcount]:
            raise UnsupportedError(
                f"Got {type(module).__name__}.{name}(dataloader_iter), expected {name}(batch, batch_idx): steps that"
                " draw their own batches are not supported yet."
            )
