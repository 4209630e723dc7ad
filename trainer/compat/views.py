"""``trainer.loops.fit`` and its relatives, as stock callbacks, loggers and the tuner read and write them.

Each view holds nothing of its own: it shows the loop's state under Lightning's names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning_utilities.core.rank_zero import WarningCache, rank_zero_debug, rank_zero_info

from trainer.compat import loop_state, tuning
from trainer.compat.logging import ResultsView
from trainer.errors import ConfigurationError
from trainer.loops.evaluation import EvalLoop
from trainer.loops.fit import FitLoop

_warnings = WarningCache()
View = TypeVar("View")


def is_automatic(trainer: Any) -> bool:
    """Whether optimization is automatic."""
    return trainer.lightning_module is None or bool(trainer.lightning_module.automatic_optimization)


def announce_end(trainer: Any) -> None:
    """Say why a fit trains no further epoch."""
    limits, progress = trainer.loop.limits, trainer.progress
    if trainer.num_training_batches == 0:
        rank_zero_info("`Trainer.fit` stopped: No training batches.")
    elif limits.max_steps != -1 and progress.optimizer_steps >= limits.max_steps:
        rank_zero_info(f"`Trainer.fit` stopped: `max_steps={limits.max_steps!r}` reached.")
    elif limits.max_epochs not in (None, -1) and progress.epochs_trained >= limits.max_epochs:
        rank_zero_info(f"`Trainer.fit` stopped: `max_epochs={limits.max_epochs!r}` reached.")
    else:
        rank_zero_debug("`Trainer.fit` stopped: `trainer.should_stop` was set.")


class LoopPlace(Generic[View]):
    """Where a Trainer, or a loop, has one of its loops: a view of ours.

    Of a loop of Lightning's that a program puts there, the table of its results is taken, and it may override nothing
    else: it would not run.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, holder: Any, owner: type | None = None) -> View:
        place: Any = self if holder is None else vars(holder)[self._name]  # asked of the class it is the place itself
        view: View = place
        return view

    def __set__(self, holder: Any, loop: Any) -> None:
        if type(loop).__module__ == __name__ or not isinstance(loop, _Loop):  # a view, or nothing that could run
            vars(holder)[self._name] = loop
            return
        own = _overrides_of(loop)
        if own - {"_print_results"}:
            raise ConfigurationError(
                f"Got a loop of the class {type(loop).__name__} for `{self._name}`, expected one that overrides at most"
                f" `_print_results`, not {', '.join(sorted(own - {'_print_results'}))}: the loops that run are our own."
                " Use hooks of the module or of a callback."
            )
        if own:
            vars(holder)[self._name].print_results = getattr(loop, "_print_results")  # noqa: B009


def _overrides_of(loop: Any) -> set[str]:
    """What the loop's class, or those between it and Lightning's, define anew."""
    own: set[str] = set()
    for cls in type(loop).__mro__:
        if cls.__module__.partition(".")[0] in ("lightning", "pytorch_lightning"):
            break
        own |= {name for name in vars(cls) if hasattr(_Loop, name) or not name.startswith("__")}
    return own - set(vars(type("", (), {})))


class EvalLoopView:
    """``trainer.validate_loop``, ``test_loop``, ``predict_loop`` and ``fit_loop.epoch_loop.val_loop``."""

    def __init__(self, trainer: Any, loop: EvalLoop, stage: RunningStage) -> None:
        self.trainer = self._trainer = trainer
        self._loop = loop
        self._stage = stage
        self.print_results: Callable[[list[dict[str, Any]], str], None] | None = None  # a table of somebody's own

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # the tuner asks what kind of loop it has
        return _PredictionLoop if self._stage is RunningStage.PREDICTING else _EvaluationLoop

    def __reduce__(self) -> Any:
        return _bare, (type(self),), vars(self)

    @property
    def _results(self) -> Any:
        return ResultsView(self._trainer, self._loop.metrics)

    @property
    def _has_run(self) -> bool:
        return self._loop.progress.has_run

    @property
    def restarting(self) -> bool:
        """Whether the loop goes on in the middle of a pass: ours never does."""
        return False

    @restarting.setter
    def restarting(self, restarting: bool) -> None:
        pass

    @property
    def verbose(self) -> bool:
        """Whether the results are printed."""
        return self._loop.verbose

    @verbose.setter
    def verbose(self, verbose: bool) -> None:
        self._loop.verbose = verbose

    @property
    def return_predictions(self) -> bool:
        """Whether what ``predict_step`` returns is kept."""
        return self._loop.keep_predictions

    @return_predictions.setter
    def return_predictions(self, keep: bool | None) -> None:
        self._loop.keep_predictions = keep is not False

    @property
    def _data_source(self) -> Any:
        return self._trainer.data.source(self._stage)

    @property
    def _combined_loader(self) -> Any:
        loaders = self._trainer.data.loaders(self._stage) if self._trainer.data.is_ready(self._stage) else None
        return None if loaders is None else loaders.combined

    @_combined_loader.setter
    def _combined_loader(self, combined: None) -> None:
        self._trainer.data.forget(self._stage)

    def setup_data(self) -> None:
        """Make the dataloaders, where there are none yet."""
        tuning.set_up_evaluation_data(self._trainer, self._stage)

    @property
    def run(self) -> Callable[[], Any]:
        """One pass, from inside a hook of another. What is assigned takes the place of every pass of the loop."""
        return vars(self._loop).get("run") or partial(tuning.rerun, self._trainer, self._stage)

    @run.setter
    def run(self, run: Callable[..., Any]) -> None:
        self._loop.run = run  # type: ignore[method-assign]

    @run.deleter
    def run(self) -> None:
        del self._loop.run

    @property
    def _evaluation_step(self) -> Callable[..., None]:
        return self._loop.evaluate_batch

    @_evaluation_step.setter
    def _evaluation_step(self, step: Callable[..., None]) -> None:
        self._loop.evaluate_batch = step  # type: ignore[method-assign]

    @_evaluation_step.deleter
    def _evaluation_step(self) -> None:
        del self._loop.evaluate_batch

    def reset(self) -> None:
        """Forget the last pass."""
        self._loop.progress.forget_run()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the counts."""
        return {"state_dict": {}, "batch_progress": self.batch_progress.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        loop_state.batches_from(state_dict["batch_progress"], self._loop.progress)

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

    @property
    def epoch_batch_indices(self) -> list[list[list[int]]]:
        """The dataset's indices in each batch so far, of each dataloader; empty unless a writer waits for the end."""
        indices = self._batch_indices()
        return indices if self.is_written_at_the_end else [[] for _ in indices]

    @property
    def current_batch_indices(self) -> list[int]:
        """The dataset's indices in the current batch; empty where nobody knows them."""
        seen = [batches for batches in self._batch_indices() if batches]
        return seen[-1][-1] if seen else []

    def _batch_indices(self) -> list[list[list[int]]]:
        """Indices by dataloader and batch: as far as batches have run, since samplers are ahead of them."""
        loaders, left = self._loop.loaders, self._loop.progress.batches
        if loaders is None:
            return []
        indices: list[list[list[int]]] = []
        for loader, limit in zip(self._combined_loader.flattened, loaders.limits, strict=True):
            count = int(min(limit, left))
            left -= count
            sampler = getattr(loader, "batch_sampler", None)
            if isinstance(sampler, _IndexBatchSamplerWrapper):
                indices.append(getattr(sampler, "seen_batch_indices", [])[:count])  # set by its first use
            else:
                _warnings.warn(
                    f"Couldn't infer the batch indices fetched from your dataloader: `{type(loader).__name__}`"
                )
                indices.append([])
        return indices

    @property
    def is_written_at_the_end(self) -> bool:
        """Whether a callback will write all predictions at the end, and they have to be kept for it."""
        callbacks = self._trainer.callbacks
        return any(isinstance(one, BasePredictionWriter) and one.interval.on_epoch for one in callbacks)


class AutomaticOptimizationView(_AutomaticOptimization):
    """``epoch_loop.automatic_optimization``: Lightning's, which runs a batch for who asks it to; with our counts."""

    trainer: Any

    @property
    def optim_progress(self) -> Any:
        """Counts of steps of optimizers."""
        loop = self.trainer.loop
        return loop_state.optimization_of(loop.progress, loop.window, is_automatic(self.trainer))

    @optim_progress.setter
    def optim_progress(self, progress: Any) -> None:
        pass  # Lightning's constructor


class ManualOptimizationView(_ManualOptimization):
    """``epoch_loop.manual_optimization``, likewise."""

    trainer: Any

    @property
    def optim_step_progress(self) -> Any:
        """Counts of steps of optimizers."""
        return loop_state.manual_steps_of(self.trainer.loop.progress, not is_automatic(self.trainer))

    @optim_step_progress.setter
    def optim_step_progress(self, progress: Any) -> None:
        pass  # Lightning's constructor


class EpochLoopView:
    """``fit_loop.epoch_loop``."""

    val_loop = LoopPlace[EvalLoopView]()

    def __init__(self, trainer: Any, loop: FitLoop, val_loop: EvalLoopView) -> None:
        self.trainer = self._trainer = trainer
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
    def automatic_optimization(self) -> AutomaticOptimizationView:
        """Counts of steps of optimizers."""
        return AutomaticOptimizationView(self._trainer)

    @property
    def manual_optimization(self) -> ManualOptimizationView:
        """The same, in manual optimization."""
        return ManualOptimizationView(self._trainer)

    @property
    def _results(self) -> Any:
        return ResultsView(self._trainer, self._loop.metrics)

    @property
    def _batches_that_stepped(self) -> int:
        return self._loop.progress.updates

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

    @property
    def done(self) -> bool:
        """Whether to leave the epoch."""
        limits, progress = self._loop.limits, self._loop.progress
        return progress.batches_this_epoch >= self._trainer.num_training_batches or limits.ends_epoch()

    @property
    def restarting(self) -> bool:
        """Whether the epoch that runs was begun by another run, which a checkpoint of this one has ended."""
        return False

    @restarting.setter
    def restarting(self, restarting: bool) -> None:
        pass

    def reset(self) -> None:
        """Give up a batch that is under way."""
        self._loop.progress.give_up_batch()

    def _should_accumulate(self) -> bool:
        return self._loop.window.is_open

    def _get_monitor_value(self, key: str) -> Any:
        return self._trainer.callback_metrics.get(key)

    def _should_check_val_epoch(self) -> bool:
        return self._loop.validate is not None and self._loop.limits.epoch_validates()


class MonitoredMetrics(Mapping[str, Any]):
    """What schedules may watch: ``trainer.callback_metrics``, looked up where Lightning looks it up."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getitem__(self, name: str) -> Any:
        if (value := self._trainer.fit_loop.epoch_loop._get_monitor_value(name)) is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._trainer.callback_metrics)

    def __len__(self) -> int:
        return len(self._trainer.callback_metrics)


class FitLoopView:
    """``trainer.loops.fit``."""

    epoch_loop = LoopPlace[EpochLoopView]()

    def __init__(self, trainer: Any, loop: FitLoop, val_loop: EvalLoop) -> None:
        self.trainer = self._trainer = trainer
        self._loop = loop
        self._val_loop = val_loop
        self._usual_train = loop.train  # while a callback wants forward passes only
        self.epoch_loop = EpochLoopView(trainer, loop, EvalLoopView(trainer, val_loop, RunningStage.VALIDATING))

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # the tuner asks what kind of loop it has
        return _FitLoop

    def __reduce__(self) -> Any:
        return _bare, (type(self),), vars(self)

    @property
    def restarting(self) -> bool:
        """Whether the epoch that runs is the one that a checkpoint has put the fit into."""
        return self._loop.progress.resumed_epoch == self._loop.progress.epoch

    @restarting.setter
    def restarting(self, restarting: bool) -> None:
        self._loop.progress.resumed_epoch = self._loop.progress.epoch if restarting else -1

    @property
    def skip(self) -> bool:
        """Whether there is nothing to train at all."""
        return self.done or self._trainer.limit_train_batches == 0

    @property
    def _can_stop_early(self) -> bool:
        return self._loop.limits.may_stop()

    @property
    def _skip_backward(self) -> bool:
        return self._loop.train == self._loop.forward_batch

    @_skip_backward.setter
    def _skip_backward(self, skip: bool) -> None:
        if skip and not self._skip_backward:
            self._usual_train, self._loop.train = self._loop.train, self._loop.forward_batch
        elif not skip and self._skip_backward:
            self._loop.train = self._usual_train

    @property
    def _data_source(self) -> Any:
        return self._trainer.data.source(RunningStage.TRAINING)

    def setup_data(self) -> None:
        """Make the dataloaders, where there are none yet."""
        tuning.set_up_training_data(self._trainer)

    def run(self) -> None:
        """Train, from inside a hook of another run."""
        tuning.rerun(self._trainer, RunningStage.TRAINING)

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
    def min_steps(self) -> int | None:
        """Optimizer steps before ``should_stop`` is heeded."""
        return self._loop.limits.min_steps

    @property
    def max_batches(self) -> int | float:
        """Batches of one epoch; what the loop iterates is not changed by writing this."""
        batches: float = self._trainer.num_training_batches
        return batches if batches == float("inf") else int(batches)

    @max_batches.setter
    def max_batches(self, batches: int | float) -> None:
        self._loop.batches.num_batches = batches

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

    @_combined_loader.setter
    def _combined_loader(self, combined: None) -> None:
        self._trainer.data.forget(RunningStage.TRAINING)

    @property
    def done(self) -> bool:
        """Whether no further epoch is to be trained; if so, says why."""
        is_done = self._trainer.num_training_batches == 0 or self._loop.limits.ends_fit()
        if is_done:
            announce_end(self._trainer)
        return is_done

    @property
    def _data_fetcher(self) -> Any:
        return getattr(self._loop.batches.loaders, "fetcher", None)

    def _should_accumulate(self) -> bool:
        return self._loop.window.is_open


def _bare(view: type) -> Any:
    """A view without attributes, for copies: what a view says its class is would be copied in its place."""
    return object.__new__(view)
