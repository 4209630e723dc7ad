"""``trainer.fit_loop`` and its relatives, as stock callbacks, loggers and the tuner read and write them.

Each view holds nothing of its own: it shows the loop's state under Lightning's names.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from trainer.compat import loop_state
from trainer.compat.logging import ResultsView
from trainer.eval_loop import EvalLoop
from trainer.fit_loop import FitLoop


def is_automatic(trainer: Any) -> bool:
    """Whether optimization is automatic."""
    return trainer.lightning_module is None or bool(trainer.lightning_module.automatic_optimization)


class EvalLoopView:
    """``trainer.validate_loop``, ``test_loop``, ``predict_loop`` and ``fit_loop.epoch_loop.val_loop``."""

    def __init__(self, trainer: Any, loop: EvalLoop, stage: RunningStage) -> None:
        self._trainer = trainer
        self._loop = loop
        self._stage = stage

    @property
    def _results(self) -> Any:
        return ResultsView(self._trainer, self._loop.metrics)

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
    def batch_progress(self) -> Any:
        """Counts of batches."""
        inside_fit = self._stage is RunningStage.VALIDATING and self._trainer.state.fn is TrainerFn.FITTING
        epoch = self._trainer.progress.epoch_start.epoch if inside_fit else None
        return loop_state.evaluation_of(self._loop.progress, epoch)

    @property
    def predictions(self) -> Any:
        """What ``predict_step`` returned so far; a list for each dataloader where there are several."""
        made = self._loop.predictions
        return made[0] if len(made) == 1 else made


class EpochLoopView:
    """``fit_loop.epoch_loop``."""

    def __init__(self, trainer: Any, loop: FitLoop, val_loop: EvalLoopView) -> None:
        self._trainer = trainer
        self._loop = loop
        self.val_loop = val_loop

    @property
    def batch_progress(self) -> Any:
        """Counts of batches."""
        return loop_state.batches_of(self._loop.progress)

    @property
    def scheduler_progress(self) -> Any:
        """Counts of steps of schedules."""
        return loop_state.schedules_of(self._loop.progress)

    @property
    def automatic_optimization(self) -> SimpleNamespace:
        """Counts of steps of optimizers."""
        progress, window, automatic = self._loop.progress, self._loop.window, is_automatic(self._trainer)
        return SimpleNamespace(optim_progress=loop_state.optimization_of(progress, window, automatic))

    @property
    def manual_optimization(self) -> SimpleNamespace:
        """The same, in manual optimization."""
        by_hand = not is_automatic(self._trainer)
        return SimpleNamespace(optim_step_progress=loop_state.manual_steps_of(self._loop.progress, by_hand))

    @property
    def _results(self) -> Any:
        return ResultsView(self._trainer, self._loop.metrics)

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
        """Zero-based index of the current batch within its epoch, or between epochs that of the last."""
        return int(self.batch_progress.current.ready) - 1

    @property
    def max_steps(self) -> int:
        """Optimizer steps to take in all."""
        return self._loop.limits.max_steps

    @max_steps.setter
    def max_steps(self, steps: int) -> None:
        self._loop.limits.max_steps = steps

    @property
    def min_steps(self) -> int | None:
        """Optimizer steps before ``should_stop`` is heeded."""
        return self._loop.limits.min_steps

    def reset(self) -> None:
        """Give up a batch that is under way."""
        self._loop.progress.give_up_batch()

    def _should_accumulate(self) -> bool:
        return self._loop.window.is_open

    def _should_check_val_epoch(self) -> bool:
        return self._loop.validate is not None and self._loop.limits.epoch_validates()


class FitLoopView:
    """``trainer.fit_loop``."""

    def __init__(self, trainer: Any, loop: FitLoop, val_loop: EvalLoop) -> None:
        self._trainer = trainer
        self._loop = loop
        self._val_loop = val_loop
        self.epoch_loop = EpochLoopView(trainer, loop, EvalLoopView(trainer, val_loop, RunningStage.VALIDATING))

    @property
    def _results(self) -> Any:
        return self._trainer._results

    @property
    def epoch_progress(self) -> Any:
        """Counts of epochs."""
        return loop_state.epochs_of(self._loop.progress)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of all these counts."""
        loop, automatic = self._loop, is_automatic(self._trainer)
        return loop_state.fit_loop_of(loop.progress, self._val_loop.progress, loop.window, automatic)

    def reset(self) -> None:
        """Give up a batch that is under way; an epoch goes on."""
        self.epoch_loop.reset()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        loop_state.progress_from(state_dict, self._loop.progress)
        loop_state.evaluation_from(state_dict, self._val_loop.progress, self._loop.progress)

    @property
    def max_epochs(self) -> int | None:
        """Epochs to train in all."""
        return self._loop.limits.max_epochs

    @max_epochs.setter
    def max_epochs(self, epochs: int | None) -> None:
        self._loop.limits.max_epochs = epochs

    @property
    def min_epochs(self) -> int | None:
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
        """Zero-based index of the current batch within its epoch, or between epochs that of the last."""
        return self.epoch_loop.batch_idx

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
    def done(self) -> bool:
        """Whether no further epoch is to be trained."""
        return self._loop.limits.fit_is_done()

    @property
    def _data_fetcher(self) -> Any:
        return getattr(self._loop.batches.loaders, "fetcher", None)

    def _should_accumulate(self) -> bool:
        return self._loop.window.is_open
