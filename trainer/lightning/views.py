"""``trainer.fit_loop`` and the other loops, as stock callbacks, loggers and the tuner read and write them.

Each view is a subclass of one of Lightning's loops on top of the state of our loop: attributes that Lightning's
constructor assigns are properties here. Attributes that Lightning computes from them (``done``, ``batch_idx``,
``max_batches``, ...) are inherited. Methods that run something call our loop.
"""

# mypy: disable-error-code="override"
# (Lightning's loops have attributes where views have properties.)

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning_utilities.core.rank_zero import WarningCache
from torch import Tensor

from trainer.common.aliases import alias
from trainer.errors import ConfigurationError, rank_zero_warn
from trainer.lightning import loop_state, tuning
from trainer.loop.evaluation import EvalLoop
from trainer.loop.fit import FitLoop
from trainer.loop.run_state import RunData, RunState, state_of
from trainer.metrics.logging import ResultsView
from trainer.state.progress import DONE

_warnings = WarningCache()
View = TypeVar("View")


class LoopAttribute(Generic[View]):
    """An attribute of a Trainer, or of a loop, that holds a view of one of its loops.

    A program may assign one of Lightning's loops to it. An override of ``_print_results`` is used; other overrides are
    refused, because they would not run.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, holder: Any, owner: type | None = None) -> View:
        value: Any = self if holder is None else vars(holder)[self._name]
        view: View = value
        return view

    def __set__(self, holder: Any, loop: Any) -> None:
        if type(loop).__module__ == __name__ or not isinstance(loop, _Loop):  # a view, or a test double
            vars(holder)[self._name] = loop
            return
        overridden = _overrides_of(loop)
        if others := overridden - {"_print_results"}:
            raise ConfigurationError(
                f"Got a loop of the class {type(loop).__name__} for `{self._name}`, expected one that overrides at most"
                f" `_print_results`, not {', '.join(sorted(others))}: the loops that run are our own."
                " Use hooks of the module or of a callback."
            )
        if overridden:
            vars(holder)[self._name]._print_results = getattr(loop, "_print_results")  # noqa: B009


def _overrides_of(loop: Any) -> set[str]:
    """Return the methods that the class of ``loop``, or a base class that is not Lightning's, overrides or adds."""
    names: set[str] = set()
    for cls in type(loop).__mro__:
        if cls.__module__.partition(".")[0] in ("lightning", "pytorch_lightning"):
            break
        names |= {
            name
            for name, value in vars(cls).items()
            if not name.startswith("__") or (callable(value) and hasattr(_Loop, name))  # not `__annotations__`
        }
    return names


class _DataView(_Loop):
    """The dataloaders of the loop of a stage."""

    _run: RunState
    _data: RunData
    _stage = RunningStage.TRAINING

    @property
    def _data_source(self) -> Any:
        return self._data.source(self._stage)

    @property
    def _combined_loader(self) -> Any:
        loaders = self._data.ready(self._stage)
        return None if loaders is None else loaders.combined

    @_combined_loader.setter
    def _combined_loader(self, combined: None) -> None:
        self._data.forget(self._stage)


class _EvaluationView(_DataView):
    """The common part of the views of all evaluations."""

    verbose: bool = alias("_loop.verbose", writable=True)
    _has_run: bool = alias("_loop.progress.has_run")

    def __init__(self, trainer: pl.Trainer, stage: RunningStage, fn: TrainerFn, inference_mode: bool = False) -> None:
        _Loop.__init__(self, trainer)
        self._run, self._data = state_of(trainer), state_of(trainer).data
        self._loop: EvalLoop = self._run.eval_loops[stage]
        self._stage = stage
        self._trainer_fn = fn
        self.inference_mode = inference_mode

    @property
    def _data_fetcher(self) -> Any:
        return getattr(self._loop.loaders, "fetcher", None)

    def setup_data(self) -> None:
        """Create the dataloaders if they do not exist yet."""
        tuning.set_up_evaluation_data(self.trainer, self._stage)

    def reset(self) -> None:
        """Reset the counters of the last pass."""
        self._loop.progress.forget_run()

    def state_dict(self, destination: dict[str, Any] | None = None, prefix: str = "") -> dict[str, Any]:
        """Return the counters for a checkpoint."""
        return {"state_dict": {}, "batch_progress": self.batch_progress.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Restore the state of :meth:`state_dict`."""
        loop_state.batches_from(state_dict["batch_progress"], self._loop.progress)

    @property
    def batch_progress(self) -> Any:
        """Counts of batches."""
        run = self._run
        inside_fit = self._stage is RunningStage.VALIDATING and run.fits
        return loop_state.evaluation_of(self._loop.progress, run.progress if inside_fit else None)

    @property
    def run(self) -> Callable[[], Any]:
        """Run one pass inside a hook of another run. A function that is assigned replaces every pass of the loop."""
        return vars(self._loop).get("run") or partial(tuning.rerun, self.trainer, self._stage)

    @run.setter
    def run(self, run: Callable[..., Any]) -> None:
        self._loop.run = run  # type: ignore[method-assign]

    @run.deleter
    def run(self) -> None:
        del self._loop.run

    def _limits(self) -> list[float]:
        """Return the largest number of batches to run on any process, by dataloader; [] before there are dataloaders.

        Equal on all processes, because callbacks use it to determine whether a validation follows.
        """
        loaders = self._data.ready(self._stage) or self._loop.loaders
        return [] if loaders is None else list(loaders.plan.most)


class EvalLoopView(_EvaluationView, _EvaluationLoop):
    """``trainer.validate_loop``, ``test_loop`` and ``fit_loop.epoch_loop.val_loop``."""

    _evaluation_step: Any = alias("_loop.evaluate_batch", writable=True)

    @property
    def _results(self) -> Any:
        return ResultsView(self._run, self._loop.metrics)

    @property
    def _max_batches(self) -> list[float]:
        """Number of batches to run, by dataloader; [] for the validation of a fit while ``validate`` runs."""
        in_use = self._trainer_fn is TrainerFn.FITTING and self._run.fn is TrainerFn.VALIDATING
        return [] if in_use else self._limits()

    def print_results(self, results: list[Mapping[str, float]]) -> None:
        """Print the logged metrics of a run as a table, with a column for each dataloader."""
        tables = [{name: _as_tensor(value) for name, value in metrics.items()} for metrics in results]
        self._print_results(tables, self._trainer_fn.value)


def _as_tensor(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)  # keeps all digits


class PredictLoopView(_EvaluationView, _PredictionLoop):
    """``trainer.predict_loop``."""

    _results = None
    _predictions: list[list[Any]] = alias("_loop.predictions")
    _return_predictions: bool = alias("_loop.keep_predictions", writable=True)

    @property
    def max_batches(self) -> list[float]:
        """Number of batches to run, by dataloader."""
        return self._limits()

    @property
    def epoch_batch_indices(self) -> list[list[list[int]]]:
        """The dataset's indices by dataloader and batch, so far; empty unless a prediction writer needs them."""
        indices = self._batch_indices()
        return indices if self.is_written_at_the_end else [[] for _ in indices]

    @property
    def current_batch_indices(self) -> list[int]:
        """The dataset's indices in the current batch; empty if they are unknown."""
        indices, current = self._batch_indices(), max(self._loop.progress.batches_by_loader, default=0)
        seen = indices[current] if current < len(indices) else []
        return seen[-1] if seen else []

    def _batch_indices(self) -> list[list[list[int]]]:
        """Return indices by dataloader and batch, only of batches that have run, because samplers are ahead of them."""
        counts = self._loop.progress.batches_by_loader
        if self._loop.loaders is None:
            return []
        indices: list[list[list[int]]] = []
        for index, loader in enumerate(self._combined_loader.flattened):
            sampler = getattr(loader, "batch_sampler", None)
            if isinstance(sampler, _IndexBatchSamplerWrapper):
                indices.append(getattr(sampler, "seen_batch_indices", [])[: counts[index]])  # set by its first use
            else:
                message = f"Couldn't infer the batch indices fetched from your dataloader: `{type(loader).__name__}`"
                if message not in _warnings:
                    _warnings.add(message)
                    rank_zero_warn(message)
                indices.append([])
        return indices

    @property
    def is_written_at_the_end(self) -> bool:
        """Whether a callback writes all predictions at the end of the epoch, so that they must be kept."""
        callbacks = self._run.callbacks
        return any(isinstance(callback, BasePredictionWriter) and callback.interval.on_epoch for callback in callbacks)


class AutomaticOptimizationView(_AutomaticOptimization):
    """``epoch_loop.automatic_optimization``: Lightning's, with our counts. Programs may call it to train a batch."""

    @property
    def optim_progress(self) -> Any:
        """Counts of optimizer steps."""
        return loop_state.optimization_of(state_of(self.trainer))

    @optim_progress.setter
    def optim_progress(self, progress: Any) -> None:
        pass  # assigned by Lightning's constructor


class ManualOptimizationView(_ManualOptimization):
    """``epoch_loop.manual_optimization``: Lightning's, with our counts."""

    @property
    def optim_step_progress(self) -> Any:
        """Counts of optimizer steps."""
        return loop_state.manual_steps_of(state_of(self.trainer))

    @optim_step_progress.setter
    def optim_step_progress(self, progress: Any) -> None:
        pass  # assigned by Lightning's constructor


class EpochLoopView(_TrainingEpochLoop):
    """``fit_loop.epoch_loop``."""

    val_loop = LoopAttribute[EvalLoopView]()
    min_steps: int | None = alias("_loop.limits.min_steps", writable=True)
    max_steps: int = alias("_loop.limits.max_steps", writable=True)
    global_step: int = alias("_loop.progress.optimizer_steps")
    _batches_that_stepped: int = alias("_loop.progress.updates")
    _warning_cache = _warnings

    def __init__(self, trainer: pl.Trainer) -> None:
        _Loop.__init__(self, trainer)
        self._run = state_of(trainer)
        self._loop: FitLoop = self._run.loop
        self.val_loop = EvalLoopView(trainer, RunningStage.VALIDATING, TrainerFn.FITTING)
        self.automatic_optimization = AutomaticOptimizationView(trainer)
        self.manual_optimization = ManualOptimizationView(trainer)

    @property
    def batch_progress(self) -> Any:
        """Counts of batches."""
        return loop_state.batches_of(self._loop.progress)

    @property
    def scheduler_progress(self) -> Any:
        """Counts of schedule steps."""
        return loop_state.schedules_of(self._loop.progress)

    @property
    def _results(self) -> Any:
        return ResultsView(self._run, self._loop.metrics)

    def reset(self) -> None:
        """Drop the current batch."""
        self._loop.progress.discard_batch()
        self._loop.progress.position = DONE

    def _should_accumulate(self) -> bool:
        return self._loop.window.is_open


class MonitoredMetrics(Mapping[str, Any]):
    """The metrics that schedules may monitor.

    These are ``trainer.callback_metrics``, read through the method that Lightning calls.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def __getitem__(self, name: str) -> Any:
        if (value := self._trainer.fit_loop.epoch_loop._get_monitor_value(name)) is None:
            raise KeyError(name)
        engine = state_of(self._trainer).engine
        if engine.world_size > 1 and isinstance(value, Tensor):  # equal on all ranks, so that learning rates are equal
            value = torch.full_like(value, engine.collectives.broadcast(value.item()))
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._trainer.callback_metrics)

    def __len__(self) -> int:
        return len(self._trainer.callback_metrics)


class FitLoopView(_DataView, _FitLoop):
    """``trainer.fit_loop``."""

    epoch_loop = LoopAttribute[EpochLoopView]()
    min_epochs: int | None = alias("_loop.limits.min_epochs", writable=True)
    max_epochs: int | None = alias("_loop.limits.max_epochs", writable=True)

    def __init__(self, trainer: pl.Trainer) -> None:
        _Loop.__init__(self, trainer)
        self._run, self._data = state_of(trainer), state_of(trainer).data
        self._loop: FitLoop = self._run.loop
        self.epoch_loop = EpochLoopView(trainer)

    @property
    def restarting(self) -> bool:
        """Whether the current epoch is the one that was resumed in its middle from a checkpoint."""
        first = self._loop.batches.first
        return (self._loop.progress.batches_this_epoch if first is None else first) > 0

    @restarting.setter
    def restarting(self, restarting: bool) -> None:
        """Have no effect: Lightning's finders reset the flag, which their runs do not set here."""

    @property
    def _skip_backward(self) -> bool:
        return self._loop.forward_only in self._loop.path.wrappers

    @_skip_backward.setter
    def _skip_backward(self, skip: bool) -> None:
        if skip is not self._skip_backward:
            (self._loop.wrap if skip else self._loop.unwrap)(self._loop.forward_only)

    @property
    def _data_fetcher(self) -> Any:
        return getattr(self._loop.batches.loaders, "fetcher", None)

    @property
    def max_batches(self) -> int | float:
        """Number of batches in one epoch; inf if unknown. Writing it does not change the number of batches that run."""
        batches = self._loop.batches
        loaders = self._data.ready(self._stage) or batches.loaders
        number = batches.num_batches or float("inf")
        if loaders is not None:  # SWA writes the number of the loaders that the loop iterates
            number = batches.num_batches if loaders is batches.loaders else loaders.num_batches()
        return number if number == float("inf") else int(number)

    @max_batches.setter
    def max_batches(self, batches: int | float) -> None:
        self._loop.batches.num_batches = batches

    @property
    def epoch_progress(self) -> Any:
        """Counts of epochs."""
        return loop_state.epochs_of(self._loop.progress)

    def setup_data(self) -> None:
        """Create the dataloaders if they do not exist yet."""
        tuning.set_up_training_data(self.trainer)

    def run(self) -> None:
        """Train inside a hook of another run."""
        tuning.rerun(self.trainer, RunningStage.TRAINING)

    def reset(self) -> None:
        """Drop the current batch; the epoch continues."""
        self.epoch_loop.reset()

    def state_dict(self, destination: dict[str, Any] | None = None, prefix: str = "") -> dict[str, Any]:
        """Return the counters of this loop and of the loops in it, for a checkpoint."""
        return loop_state.fit_loop_of(self._run)

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Restore the state of :meth:`state_dict`."""
        loop_state.progress_from(state_dict, self._loop.progress)
        loop_state.evaluation_from(state_dict, self._run)
