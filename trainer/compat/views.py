"""``trainer.fit_loop`` and its relatives, as stock callbacks, loggers and the tuner read and write them.

Each view holds nothing of its own: it shows the loop's state under Lightning's names.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightning.pytorch.trainer.states import RunningStage

from trainer.eval_loop import EvalLoop
from trainer.fit_loop import FitLoop


class BatchProgressView:
    """``fit_loop.epoch_loop.batch_progress``."""

    def __init__(self, loop: FitLoop) -> None:
        self._loop = loop

    @property
    def is_last_batch(self) -> bool:
        """Whether the current batch is its epoch's last."""
        return self._loop.progress.is_last_batch

    @property
    def current(self) -> SimpleNamespace:
        """Counts within the epoch."""
        progress = self._loop.progress
        started = progress.batches_this_epoch
        return _counts(started, started - progress.in_batch)

    @property
    def total(self) -> SimpleNamespace:
        """Counts over all epochs."""
        progress = self._loop.progress
        return _counts(progress.batches_started, progress.batches_started - progress.in_batch)


class EvalLoopView:
    """``trainer.validate_loop``, ``test_loop``, ``predict_loop`` and ``fit_loop.epoch_loop.val_loop``."""

    def __init__(self, trainer: Any, loop: EvalLoop, stage: RunningStage) -> None:
        self._trainer = trainer
        self._loop = loop
        self._stage = stage

    @property
    def _has_run(self) -> bool:
        return self._loop.progress.has_run

    @property
    def _data_source(self) -> SimpleNamespace:
        return SimpleNamespace(is_defined=lambda: self._trainer.data.is_defined(self._stage))

    @property
    def _combined_loader(self) -> Any:
        loaders = self._trainer.data.loaders(self._stage) if self._trainer.data.is_ready(self._stage) else None
        return None if loaders is None else loaders.combined

    @property
    def _data_fetcher(self) -> Any:
        return getattr(self._loop.loaders, "fetcher", None)

    @property
    def max_batches(self) -> list[float]:
        """Batches to run of each dataloader."""
        return [] if self._loop.loaders is None else self._loop.loaders.limits

    @property
    def num_dataloaders(self) -> int:
        """The number of dataloaders."""
        return len(self.max_batches)

    @property
    def batch_progress(self) -> SimpleNamespace:
        """Counts of batches."""
        progress = self._loop.progress
        return SimpleNamespace(
            is_last_batch=progress.is_last_batch,
            current=_counts(progress.batches, progress.batches),
            total=_counts(progress.total_batches, progress.total_batches),
        )

    @property
    def predictions(self) -> Any:
        """What ``predict_step`` returned so far."""
        return self._loop.predictions


class EpochLoopView:
    """``fit_loop.epoch_loop``."""

    def __init__(self, loop: FitLoop, val_loop: EvalLoopView) -> None:
        self._loop = loop
        self.val_loop = val_loop
        self.batch_progress = BatchProgressView(loop)

    @property
    def _batches_that_stepped(self) -> int:
        return self._loop.progress.windows

    @property
    def global_step(self) -> int:
        """Optimizer steps attempted."""
        return self._loop.progress.optimizer_steps

    @property
    def total_batch_idx(self) -> int:
        """Zero-based index of the current batch over all epochs."""
        return self._loop.progress.batches_started - 1

    @property
    def batch_idx(self) -> int:
        """Zero-based index of the current batch within its epoch."""
        return self._loop.progress.batch_idx

    @property
    def max_steps(self) -> int:
        """Optimizer steps to take in all."""
        return self._loop.limits.max_steps

    @max_steps.setter
    def max_steps(self, steps: int) -> None:
        self._loop.limits.max_steps = steps

    @property
    def min_steps(self) -> int:
        """Optimizer steps before ``should_stop`` is heeded."""
        return self._loop.limits.min_steps

    def _should_accumulate(self) -> bool:
        return self._loop.window.is_open

    def _should_check_val_epoch(self) -> bool:
        return self._loop.validate is not None and self._loop.limits.epoch_validates()


class FitLoopView:
    """``trainer.fit_loop``."""

    def __init__(self, trainer: Any, loop: FitLoop, val_loop: EvalLoop) -> None:
        self._trainer = trainer
        self._loop = loop
        self.epoch_loop = EpochLoopView(loop, EvalLoopView(trainer, val_loop, RunningStage.VALIDATING))

    @property
    def epoch_progress(self) -> SimpleNamespace:
        """Counts of epochs."""
        progress = self._loop.progress
        counts = _counts(progress.epochs_trained, progress.epoch)
        return SimpleNamespace(current=counts, total=counts)

    @property
    def max_epochs(self) -> int:
        """Epochs to train in all."""
        return self._loop.limits.max_epochs

    @max_epochs.setter
    def max_epochs(self, epochs: int) -> None:
        self._loop.limits.max_epochs = epochs

    @property
    def min_epochs(self) -> int:
        """Epochs before ``should_stop`` is heeded."""
        return self._loop.limits.min_epochs

    @property
    def max_steps(self) -> int:
        """Optimizer steps to take in all."""
        return self._loop.limits.max_steps

    @property
    def max_batches(self) -> float:
        """Batches of one epoch."""
        return float(self._trainer.num_training_batches)

    @property
    def batch_idx(self) -> int:
        """Zero-based index of the current batch within its epoch."""
        return self._loop.progress.batch_idx

    @property
    def total_batch_idx(self) -> int:
        """Zero-based index of the current batch over all epochs."""
        return self.epoch_loop.total_batch_idx

    @property
    def _combined_loader(self) -> Any:
        data = self._trainer.data
        loaders = data.loaders(RunningStage.TRAINING) if data.is_ready(RunningStage.TRAINING) else None
        return None if loaders is None else loaders.combined

    @property
    def _data_fetcher(self) -> Any:
        return getattr(self._loop.batches.loaders, "fetcher", None)

    def _should_accumulate(self) -> bool:
        return self._loop.window.is_open


def _counts(started: int, completed: int) -> SimpleNamespace:
    return SimpleNamespace(ready=started, started=started, processed=started, completed=completed)
