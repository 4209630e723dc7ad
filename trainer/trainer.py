"""The Trainer: arguments, components and public methods.

``trainer/run.py`` contains the steps of a run, in order. To follow a run from ``fit`` to a module's ``training_step``,
read four functions: ``Trainer.fit``, ``Run.__call__``, ``FitLoop.run``, ``FitLoop.train_batch``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO, LayerSync
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.enums import GradClipAlgorithmType
from torch import Tensor

from trainer import arguments
from trainer.callbacks.gradient_accumulation import (
    GradientAccumulation,
    accumulation_schedule,
    batches_in,
    find_callback,
)
from trainer.callbacks.gradient_clipping import GradientClipping
from trainer.checkpoint.plain import require_loadable
from trainer.checkpoint.process import ProcessState
from trainer.common.lightning_private import defaults_from_environment, log_devices
from trainer.distributed.engine import LightningEngine
from trainer.distributed.signals import Signals
from trainer.distributed.strategies import build_engine
from trainer.errors import ConfigurationError
from trainer.lightning import callback_order, defaults
from trainer.lightning.averaging import training_weights
from trainer.lightning.base_trainer import TrainerBase, replacement_of, with_lightning_signature
from trainer.lightning.checkpoint_connector import CheckpointConnector, RolledBack
from trainer.lightning.loader_set import DataSource
from trainer.lightning.views import EvalLoopView, FitLoopView, PredictLoopView
from trainer.loop.accumulation import AccumulationWindow, count_windows
from trainer.loop.evaluation import EvalLoop
from trainer.loop.fit import FitLoop
from trainer.loop.run_state import RunState
from trainer.loop.schedule_free import averaged
from trainer.metrics.logging import LoggerConnector
from trainer.metrics.metrics import PublishedMetrics
from trainer.precision.base import Precision
from trainer.precision.registry import resolve_precision
from trainer.run import STAGES, Run
from trainer.state.outcome import StepOutcome
from trainer.state.progress import FitProgress
from trainer.state.stopping import StoppingConditions

Plugin = CheckpointIO | ClusterEnvironment | LayerSync
"""The types of ``plugins``. A precision is not a plugin: use the argument ``precision``."""


_ATTRIBUTES = (
    "limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches",
    "num_sanity_val_steps", "enable_autolog_hparams", "prefetch_batches", "barebones", "inference_mode",
    "detect_anomaly",
)  # fmt: skip
"""The arguments that become attributes of the same name, with the values that ``arguments.parse_limits`` returns."""


_RUN_OPTIONS = "resume", "exact_resume", "dataloader_timeout", "reload_dataloaders_every_n_epochs"
"""The same for the attributes of the RunState."""


_ENGINE_OPTIONS = (
    "accelerator", "strategy", "devices", "num_nodes", "sync_batchnorm", "benchmark", "deterministic",
    "use_distributed_sampler",
)  # fmt: skip
"""The arguments that the engine is built with."""


class Trainer(TrainerBase):
    """Train, validate, test and predict with a ``LightningModule``.

    The arguments have Lightning's names, meanings and defaults. These differ, accept more, or are new:

    Args:
        precision: a name (``"32-true"``, ``"16-mixed"``, ``"bf16-mixed"``, ``"fp8-mixed"``, ``"16-true"``,
            ``"bf16-true"``, ``"64-true"``, ``"auto"``, or an alias) or a ``trainer.precision.Precision``. If the
            device does not support the precision, the Trainer raises an error instead of using another one. The choice
            of ``"auto"`` is logged. Default: None, for ``"32-true"``.
        accumulate_grad_batches: short for ``GradientAccumulation(batches)``. If fewer batches remain at the end of an
            epoch, the last step averages over these batches. Default: 1.
        gradient_clip_val, gradient_clip_algorithm: short for ``GradientClipping``. Default: None, no clipping.
        strategy: strategy for several processes: ``"ddp"``, ``"fsdp"``, ``"deepspeed"``, or an object such as
            ``FSDP2Strategy()``. Default: ``"auto"``.
        detect_anomaly: whether to raise an error that names the first operation with a NaN in its backward pass. With
            loss scaling, where overflows are normal, the callback ``AnomalyDetection`` is added instead: it inspects
            skipped steps. Default: False.
        profiler: ``"simple"``, ``"advanced"``, ``"pytorch"`` or a profiler. Default: None, no profiling.
        resume: not in Lightning. ``"auto"``: a ``fit`` without ``ckpt_path`` resumes from the newest valid checkpoint
            in the folders that this run writes checkpoints to, or starts from the beginning without one. Default:
            None.
        exact_resume: not in Lightning. Whether to refuse a resume that would not be exact, for example because the data
            have changed, or because the number of processes has changed and optimizer steps would get other samples.
            If False, the run resumes as exactly as possible, with a warning. Default: True.
        dataloader_timeout: not in Lightning. Seconds that the worker processes of a dataloader may take for a batch
            before a :class:`~trainer.errors.DataLoaderError` ends the run. 0 means no limit, the default of torch. A
            dataloader's own ``timeout`` takes precedence. Default: 1800.
        pad_evaluation: not in Lightning. If True, validation and test are padded so that all processes have equal
            numbers of samples, and some samples are counted twice, as in Lightning. Use it for modules that run
            collectives in each batch. Default: False, each sample is counted once.
        prefetch_batches: not in Lightning. With 1, on CUDA, the next batch is copied to the GPU on a separate stream
            while the current step runs; the order of loading, computing and drawing random numbers does not change.
            This takes the memory of one more batch. With 0, each batch is copied after the previous step. Has no effect
            on other devices or with steps that take a ``dataloader_iter``. Default: 1.

    Attributes:
        scaler: the loss scaler, which is disabled if the precision does not scale the loss. The object stays the same
            for the Trainer's lifetime. Exception: a ``NonFiniteGuard`` that checks each step replaces a disabled scaler
            during a fit.
        loaded_weights: a :class:`~trainer.module_weights.LoadedWeights`, which names the weights that the last
            ``fit(weights=...)`` loaded, and those that were missing or differed. None before the first fit, and after a
            fit that did not load ``weights``.

    Raises:
        ConfigurationError: if an argument is out of range, if a setting is given both as an argument and as a callback,
            or if arguments exclude each other.
        UnsupportedError: if the strategy is not supported, or cannot be combined with another argument.
        PrecisionError: if the precision is unknown, not supported by the device, or one of Lightning's plugins.
    """

    @defaults_from_environment
    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int | str = 1,
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
        pad_evaluation: bool = False,
        prefetch_batches: int = 1,
    ) -> None:
        given = dict(locals())
        accelerators, strategies = AcceleratorRegistry.available_accelerators(), StrategyRegistry.available_strategies()
        arguments.check(given, accelerator=list(accelerators), strategy=list(strategies))
        if barebones:
            arguments.check_barebones(given)
            off = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger")
            given |= dict.fromkeys(off, False) | {"log_every_n_steps": 0, "num_sanity_val_steps": 0}
        limits = arguments.parse_limits(given, rank_zero_info)
        plugin = resolve_precision(precision)
        engine = self._build_engine(plugin, plugins, **{name: given[name] for name in _ENGINE_OPTIONS})
        plugin = engine.precision

        self._default_root_dir = os.path.expanduser(default_root_dir or os.getcwd())
        self.default_root_dir_given = bool(default_root_dir)
        vars(self).update({name: limits[name] for name in _ATTRIBUTES})
        self.val_check_interval = arguments.shown_interval(val_check_interval, limits)
        self._model_registry = model_registry.split(":")[0] if model_registry else None
        self._gradient_clip_val = gradient_clip_val
        self._gradient_clip_algorithm = gradient_clip_algorithm

        callbacks = defaults.build_callbacks(
            given,
            default_checkpoint=defaults.default_checkpoint(self._model_registry),
            scales_loss=engine.gradients.scaler.is_enabled(),
            exposes_gradients=engine.exposes_gradients,
            uses_tensor_cores=engine.device.type == "cuda" and plugin.is_half,
        )
        callbacks = callback_order.sort_callbacks([*callbacks, *callback_order.external_callbacks()])
        progress = FitProgress()
        published = PublishedMetrics(progress)
        published.loggers = defaults.build_loggers(
            given["logger"], self._default_root_dir, fast_dev_run=bool(fast_dev_run)
        )
        accumulation = find_callback(callbacks, GradientAccumulation)
        accumulation = accumulation or GradientAccumulation(accumulate_grad_batches or 1)
        shared: dict[str, Any] = {"engine": engine, "published": published}
        pad_evaluation = limits["pad_evaluation"] or not engine.supports_uneven_evaluation
        evaluation: dict[str, Any] = {"fit_progress": progress, "counts_once": not pad_evaluation}
        validation = EvalLoop("validation", **shared, **evaluation)
        loop = FitLoop(
            **shared,
            window=AccumulationWindow(accumulation.batches_in(0), accumulation.straddles_epochs),
            progress=progress,
            limits=StoppingConditions(
                progress,
                max_epochs=limits["max_epochs"],
                min_epochs=min_epochs,
                max_steps=limits["max_steps"],
                min_steps=min_steps,
                check_val_every_n_epoch=limits["check_val_every_n_epoch"],
                log_every_n_steps=50 if given["log_every_n_steps"] is None else given["log_every_n_steps"],
                val_check_seconds=limits["val_check_seconds"],
                any_rank=engine.collectives.any_rank,
                announce=rank_zero_info,
            ),
        )
        self.run_state = RunState(
            self,
            engine,
            progress,
            published,
            loop,
            {
                RunningStage.SANITY_CHECKING: validation,
                RunningStage.VALIDATING: validation,
                RunningStage.TESTING: EvalLoop("test", **shared, **evaluation),
                RunningStage.PREDICTING: EvalLoop("predict", **shared, **evaluation),
            },
            callbacks,
            fast_dev_run=True if fast_dev_run == 1 else fast_dev_run or False,
            profiler=defaults.build_profiler(profiler),
            pad_evaluation=pad_evaluation,
            overfit_batches=limits["overfit_batches"] or 0.0,
            **{name: limits[name] for name in _RUN_OPTIONS},
        )
        self.run_state.data, self.run_state.process = DataSource(self.run_state), ProcessState(self.run_state)
        engine.refuse(callbacks)
        engine.check_accumulation(max(accumulation_schedule(self.run_state).values()))
        self.fit_loop = FitLoopView(self)
        self.validate_loop = EvalLoopView(self, RunningStage.VALIDATING, TrainerFn.VALIDATING, inference_mode)
        self.test_loop = EvalLoopView(self, RunningStage.TESTING, TrainerFn.TESTING, inference_mode)
        self.predict_loop = PredictLoopView(self, RunningStage.PREDICTING, TrainerFn.PREDICTING, inference_mode)
        self._signal_connector = Signals(self.run_state, engine)
        self._checkpoint_connector = CheckpointConnector(self)
        self._logger_connector = LoggerConnector(self, self.run_state)
        self._runner = Run(self, self._signal_connector, self._checkpoint_connector)
        self._announce()

    # --- public methods ---------------------------------------------------------------------------------------

    @with_lightning_signature
    def fit(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        weights: str | Path | None = None,
    ) -> None:
        """Train a module.

        Args:
            model: the module.
            train_dataloaders: an iterable of batches, a collection of such iterables, or a LightningDataModule.
                Default: the module's ``train_dataloader``.
            val_dataloaders: the same for validation. Default: the module's ``val_dataloader``.
            datamodule: a LightningDataModule, instead of dataloaders. Default: None.
            ckpt_path: resume from this checkpoint: a path or URL, ``"best"``, ``"last"`` or ``"hpc"``. Default: None.
            weights_only: False to load a checkpoint that holds more than tensors and plain containers. This can execute
                arbitrary code, so use it only for files that you trust. By default, hyperparameters that are objects
                are skipped without an error; pass False if the module's ``on_load_checkpoint`` uses them. Default:
                None, like True.
            weights: not in Lightning. Start with these weights: the folder of another run, a checkpoint, a state dict,
                or a safetensors file. :func:`trainer.load_weights` loads them after ``configure_model``. Ignored if
                the run resumes from its own checkpoint with ``resume="auto"``. Cannot be combined with ``ckpt_path``.
                Default: None.
        """
        if replacement := replacement_of(self, Trainer, "fit", locals()):
            return replacement()  # type: ignore[no-any-return]
        given = {RunningStage.TRAINING: train_dataloaders, RunningStage.VALIDATING: val_dataloaders}
        self.should_stop = False
        with self._runner.started(TrainerFn.FITTING):
            module = self._runner.attach(model, given, datamodule, ckpt_path, weights)
            self.engine.launch(self._runner, module, weights_only)
        return None

    def validate(
        self,
        model: LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[Mapping[str, float]]:
        """Run one pass over the validation data. Return the logged metrics, one dict for each dataloader."""
        if replacement := replacement_of(self, Trainer, "validate", locals()):
            return replacement()  # type: ignore[no-any-return]
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
        """Run one pass over the test data. Return the logged metrics, one dict for each dataloader."""
        if replacement := replacement_of(self, Trainer, "test", locals()):
            return replacement()  # type: ignore[no-any-return]
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
            The outputs of ``predict_step`` for each batch, on the CPU; with several dataloaders, a list for each. None
            if ``return_predictions=False``, if there is nothing to predict, or if the strategy spawns or forks
            processes, because the outputs stay in them.

        Raises:
            ConfigurationError: if ``return_predictions=True`` and the strategy spawns or forks processes.
        """
        if replacement := replacement_of(self, Trainer, "predict", locals()):
            return replacement()  # type: ignore[no-any-return]
        if return_predictions and not self.engine.runs_here:
            raise ConfigurationError(
                "`return_predictions` should be set to `False` when using the strategies that spawn or fork. Got"
                f" return_predictions={return_predictions} with {type(self.strategy).__name__}. Write the predictions"
                " to files with a BasePredictionWriter, or use strategy='ddp'."
            )
        loop = self.eval_loops[RunningStage.PREDICTING]
        keep = return_predictions is not False
        loop.keep_predictions, loop.predictions = keep or self.predict_loop.is_written_at_the_end, []
        with self._runner.started(TrainerFn.PREDICTING):
            module = self._runner.attach(model, {RunningStage.PREDICTING: dataloaders}, datamodule, ckpt_path)
            self.engine.launch(self._runner, module, weights_only)
        if not keep:
            loop.predictions = []
        return self.predict_loop.predictions if loop.predictions else None

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Write a checkpoint of the current state.

        Args:
            filepath: a path or a URL.
            weights_only: whether to leave out the state that only a resume needs. Default: None, for False.
            storage_options: passed to the checkpoint IO plugin. Default: None.

        Raises:
            AttributeError: if no run has attached a module yet.
        """
        if replacement := replacement_of(self, Trainer, "save_checkpoint", locals()):
            return replacement()  # type: ignore[no-any-return]
        if self.lightning_module is None:
            raise AttributeError(
                "Saving a checkpoint is only possible if a model is attached to the Trainer. Did you call"
                " `Trainer.save_checkpoint()` before calling `Trainer.{fit,validate,test,predict}`?"
            )
        connector = self._checkpoint_connector
        self.loop.resolve_outcome()
        with (
            self.profiler.profile("save_checkpoint"),
            averaged(self.engine.optimizers),
            training_weights(self.callbacks, self.lightning_module),
            connector.saving_to(filepath),
        ):
            checkpoint = connector.dump_checkpoint(weights_only)
            checkpoint = require_loadable(checkpoint, strict=self.resume == "auto", warn=self.is_global_zero)
            self.engine.checkpoints.save(checkpoint, filepath, storage_options)
        return None

    def roll_back(self, max_step: int) -> RolledBack | None:
        """Restore the newest valid checkpoint of this run that has at most ``max_step`` optimizer steps.

        The run continues from the restored weights, optimizers, schedules, loss scale, random states and states of
        callbacks. The data is not rewound: the updates since the checkpoint are lost, and their batches are not trained
        again. ModelCheckpoints and Timers keep their states.

        Call it in all processes, in a callback's ``on_train_batch_end``, after a batch that closes an accumulation
        window. Set ``runs_last = True`` in the class of the callback, so that it is called after the others (see
        ``trainer.common.traits``). :class:`~trainer.callbacks.RollBackOnLossSpike` calls it for you.

        Args:
            max_step: the largest ``global_step`` that the checkpoint may have.

        Returns:
            The restored checkpoint, or None if the folders of the ModelCheckpoints contain no such checkpoint; then
            nothing changes.
        """
        return self._checkpoint_connector.roll_back(max_step)

    def reload_dataloaders(self, train: bool = True, val: bool = False) -> None:
        """Create the dataloaders again, for example for a curriculum or after the datamodule has changed.

        Args:
            train: whether to create the training dataloaders when the next epoch begins. Default: True.
            val: whether to create the validation dataloaders before the next validation. Default: False.

        Raises:
            RuntimeError: if no ``fit`` is running.
        """
        if self.state.fn is not TrainerFn.FITTING or self.state.stage is None:
            raise RuntimeError("`Trainer.reload_dataloaders()` can only be called during training, in a hook.")
        for stage, is_wanted in ((RunningStage.TRAINING, train), (RunningStage.VALIDATING, val)):
            if is_wanted:
                self.data.invalidate(stage)

    @property
    def step_outcome(self) -> StepOutcome | None:
        """The outcome of the last weight update; None before the first.

        With a fused optimizer on a GPU, reading it right after an update is a host-device synchronization; see
        ``settled_outcome``.
        """
        self.loop.resolve_outcome()
        return self.loop.update.outcome

    @property
    def settled_outcome(self) -> StepOutcome | None:
        """The last outcome that the Trainer has read, possibly that of the previous update. None before the first.

        Reading this property never synchronizes.
        """
        return self.loop.update.outcome

    @property
    def loss_share(self) -> float | Tensor:
        """The factor that turns the current batch's loss into its share of the mean over the accumulation window."""
        return self.loop.mean.factor

    @property
    def skipped_steps(self) -> int:
        """The number of steps skipped so far because a gradient was not finite. Synchronizes like ``step_outcome``."""
        self.loop.resolve_outcome()
        return self.progress.skipped_steps

    @property
    def gradient_clip_val(self) -> float | None:
        """The limit of the first GradientClipping callback, or None. Can be set between two runs; None: no clipping."""
        clipping = find_callback(self.callbacks, GradientClipping)
        return self._gradient_clip_val if clipping is None else clipping.limit

    @gradient_clip_val.setter
    def gradient_clip_val(self, limit: float | None) -> None:
        self._set_clipping(limit, self.gradient_clip_algorithm)

    @property
    def gradient_clip_algorithm(self) -> GradClipAlgorithmType | None:
        """``"norm"`` or ``"value"``; None, the default, means ``"norm"``. Can be set between two runs."""
        clipping = find_callback(self.callbacks, GradientClipping)
        is_from_argument = clipping is None or self._gradient_clip_val is not None
        algorithm = self._gradient_clip_algorithm if is_from_argument else clipping.algorithm
        return GradClipAlgorithmType(algorithm.lower()) if algorithm else None

    @gradient_clip_algorithm.setter
    def gradient_clip_algorithm(self, algorithm: str | None) -> None:
        self._set_clipping(self.gradient_clip_val, algorithm)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of optimizer steps that the whole fit will attempt, for schedules; inf if it is unknown."""
        loop = self.loop
        if loop.limits.max_epochs in (None, -1):
            return float("inf") if loop.limits.max_steps == -1 else loop.limits.max_steps
        if self.data.ready(RunningStage.TRAINING) is None:
            rank_zero_info("Loading `train_dataloader` to estimate the number of stepping batches.")
        loaders = self.data.loaders(RunningStage.TRAINING)
        batches = 0 if loaders is None else loaders.num_batches()
        if batches == float("inf"):
            return float("inf") if loop.limits.max_steps == -1 else loop.limits.max_steps
        schedule = accumulation_schedule(self.run_state)
        sizes = (batches_in(schedule, epoch) for epoch in range(max(loop.limits.max_epochs, 1)))
        steps = count_windows(int(batches), sizes, loop.window.straddles_epochs)
        return steps if loop.limits.max_steps == -1 else min(steps, loop.limits.max_steps)

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
        loop = self.eval_loops[STAGES[fn]]
        loop.verbose = verbose
        with self._runner.started(fn):
            module = self._runner.attach(model, {STAGES[fn]: dataloaders}, datamodule, ckpt_path)
            results = self.engine.launch(self._runner, module, weights_only) or []
        if loop.verbose and self.is_global_zero:
            view = self.test_loop if fn is TrainerFn.TESTING else self.validate_loop
            view.print_results(results)
        return results

    # --- construction -----------------------------------------------------------------------------------------

    def _build_engine(self, precision: Precision, plugins: Any, **options: Any) -> LightningEngine:
        """Build the engine of this Trainer. A subclass may return another one."""
        return build_engine(self, precision, plugins, **options)

    def _set_clipping(self, limit: float | None, algorithm: str | None) -> None:
        self._gradient_clip_val, self._gradient_clip_algorithm = limit, algorithm
        new = defaults.build_clipping(limit, algorithm)
        current = find_callback(self.callbacks, GradientClipping)
        if new and current is not None:  # keep its other settings, such as `norm_type`
            current.max_norm, current.clip_value = new[0].max_norm, new[0].clip_value
            return
        others = [callback for callback in self.callbacks if not isinstance(callback, GradientClipping)]
        self.callbacks = callback_order.sort_callbacks([*others, *new])

    def _announce(self) -> None:
        """Print the effects of ``barebones``, ``detect_anomaly`` and ``fast_dev_run``, and the available devices."""
        if self.barebones:
            rank_zero_info(
                "You are running in `Trainer(barebones=True)` mode. All features that may impact raw speed have been"
                " disabled to facilitate analyzing the Trainer overhead. Specifically, the following are deactivated: "
                + ", ".join(f"`{name}`" for name in arguments.BAREBONES)
                + ", `LightningModule.log(...)` and `LightningModule.log_dict(...)`, and the reports on overflows."
            )
        if self.detect_anomaly and not self.scaler.is_enabled():  # AnomalyDetection replays skipped steps only
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
