"""The Trainer: its arguments, the order of set-up and tear-down, and nothing that computes.

From ``fit`` to a module's ``training_step`` there are four functions: ``Trainer.fit``, ``Trainer._run``,
``FitLoop.run``, ``FitLoop.train_batch``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO, LayerSync
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import Optimizer

from trainer import arguments, diagnosis, redaction
from trainer.callbacks.gradient_accumulation import GradientAccumulation
from trainer.callbacks.gradient_clipping import GradientClipping
from trainer.callbacks.halve_on_out_of_memory import HalveOnOutOfMemory
from trainer.checkpoint import state as checkpoints
from trainer.checkpoint.plain import readable
from trainer.checkpoint.process import ProcessState
from trainer.compat import callbacks as ordering
from trainer.compat import (
    defaults,
    hparams,
    loop_state,
    model_checkpoints,
    modules,
    registry,
    resuming,
)
from trainer.compat.averaging import attach_averaging, detach_averaging, training_weights
from trainer.compat.base import TrainerBase
from trainer.compat.checkpoints import CheckpointConnector
from trainer.compat.data import DataSource, move_training_batch
from trainer.compat.environment import defaults_from_environment, log_devices, registered_names
from trainer.compat.errors import TunerExit
from trainer.compat.loaders import DrawnLoaderSet
from trainer.compat.logging import LoggerConnector, ModuleScope, attach_log, detach_log, no_log
from trainer.compat.optimizers import with_closure
from trainer.compat.profiling import Profiling
from trainer.compat.signals import Signals
from trainer.compat.views import EvalLoopView, FitLoopView, MonitoredMetrics, PredictLoopView
from trainer.data.batches import Loaders, TrainingBatches, Transfer
from trainer.engine.optimizers import needs_closure, takes_closure
from trainer.engine.protocol import ModuleCalls
from trainer.errors import ConfigurationError
from trainer.loops.accumulation import AccumulationWindow, count_windows
from trainer.loops.closures import ClosureOptimization
from trainer.loops.evaluation import EvalLoop
from trainer.loops.fit import Clip, FitLoop
from trainer.loops.hooks import Hook, Hooks
from trainer.loops.manual_optimization import ManualOptimization
from trainer.loops.own_batches import draw_in_evaluation, draw_in_fit
from trainer.loops.schedules import Schedules
from trainer.loops.splitting import SplitBatches
from trainer.precision.base import Precision
from trainer.precision.registry import resolve_precision
from trainer.state.metrics import PublishedMetrics, Recorder, to_scalars
from trainer.state.outcome import StepOutcome
from trainer.state.progress import FitProgress
from trainer.state.stopping import StoppingConditions

Plugin = CheckpointIO | ClusterEnvironment | LayerSync
"""What ``plugins`` may hold. A precision is no plugin here: it is the argument ``precision``."""

_STAGES = {
    TrainerFn.FITTING: RunningStage.TRAINING,
    TrainerFn.VALIDATING: RunningStage.VALIDATING,
    TrainerFn.TESTING: RunningStage.TESTING,
    TrainerFn.PREDICTING: RunningStage.PREDICTING,
}


class Trainer(TrainerBase):
    """Trains, validates, tests and predicts with a ``LightningModule``.

    The arguments have Lightning's names, meanings and defaults. Where we differ:

    Args:
        precision: a name (``"32-true"``, ``"16-mixed"``, ``"bf16-mixed"``, ``"16-true"``, ``"bf16-true"``,
            ``"64-true"``, ``"auto"``, or an alias) or a ``trainer.precision.Precision``. Never changed silently: one
            that the device cannot do is an error, and ``"auto"`` says what it has chosen.
        logger: True and None stand for TensorBoard, with a ``metrics.csv`` in the same folder.
        accumulate_grad_batches: short for ``GradientAccumulation(batches)``; an epoch's last short window is
            averaged over what it holds.
        gradient_clip_val, gradient_clip_algorithm: short for ``GradientClipping``.
        strategy: a single device or DDP; sharded strategies are not supported yet.
        detect_anomaly: where the loss is scaled, overflows are none: ``AnomalyDetection`` looks into skipped steps.
        profiler: ``"simple"``, ``"advanced"``, ``"pytorch"`` or a profiler; None costs nothing.
        resume: not Lightning's. ``"auto"``: a ``fit`` without ``ckpt_path`` goes on from the newest good checkpoint in
            the folders that this run writes checkpoints to, or starts anew where there is none.
        exact_resume: not Lightning's. Whether a resume that would not be exact, because the data or the number of
            processes are others, is refused. If False it goes on as well as it can, with a warning.
        dataloader_timeout: not Lightning's. Seconds that the worker processes of a dataloader may take for a batch,
            before a :class:`~trainer.errors.DataLoaderError` ends the run; 0 for any time, which is torch's default. A
            dataloader's own ``timeout`` comes first.

    Attributes:
        scaler: the one loss scaler, from construction to the end; disabled where the precision scales nothing.

    Raises:
        ConfigurationError: an argument out of range, one given twice, or arguments that exclude each other.
        UnsupportedError: an argument of Lightning's that is not supported yet.
        PrecisionError: an unknown precision, one that the device cannot do, or one of Lightning's plugins.
    """

    @defaults_from_environment
    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: str | int | Precision | None = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        callbacks: list[Callback] | Callback | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int | None = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | Literal["warn"] | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Profiler | str | None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: Plugin | list[Plugin] | None = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | Path | None = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
        resume: Literal["auto"] | None = None,
        exact_resume: bool = True,
        dataloader_timeout: float = 1800.0,
    ) -> None:
        given = dict(locals())
        arguments.check(given, **registered_names())
        if barebones:
            arguments.check_barebones(given)
            enable_checkpointing = enable_progress_bar = enable_model_summary = logger = False
            log_every_n_steps = num_sanity_val_steps = 0
        limits = arguments.parse_limits(given, rank_zero_info)
        plugin = resolve_precision(precision)
        self.engine = self._build_engine(
            plugin,
            plugins,
            accelerator=accelerator,
            strategy=strategy,
            devices=devices,
            num_nodes=num_nodes,
            sync_batchnorm=sync_batchnorm,
            benchmark=benchmark,
            deterministic=deterministic,
            use_distributed_sampler=use_distributed_sampler,
        )
        plugin = self.engine.precision

        self._default_root_dir = os.fspath(default_root_dir or os.getcwd())
        self.fast_dev_run = True if fast_dev_run == 1 else fast_dev_run or False
        self.overfit_batches = limits.train if overfit_batches else 0.0
        self.limit_train_batches = limits.train
        self.limit_val_batches = limits.val
        self.limit_test_batches = limits.test
        self.limit_predict_batches = limits.predict
        self.val_check_interval = limits.val_check_interval
        self.num_sanity_val_steps = limits.num_sanity_val_steps
        self.reload_dataloaders_every_n_epochs = reload_dataloaders_every_n_epochs
        self.enable_autolog_hparams = enable_autolog_hparams
        self.resume = resume
        self.exact_resume = exact_resume
        self.dataloader_timeout = dataloader_timeout
        self.barebones = barebones
        self._model_registry = registry.model_name(model_registry)
        self.profiler = defaults.build_profiler(profiler)
        self.state = TrainerState()
        self.data = DataSource(self)
        self._process_state: dict[str, Any] | None = None
        self.process = ProcessState(self)
        self._inference_mode = inference_mode
        self._detect_anomaly = detect_anomaly
        self._gradient_clip_val = gradient_clip_val
        self._gradient_clip_algorithm = gradient_clip_algorithm
        self._hooks: Hooks | None = None
        self._profiling: Profiling | None = None
        self._session = ExitStack()
        self._path: ManualOptimization | ClosureOptimization | None = None  # of a batch, in a fit

        callbacks = defaults.build_callbacks(
            callbacks,
            accumulate_grad_batches=accumulate_grad_batches,
            gradient_clip_val=gradient_clip_val,
            gradient_clip_algorithm=gradient_clip_algorithm,
            max_time=max_time,
            enable_checkpointing=enable_checkpointing,
            enable_model_summary=enable_model_summary,
            enable_progress_bar=enable_progress_bar,
            default_checkpoint=registry.default_checkpoint(self._model_registry),
            barebones=barebones,
            scales_loss=self.scaler.is_enabled(),
            detect_anomaly=detect_anomaly,
            writes_logs=logger is not False and not fast_dev_run,
            uses_tensor_cores=self.engine.device.type == "cuda" and plugin.name.startswith(("16-", "bf16-")),
        )
        self.callbacks = ordering.in_order([*callbacks, *ordering.external_callbacks()])
        self.progress = FitProgress()
        self.published = PublishedMetrics()
        self.log_metric = no_log
        self.recorder = Recorder(self.published, self.progress)
        self.recorder.loggers = defaults.build_loggers(logger, self._default_root_dir, fast_dev_run=bool(fast_dev_run))
        shared: dict[str, Any] = {
            "engine": self.engine,
            "precision": plugin,
            "published": self.published,
            "recorder": self.recorder,
        }
        self.loop = FitLoop(
            **shared,
            window=self._first_window(accumulate_grad_batches),
            progress=self.progress,
            limits=StoppingConditions(
                self.progress,
                max_epochs=limits.max_epochs,
                min_epochs=min_epochs,
                max_steps=limits.max_steps,
                min_steps=min_steps,
                check_val_every_n_epoch=limits.check_val_every_n_epoch,
                log_every_n_steps=50 if log_every_n_steps is None else log_every_n_steps,
                val_check_seconds=limits.val_check_seconds,
                agree=self.engine.any_rank,
                announce=rank_zero_info,
            ),
        )
        validation = EvalLoop("validation", **shared, fit_progress=self.progress)
        self.eval_loops = {
            RunningStage.SANITY_CHECKING: validation,
            RunningStage.VALIDATING: validation,
            RunningStage.TESTING: EvalLoop("test", **shared, fit_progress=self.progress),
            RunningStage.PREDICTING: EvalLoop("predict", **shared, fit_progress=self.progress),
        }
        evaluations = [
            (self.eval_loops[stage], stage, fn) for fn, stage in _STAGES.items() if fn is not TrainerFn.FITTING
        ]
        in_fit = EvalLoopView(self, validation, RunningStage.VALIDATING, TrainerFn.FITTING)
        self.fit_loop = FitLoopView(self, self.loop, in_fit)
        self.validate_loop = EvalLoopView(self, *evaluations[0])
        self.test_loop = EvalLoopView(self, *evaluations[1])
        self.predict_loop = PredictLoopView(self, *evaluations[2])
        self._signal_connector = Signals(self, self.loop.limits, list(self.eval_loops.values()))
        self._checkpoint_connector = CheckpointConnector(self)
        self._logger_connector = LoggerConnector(self)
        self._announce()

    # --- what users call --------------------------------------------------------------------------------------

    def fit(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train.

        Args:
            model: the module.
            train_dataloaders: an iterable of batches, or a collection of them; or a LightningDataModule.
            val_dataloaders: likewise, for validation.
            datamodule: in the place of dataloaders.
            ckpt_path: resume from this checkpoint: a path or URL, ``"best"``, ``"last"`` or ``"hpc"``.
            weights_only: False to load a checkpoint that holds more than tensors and plain containers, which may
                run any code: for files of your own. Objects among the hyper-parameters need it only where the
                module's ``on_load_checkpoint`` uses them; otherwise they are passed over.
        """
        given = {RunningStage.TRAINING: train_dataloaders, RunningStage.VALIDATING: val_dataloaders}
        self.should_stop = False
        with self._running(TrainerFn.FITTING):
            self._attach(model, given, datamodule, ckpt_path)
            self.engine.launch(self._run, self._module, weights_only)

    def validate(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[Mapping[str, float]]:
        """Run one pass over the validation data. Returns, for each dataloader, what was logged."""
        return self._evaluate(TrainerFn.VALIDATING, model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    def test(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[Mapping[str, float]]:
        """Run one pass over the test data. Returns, for each dataloader, what was logged."""
        return self._evaluate(TrainerFn.TESTING, model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    def predict(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> list[Any] | None:
        """Run one pass over the prediction data.

        Returns:
            What ``predict_step`` returned for each batch, on the CPU; with several dataloaders, a list for each.
            None with ``return_predictions=False``, or where there was nothing to predict, or where the strategy
            spawns or forks its processes, which keep them.

        Raises:
            ConfigurationError: ``return_predictions=True`` with such a strategy.
        """
        if return_predictions and not self.engine.runs_here:
            raise ConfigurationError(
                "`return_predictions` should be set to `False` when using the strategies that spawn or fork. Got"
                f" return_predictions={return_predictions} with {type(self.strategy).__name__}: write them to files,"
                " by a BasePredictionWriter, or use strategy='ddp'."
            )
        loop = self.eval_loops[RunningStage.PREDICTING]
        keep = return_predictions is not False
        loop.keep_predictions, loop.predictions = keep or self.predict_loop.is_written_at_the_end, []
        with self._running(TrainerFn.PREDICTING):
            self._attach(model, {RunningStage.PREDICTING: dataloaders}, datamodule, ckpt_path)
            self.engine.launch(self._run, self._module, weights_only)
        if not keep:
            loop.predictions = []
        return self.predict_loop.predictions if loop.predictions else None

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Write a checkpoint of this moment.

        Args:
            filepath: where to; a path or a URL.
            weights_only: leave out what only resuming needs.
            storage_options: passed to the checkpoint IO plugin.

        Raises:
            AttributeError: no run has brought a module yet.
        """
        if self.lightning_module is None:
            raise AttributeError(
                "Saving a checkpoint is only possible if a model is attached to the Trainer. Did you call"
                " `Trainer.save_checkpoint()` before calling `Trainer.{fit,validate,test,predict}`?"
            )
        with self.profiler.profile("save_checkpoint"), training_weights(self.callbacks, self._module):
            checkpoint = self._checkpoint_connector.dump_checkpoint(weights_only)
            if not weights_only:
                model_checkpoints.save_states(self, checkpoint, filepath)
            if self.resume:
                resuming.note_rows(self, checkpoint)
            checkpoint = readable(checkpoint, strict=self.resume == "auto", warn=self.is_global_zero)
            self.engine.save(checkpoint, filepath, storage_options)

    def reload_dataloaders(self, train: bool = True, val: bool = False) -> None:
        """Have dataloaders made anew, by the same methods: for a curriculum, or after a change of the datamodule.

        Args:
            train: training's, when the next epoch begins.
            val: validation's, before the next validation.

        Raises:
            RuntimeError: no ``fit`` is running.
        """
        if self.state.fn is not TrainerFn.FITTING or self.state.stage is None:
            raise RuntimeError(
                "`Trainer.reload_dataloaders()` can only be called during training: from a hook of a callback or a"
                " module, while `Trainer.fit` runs."
            )
        for stage, is_wanted in ((RunningStage.TRAINING, train), (RunningStage.VALIDATING, val)):
            if is_wanted:
                self.data.outdate(stage)

    @property
    def step_outcome(self) -> StepOutcome | None:
        """What became of the last weight update; None before the first.

        With a fused optimizer on a GPU, asking right after an update waits for the device; see ``settled_outcome``.
        """
        self.loop.resolve_outcome()
        return self.loop.outcome

    @property
    def settled_outcome(self) -> StepOutcome | None:
        """The last outcome that has arrived on the host: that of the last update, or of the one before. Never waits."""
        return self.loop.outcome

    @property
    def loss_share(self) -> float | Tensor:
        """What the current batch's loss was multiplied by, to be its share of its accumulation window's mean."""
        return self.loop.window.factor

    @property
    def skipped_steps(self) -> int:
        """Weight updates skipped so far because a gradient was not finite. Waits as ``step_outcome`` does."""
        self.loop.resolve_outcome()
        return self.progress.skipped_steps

    @property
    def gradient_clip_val(self) -> float | None:
        """The limit of the (first) GradientClipping callback; may be set between two runs."""
        clipping = self._first_callback(GradientClipping)
        return self._gradient_clip_val if clipping is None else clipping.limit

    @gradient_clip_val.setter
    def gradient_clip_val(self, limit: float | None) -> None:
        self._set_clipping(limit, self.gradient_clip_algorithm)

    @property
    def gradient_clip_algorithm(self) -> GradClipAlgorithmType | None:
        """``"norm"`` or ``"value"``; None where nobody said, which is ``"norm"``. May be set between two runs."""
        clipping = self._first_callback(GradientClipping)
        is_ours = clipping is None or self._gradient_clip_val is not None
        algorithm = self._gradient_clip_algorithm if is_ours else clipping.algorithm
        return GradClipAlgorithmType(algorithm.lower()) if algorithm else None

    @gradient_clip_algorithm.setter
    def gradient_clip_algorithm(self, algorithm: str | None) -> None:
        self._set_clipping(self.gradient_clip_val, algorithm)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Weight updates that the whole fit will attempt, for schedules that need to know; inf where nobody does."""
        loop = self.loop
        if loop.limits.max_epochs in (None, -1):
            return float("inf") if loop.limits.max_steps == -1 else loop.limits.max_steps
        if not self.data.is_ready(RunningStage.TRAINING):
            rank_zero_info("Loading `train_dataloader` to estimate number of stepping batches.")
        loaders = self.data.loaders(RunningStage.TRAINING)
        batches = 0 if loaders is None else loaders.num_batches()
        if batches == float("inf"):
            return float("inf") if loop.limits.max_steps == -1 else loop.limits.max_steps
        accumulation = self._first_callback(GradientAccumulation)
        sizes = (
            loop.window.batches if accumulation is None else accumulation.batches_in(epoch)
            for epoch in range(max(loop.limits.max_epochs, 1))
        )
        steps = count_windows(int(batches), sizes, loop.window.straddles_epochs)
        return steps if loop.limits.max_steps == -1 else min(steps, loop.limits.max_steps)

    # --- one run ----------------------------------------------------------------------------------------------

    def _evaluate(
        self,
        fn: TrainerFn,
        model: LightningModule | None,
        dataloaders: Any,
        ckpt_path: str | Path | None,
        verbose: bool,
        datamodule: LightningDataModule | None,
        weights_only: bool | None,
    ) -> list[Mapping[str, float]]:
        results: list[Mapping[str, float]] = []
        loop = self.eval_loops[_STAGES[fn]]
        loop.verbose = verbose
        with self._running(fn):
            self._attach(model, {_STAGES[fn]: dataloaders}, datamodule, ckpt_path)
            results = self.engine.launch(self._run, self._module, weights_only) or []
        if loop.verbose and self.is_global_zero:
            view = self.test_loop if fn is TrainerFn.TESTING else self.validate_loop
            view.print_results(results)
        return results

    def _attach(
        self,
        model: LightningModule | None,
        given: dict[RunningStage, Any],
        datamodule: LightningDataModule | None,
        ckpt_path: str | Path | None,
    ) -> None:
        """Take in what a run is about. ``model`` may be None where an earlier run left one."""
        first = next(iter(given.values()))
        arguments.refuse_other_package("datamodule", datamodule)
        arguments.refuse_other_package("dataloaders", *given.values())
        if isinstance(first, LightningDataModule):  # fit(model, datamodule)
            datamodule, given = first, {}
        if datamodule is not None and any(loaders is not None for loaders in given.values()):
            raise ConfigurationError(
                f"You cannot pass both dataloaders and a datamodule to `Trainer.{self._function}`. Got"
                f" {type(datamodule).__name__} and {sorted(stage.value for stage in given)} dataloaders."
            )
        module = modules.attach(self, model)
        self.data.attach(module, given, datamodule)
        if self.state.fn is TrainerFn.FITTING:
            self.eval_loops[RunningStage.VALIDATING].loaders = None  # those of an earlier `validate`
        self._checkpoint_connector.select(ckpt_path, model_given=model is not None)

    def _run(self, module: LightningModule, weights_only: bool | None) -> Any:  # type: ignore[override]
        """One run in this process: set up, train or evaluate, tear down.

        The module is an argument because launchers look there for modules whose memory processes must not share.
        """
        module.trainer = self  # again: neither takes its trainer along to a process
        if self.datamodule is not None:
            self.datamodule.trainer = self
        self._set_up(weights_only)
        result: Any = None
        if self.state.fn is TrainerFn.FITTING:
            self._check_sanity()
            self._prepare_fit()
            with self._signal_connector.saving():
                self.loop.run()
            _ = self.fit_loop.done  # says why
        else:
            assert self.state.stage is not None
            result = [to_scalars(metrics) for metrics in self.eval_loops[self.state.stage].run()]
        self._tear_down()
        return result

    def _set_up(self, weights_only: bool | None) -> None:
        module, fitting = self._module, self.state.fn is TrainerFn.FITTING
        if fitting:
            self.loop.limits.fill_in(self._default_max_epochs())
        if self.barebones:
            rank_zero_info(
                "`Trainer(barebones=True)` started running. The progress bar is disabled so you might want to manually"
                " print the progress in your model."
            )
        hparams.drop_unpicklable(module)
        self.engine.connect(module)
        ordering.attach_model_callbacks(self)
        modules.verify(self, module)
        attach_log(module, self)
        self._session.callback(detach_log, module, self.callbacks)
        self.engine.setup_environment()
        if fitting and self.resume and not self.fast_dev_run:
            self._checkpoint_connector.find_newest(self._session)  # before anybody asks a logger for its folder
        modules.set_up_profiler(self, module)
        self.data.prepare_data()
        self._call_setup_hooks()
        modules.configure_model(self)
        self.engine.convert_module()
        if not self.engine.restores_after_setup:
            self._checkpoint_connector.restore_module_and_callbacks(weights_only)
        self.published.clear()
        for metrics in (self.loop.metrics, *(loop.metrics for loop in self.eval_loops.values())):
            metrics.clear()  # of an interrupted run, or of another module
        attach_averaging(self)
        self._session.callback(detach_averaging, self.callbacks)
        self.engine.setup(fitting=fitting)
        plugin = self.engine.precision
        # after the set-up, which may replace modules (sync_batchnorm)
        self._session.enter_context(plugin.session(module, self.engine.device))
        plugin.check_optimizers(self.engine.optimizers)
        self._profiling = Profiling.of(self)
        hooks = self._hooks = self._build_hooks()
        if fitting:
            hooks.on_fit_start()
        if self.enable_autolog_hparams:
            hparams.log_hyper_parameters(self)
        if fitting and self.checkpoint_callbacks and self.is_global_zero:
            hparams.announce(module, self.datamodule)
        if self.engine.restores_after_setup:
            self._checkpoint_connector.restore_module_and_callbacks(weights_only)
        if fitting:
            self._process_state = self._checkpoint_connector.restore_fit()
        self._checkpoint_connector.forget()
        self._signal_connector.register_signal_handlers()
        self.engine.barrier("run-stage")
        module.zero_grad()
        if not fitting:
            self._prepare_evaluation(hooks, _STAGES[self.state.fn], self._may_infer)  # type: ignore[index]

    def _build_hooks(self) -> Hooks:
        module = self._module
        return Hooks(
            self,
            module,
            self.callbacks,
            ModuleScope(module),
            ordering.overrides,
            ordering.monitors,
            ordering.saves,
            None if self._profiling is None else self._profiling.hook,
        )

    def _call_setup_hooks(self) -> None:
        for logger in defaults.in_opening_order(self.loggers):
            _ = getattr(logger, "experiment", None)
        model_checkpoints.claim_folders(self, self._session)
        with model_checkpoints.without_needless_warnings(self):
            modules.call_setup_hooks(self)

    def _prepare_fit(self) -> None:
        module, loop, hooks = self._module, self.loop, self._hooks
        assert hooks is not None
        torch.set_grad_enabled(True)
        if not loop.limits.ends_fit():
            modules.warn_of_eval_mode(module)
        self.process.begin_fit()
        if self._detect_anomaly and not self.scaler.is_enabled():  # where it is, AnomalyDetection does this
            self._session.enter_context(torch.autograd.set_detect_anomaly(True))
        profiling = self._profiling
        # `estimated_stepping_batches` may have made them before a checkpoint said which epoch this is
        loaders = self.data.loaders(RunningStage.TRAINING, anew=self.data.is_due(RunningStage.TRAINING))
        if loaders is not None:
            self._schedule_validation(loaders)
            self._warn_of_missing_rows(loaders)
        if self.enable_validation and loop.limits.epoch_validates():
            self._prepare_validation()
        batches = TrainingBatches(
            loaders,
            self._renewed_loaders,
            None if profiling is None else profiling.training_epoch,
            # as in Lightning: a fit that goes on where an earlier one has ended opens another pass
            self.progress.epochs_trained if self.ckpt_path is not None or not self.progress.epochs_trained else -1,
        )
        if (resumed := self.data.resumed) is not None:
            self.data.resumed = None
            batches.load_state_dict(resumed, exact=self.exact_resume)
        loop.prepare(
            hooks=hooks,
            batches=batches,
            transfer=self._transfer(move_training_batch),
            schedules=self._schedules(hooks),
            clip_gradients=self._clipping(hooks) if module.automatic_optimization else None,
            validate=self._validate_inside_fit if self.enable_validation else None,
            resume=None if self._process_state is None else self._resume_process,
        )
        path = self._choose_path(hooks)
        loop.choose_path = partial(self._follow_optimizers, hooks)
        if (halving := self._first_callback(HalveOnOutOfMemory)) is not None:
            halving.check(path, isinstance(loaders, DrawnLoaderSet))
            parts = SplitBatches(loop, halving.limit, halving.measure, halving.split, halving.announce)
            loop.train = parts.train_batch
        if isinstance(loaders, DrawnLoaderSet):
            draw_in_fit(loop, loaders, ends_epoch=module.automatic_optimization)
        if profiling is not None:
            profiling.watch_fit(loop, hooks, path)
            self._session.callback(profiling.leave_fit, loop)

    def _choose_path(self, hooks: Hooks) -> ManualOptimization | ClosureOptimization | None:
        """Set the path of a batch that module, optimizers and engine want. Returns it; None for the loop's own."""
        path: ManualOptimization | ClosureOptimization | None = None
        backward: Callable[..., None] | None = None
        if not self._module.automatic_optimization:
            path = ManualOptimization(self.loop)
            backward = path.backward
        elif hooks.override_of("optimizer_step") or self._optimizer_takes_closure:
            optimizer_step = with_closure(hooks.of_module("optimizer_step"))
            path = ClosureOptimization(self.loop, optimizer_step, lambda: self.engine.wrapped_optimizers)
        step = None if path is None else path.step
        self.engine.module_calls = ModuleCalls(backward, step, self.loop.clip_for_module)
        self.process.kept_batches = path if isinstance(path, ClosureOptimization) else None
        self._path = path
        usual = self.engine.batch_path(self.loop) or self.loop.train_batch
        self.loop.train = usual if path is None else path.train_batch
        return path

    def _follow_optimizers(self, hooks: Hooks) -> None:
        """Choose the path anew where somebody has exchanged the optimizers, and these want another one."""
        before = self._path
        wants = bool(hooks.override_of("optimizer_step")) or self._optimizer_takes_closure
        again = any(map(needs_closure, self.optimizers))
        if isinstance(before, ManualOptimization) or (
            not wants if before is None else wants and before.evaluates_again == again
        ):
            return
        draws = isinstance(self.loop.batches.loaders, DrawnLoaderSet)
        if self.progress.in_batch or draws or self._profiling or self._first_callback(HalveOnOutOfMemory):
            names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
            raise ConfigurationError(
                f"The optimizers have been exchanged for {names}, one of which evaluates the loss itself, or did so"
                " before. Do this in `on_train_epoch_start` or between two epochs; and not with a profiler,"
                " `HalveOnOutOfMemory` or a `training_step` that draws its own batches."
            )
        self._choose_path(hooks)

    def _prepare_evaluation(self, hooks: Hooks, stage: RunningStage, inference_mode: bool) -> None:
        module, loop = self._module, self.eval_loops[stage]
        has_step = stage is RunningStage.PREDICTING or ordering.overrides(module, f"{loop.stage}_step")
        loaders = self.data.loaders(stage) if has_step else None
        if loaders is not None:
            modules.verify_dataloader_idx(module, loop.stage, stage, loaders)
        loop.prepare(
            hooks=hooks,
            module=module,
            transfer=self._transfer(),
            loaders=loaders,
            inference_mode=inference_mode,
        )
        if isinstance(loaders, DrawnLoaderSet):
            draw_in_evaluation(loop, loaders)
        if self._profiling is not None:
            self._profiling.watch_evaluation(loop)

    def _transfer(self, move: Callable[[Any, torch.device], Any] = move_data_to_device) -> Transfer:
        plugin = self.engine.precision
        converts = type(plugin).convert_batch is not Precision.convert_batch
        scope = ModuleScope(self._module)

        def hook(name: str) -> Hook | None:
            own = self.data.transfer_hook(name)
            if own is not None and self._profiling is not None:
                own = self._profiling.hook(getattr(own, "__self__", self._module), name, own)
            return None if own is None else Hook(name, scope, module=own)

        return Transfer(
            self.engine.device,
            plugin.convert_batch if converts else None,
            move,
            hook("on_before_batch_transfer"),
            hook("transfer_batch_to_device"),
            hook("on_after_batch_transfer"),
        )

    def _schedules(self, hooks: Hooks) -> Schedules:
        revocable = hooks.override_of("lr_scheduler_step") is None  # what a module's own does, nobody can take back
        step, metrics = hooks.of_module("lr_scheduler_step"), partial(MonitoredMetrics, self)
        by_module = not self._module.automatic_optimization
        return Schedules(self.engine.schedules, step, metrics, revocable, self.progress, by_module)

    def _clipping(self, hooks: Hooks) -> Clip | None:
        """What clips the gradients: the module's own way, the callbacks, or nothing."""
        own = hooks.override_of("configure_gradient_clipping")
        if own is not None:
            return partial(_clip_by_module, own, self)
        clippers = [callback for callback in self.callbacks if isinstance(callback, GradientClipping)]
        if len(clippers) < 2:
            return clippers[0].clip if clippers else None
        return partial(_clip_in_turn, clippers)

    def _renewed_loaders(self) -> Loaders | None:
        """The training's dataloaders where an epoch begins that they are to be made anew for; otherwise None."""
        if not self.data.is_due(RunningStage.TRAINING):
            return None
        loaders = self.data.loaders(RunningStage.TRAINING, anew=True)
        if loaders is not None:
            self._schedule_validation(loaders)
        return loaders

    def _prepare_validation(self) -> None:
        """Make what the validation inside a fit needs, where it is not there or is due to be made anew."""
        if self.data.is_due(RunningStage.VALIDATING):
            outer, self.state.stage = self.state.stage, RunningStage.VALIDATING
            self.data.loaders(RunningStage.VALIDATING, anew=True)
            self.state.stage = outer
        assert self._hooks is not None
        self._prepare_evaluation(self._hooks, RunningStage.VALIDATING, inference_mode=False)

    def _schedule_validation(self, loaders: Loaders) -> None:
        knows_its_end = loaders.has_length and not isinstance(loaders, DrawnLoaderSet)
        self.loop.limits.schedule_validation(
            self.val_check_interval, loaders.num_batches(), knows_its_end, validates=bool(self.limit_val_batches)
        )

    def _warn_of_missing_rows(self, loaders: Loaders) -> None:
        num_batches, every = loaders.num_batches(), self.log_every_n_steps
        if self.loggers and 0 < num_batches < every and not self.fast_dev_run:
            rank_zero_warn(
                f"The number of training batches ({num_batches}) is smaller than the logging interval"
                f" Trainer(log_every_n_steps={every}). Set a lower value for log_every_n_steps if you want to see logs"
                " for the training epoch.",
                category=PossibleUserWarning,
            )

    def _check_sanity(self) -> None:
        """A few validation batches before training, so that a mistake there shows now and not after an epoch."""
        loop, hooks = self.eval_loops[RunningStage.SANITY_CHECKING], self._hooks
        assert hooks is not None
        if not self.enable_validation or not self.num_sanity_val_steps:
            return
        if self._resumes_inside_epoch:
            return
        with isolate_rng():  # also from what making the dataloaders draws
            self.state.stage, loop.sanity_checking = RunningStage.SANITY_CHECKING, True
            hooks.on_sanity_check_start()
            self._prepare_evaluation(hooks, RunningStage.VALIDATING, inference_mode=False)
            loop.run(limit=self.num_sanity_val_steps)
            hooks.on_sanity_check_end()
            self.state.stage, loop.sanity_checking = RunningStage.TRAINING, False
        self.published.clear()

    def _resume_process(self) -> None:
        """Put back what a checkpoint has of this process, random states last: nobody is to draw in between."""
        state, self._process_state = self._process_state, None
        assert state is not None
        self.process.load(state, stops=self.resume == "auto")
        if self.resume == "auto" and state["should_stop"]:
            rank_zero_info(
                "resume='auto': the run had decided to stop, and so it does. To train on, name its checkpoint to a"
                f" Trainer without resume='auto': fit(ckpt_path={redaction.text(str(self.ckpt_path))!r})."
            )

    def _validate_inside_fit(self) -> None:
        assert self._hooks is not None
        self.process.begin_validation()
        self.state.stage = RunningStage.VALIDATING
        if not self.loop.window.is_open:
            self._hooks.of_module("on_validation_model_zero_grad")()  # no need to hold gradients meanwhile
        loop = self.eval_loops[RunningStage.VALIDATING]
        if self.data.is_due(RunningStage.VALIDATING) or loop.loaders is None:  # somebody else may have made them
            self._prepare_validation()
        loop.progress.begin_epoch(self.progress.epoch)
        self._signal_connector.start_validation(loop.loaders)
        loop.run()
        self.loop.limits.restart_validation_clock()
        self.state.stage = RunningStage.TRAINING

    def _tear_down(self) -> None:
        """After a run that came to its end."""
        assert self._hooks is not None
        self._release()
        if self.state.fn is TrainerFn.FITTING:
            self._hooks.on_fit_end()
        modules.call_teardown_hooks(self)

    def _release(self) -> None:
        """Give back what a run holds: the device, the module's wrapper, contexts. Safe to call twice."""
        if self.state.fn is TrainerFn.PREDICTING:
            loop = self.eval_loops[RunningStage.PREDICTING]
            loop.predictions = move_data_to_device(loop.predictions, torch.device("cpu"))
        if (metrics := self.active_metrics) is not None:  # of a batch that raised: the process may be alone in that
            with suppress(ConfigurationError):  # perhaps they are why it raised
                self.published.take(metrics.current(on_step=True))
            metrics.end_batch()  # it may be large
        self.published.take_to_cpu()
        try:
            self.engine.teardown()  # raises what a save in the background has met
        finally:
            self._session.close()
            self.data.release()
            self._signal_connector.teardown()

    @contextmanager
    def _running(self, fn: TrainerFn) -> Iterator[None]:
        """The state of a run, and what happens when it raises: everybody is told, the device is given back."""
        self.state.fn, self.state.stage, self.state.status = fn, _STAGES[fn], TrainerStatus.RUNNING
        try:
            yield
        except TunerExit:
            modules.call_teardown_hooks(self)
            self._release()
        except KeyboardInterrupt as error:
            rank_zero_info("\nDetected KeyboardInterrupt, attempting graceful shutdown ...")
            with self._signal_connector.ending(error):
                self._interrupt(error)
                self.engine.kill()
            sys.exit(1)
        except BaseException as error:
            named = diagnosis.explain(error, self)
            with self._signal_connector.ending(error):
                self._interrupt(named or error)
            if named is not None:
                raise named from error
            raise
        self.state.status, self.state.stage = TrainerStatus.FINISHED, None
        self._signal_connector.end_late()

    def _interrupt(self, error: BaseException) -> None:
        """A run has raised ``error``: tell everybody, give back what it holds."""
        self.state.status = TrainerStatus.INTERRUPTED
        try:
            with suppress(Exception):  # what is raised is `error`; but who asks later wants to know
                self.loop.resolve_outcome()
            for callback in self.callbacks:
                callback.on_exception(self, self.lightning_module, error)
            if self.datamodule is not None:
                self.datamodule.on_exception(error)
            self.engine.on_exception(error)
            for logger in self.loggers:
                logger.finalize("failed")
        finally:
            if self.lightning_module is not None:
                self._release()
            self.eval_loops[RunningStage.SANITY_CHECKING].sanity_checking = False
            self.state.stage = None

    @property
    def _module(self) -> LightningModule:
        module: LightningModule | None = self.lightning_module
        assert module is not None, "a run has a module"
        return module

    @property
    def _resumes_inside_epoch(self) -> bool:
        """Whether the run goes on where a checkpoint was written; as in Lightning, always if it counts steps."""
        return self.ckpt_path is not None and (self.progress.batches_this_epoch > 0 or self.max_steps != -1)

    @property
    def _optimizer_takes_closure(self) -> bool:
        """Whether the loss is evaluated by the optimizer, where it is one that does so or may.

        Not where it only may and cannot have a closure: beside other optimizers, or where the scaler or the halving of
        batches has to come between backward pass and step.
        """
        optimizers = self.engine.optimizers
        may = len(optimizers) == 1 and not self.scaler.skips_steps and not self._first_callback(HalveOnOutOfMemory)
        return any(takes_closure(o) if may else needs_closure(o) for o in optimizers)

    @property
    def _function(self) -> str:
        """Which of ``fit``, ``validate``, ``test`` and ``predict`` runs."""
        assert self.state.fn is not None
        return self.state.fn.value

    @property
    def _may_infer(self) -> bool:
        """Whether evaluation may run in ``torch.inference_mode``, whose tensors gloo cannot send."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return self._inference_mode and not (distributed and torch.distributed.get_backend() == "gloo")

    # --- checkpoints ------------------------------------------------------------------------------------------

    def _dump(self, weights_only: bool) -> dict[str, Any]:
        self.loop.resolve_outcome()
        loops = loop_state.loops_of(self)
        loops["fit_loop"]["state_dict"].update(self.data.state_dict())
        as_lightning = hparams.as_lightning(loops, self._module, self.datamodule)
        scope = ModuleScope(self._module)
        outer = scope.enter("on_save_checkpoint")
        checkpoint = checkpoints.dump(self, as_lightning, weights_only=weights_only)
        scope.enter(outer)
        hparams.settle(checkpoint, self._module, self.datamodule)  # after the hooks, which may have changed them
        return checkpoint

    # --- construction -----------------------------------------------------------------------------------------

    def _first_window(self, given: int | None) -> AccumulationWindow:
        accumulation = self._first_callback(GradientAccumulation)
        if accumulation is None:
            return AccumulationWindow(1 if given is None else given)
        return AccumulationWindow(accumulation.batches_in(0), accumulation.straddles_epochs)

    def _set_clipping(self, limit: float | None, algorithm: str | None) -> None:
        self._gradient_clip_val, self._gradient_clip_algorithm = limit, algorithm
        others = [callback for callback in self.callbacks if not isinstance(callback, GradientClipping)]
        self.callbacks = ordering.in_order([*others, *defaults.build_clipping(limit, algorithm)])

    def _announce(self) -> None:
        """Say what the arguments mean that change much, and what the machine has."""
        if self.barebones:
            rank_zero_info(
                "You are running in `Trainer(barebones=True)` mode. All features that may impact raw speed have been"
                " disabled to facilitate analyzing the Trainer overhead. Specifically, the following are deactivated: "
                + ", ".join(f"`{name}`" for name in arguments.BAREBONES)
                + ", `LightningModule.log(...)` and `LightningModule.log_dict(...)`, and the reports on overflows."
            )
        if self._detect_anomaly:
            rank_zero_info(
                "You have turned on `Trainer(detect_anomaly=True)`. This will significantly slow down compute speed and"
                " is recommended only for model debugging."
            )
        if self.fast_dev_run:
            rank_zero_info(
                f"Running in `fast_dev_run` mode: will run the requested loop using {int(self.fast_dev_run)} batch(es)."
                " Logging and checkpointing is suppressed."
            )
        log_devices(self)

    def _default_max_epochs(self) -> int:
        limits = self.loop.limits
        if limits.max_steps != -1 or self._first_callback(Timer) is not None:
            return -1
        if limits.max_epochs is None:
            rank_zero_warn(
                "`max_epochs` was not set. Setting it to 1000 epochs. To train without an epoch limit, set"
                " `max_epochs=-1`.",
                category=PossibleUserWarning,
            )
        return 1000


def _clip_by_module(clip: Hook, trainer: Trainer, optimizer: Optimizer) -> None:
    limit, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    clip.of_module(optimizer, gradient_clip_val=limit, gradient_clip_algorithm=algorithm)


def _clip_in_turn(clippers: list[GradientClipping], optimizer: Optimizer) -> Tensor | None:
    norms = [clipper.clip(optimizer) for clipper in clippers]
    return norms[0]  # before any clipping
