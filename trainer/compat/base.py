"""The base class of ``Trainer``: what modules, callbacks, loggers, strategies and launchers expect to find on it.

Nothing here does anything. It shows the state that ``Trainer`` and its loops keep, under the names and in the shapes
that ``lightning.pytorch.Trainer`` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ProgressBar, Timer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.trainer.connectors.callback_connector import _CallbackConnector
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from torch import nn
from torch.optim import Optimizer

from trainer.compat.callbacks import overrides
from trainer.compat.data import DataSource
from trainer.compat.engine import LightningEngine, lightning_engine
from trainer.compat.errors import adopt
from trainer.compat.logging import ResultsView
from trainer.compat.precision import PrecisionAdapter
from trainer.compat.signals import Signals
from trainer.compat.tuning import CheckpointConnectorView
from trainer.compat.views import EvalLoopView, FitLoopView, LoopPlace
from trainer.engine.protocol import Engine
from trainer.loops.evaluation import EvalLoop
from trainer.loops.fit import FitLoop
from trainer.precision.base import Precision
from trainer.precision.scaler import LossScaler
from trainer.state.metrics import MetricStore, PublishedMetrics, Recorder
from trainer.state.progress import FitProgress

adopt()

# Lightning's Trainer is a base for those who ask with `isinstance` and `issubclass`, such as LightningCLI, and for
# nothing else: it is never initialised, and every public name of it is defined anew (a test checks).
if TYPE_CHECKING:
    LightningTrainer = object
else:
    from lightning.pytorch import Trainer as LightningTrainer


class TrainerBase(LightningTrainer):
    """Lightning's Trainer as others see it. ``Trainer`` assigns every attribute declared here in its constructor."""

    # what Trainer assigns
    engine: Engine
    data: DataSource
    progress: FitProgress
    published: PublishedMetrics
    recorder: Recorder
    loop: FitLoop
    eval_loops: dict[RunningStage, EvalLoop]
    state: TrainerState
    callbacks: list[Any]
    module: LightningModule | None
    profiler: Profiler
    ckpt_path_is_assigned: bool
    _ckpt_path: str | Path | None
    fast_dev_run: int | bool
    overfit_batches: int | float
    limit_train_batches: int | float
    limit_val_batches: int | float
    limit_test_batches: int | float
    limit_predict_batches: int | float
    val_check_interval: int | float
    num_sanity_val_steps: int | float
    reload_dataloaders_every_n_epochs: int
    fit_loop = LoopPlace[FitLoopView]()
    validate_loop = LoopPlace[EvalLoopView]()
    test_loop = LoopPlace[EvalLoopView]()
    predict_loop = LoopPlace[EvalLoopView]()

    barebones: bool
    enable_autolog_hparams: bool
    _model_registry: str | None
    _signal_connector: Signals
    _checkpoint_connector: CheckpointConnectorView
    log_metric: Callable[..., None]
    """Logs a value as the module's ``self.log`` does, with its arguments, whatever overrides that; for callbacks."""

    # --- devices and processes --------------------------------------------------------------------------------

    def _build_engine(self, precision: Precision, plugins: Any, **options: Any) -> Engine:
        """The engine of this Trainer. A subclass may return another one."""
        return LightningEngine(self, precision, plugins, **options)

    @property
    def scaler(self) -> LossScaler:
        """The one loss scaler, from construction to the end; disabled where the precision scales nothing."""
        return self.engine.gradients.scaler

    @property
    def strategy(self) -> Strategy:
        """Lightning's strategy."""
        return lightning_engine(self.engine).strategy

    @property
    def accelerator(self) -> Accelerator:
        """Lightning's accelerator."""
        accelerator = self.strategy.accelerator
        assert accelerator is not None
        return accelerator

    @property
    def precision(self) -> str:
        """The name of the precision: ``"16-mixed"``."""
        return self.engine.precision.name

    @property
    def precision_plugin(self) -> PrecisionAdapter:
        """Our plugin in Lightning's shape; the plugin itself is its ``plugin``."""
        return lightning_engine(self.engine).adapter

    @property
    def global_rank(self) -> int:
        """This process's number, over all nodes."""
        return self.engine.global_rank

    @property
    def local_rank(self) -> int:
        """This process's number on its node."""
        return int(getattr(self.strategy, "local_rank", 0))

    @property
    def node_rank(self) -> int:
        """This node's number."""
        return int(getattr(self.strategy, "node_rank", 0))

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.engine.world_size

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return int(getattr(self.strategy, "num_nodes", 1))

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes the files."""
        return self.strategy.is_global_zero

    @property
    def device_ids(self) -> list[int]:
        """The indices of this node's devices."""
        strategy = self.strategy
        devices = strategy.parallel_devices if isinstance(strategy, ParallelStrategy) else [strategy.root_device]
        return [device.index if device.index is not None else i for i, device in enumerate(devices or [])]

    @property
    def num_devices(self) -> int:
        """The number of this node's devices."""
        return len(self.device_ids)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """What a ``DistributedSampler`` needs to know."""
        return self.strategy.distributed_sampler_kwargs if isinstance(self.strategy, ParallelStrategy) else None

    @property
    def _accelerator_connector(self) -> Any:
        return lightning_engine(self.engine).connector

    @property
    def _callback_connector(self) -> _CallbackConnector:
        return _CallbackConnector(self)  # type: ignore[arg-type]

    @property
    def _data_connector(self) -> Any:
        return self.data.connector

    # --- the module and its data ------------------------------------------------------------------------------

    @property
    def lightning_module(self) -> Any:
        """The user's module."""
        return self.module if self.module is not None else self.strategy.lightning_module

    @property
    def model(self) -> nn.Module | None:
        """Its strategy-wrapped form."""
        return self.strategy.model

    @property
    def ckpt_path(self) -> Any:
        """The checkpoint of the current or last run. Assign one, and each run loads it, until None is assigned."""
        return self._ckpt_path

    @ckpt_path.setter
    def ckpt_path(self, path: Any) -> None:
        self._ckpt_path, self.ckpt_path_is_assigned = path, bool(path)

    @property
    def datamodule(self) -> LightningDataModule | None:
        """The user's datamodule."""
        return self.data.datamodule

    @property
    def optimizers(self) -> list[Optimizer]:
        """The bare optimizers."""
        return self.engine.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        self.strategy.optimizers = optimizers

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The learning-rate schedules."""
        return self.strategy.lr_scheduler_configs

    @property
    def num_training_batches(self) -> float:
        """Batches of one epoch; inf where nobody knows, or not yet."""
        training = RunningStage.TRAINING
        loaders = self.data.loaders(training) if self.data.is_ready(training) else self.loop.batches.loaders
        if loaders is not None and loaders is self.loop.batches.loaders:
            return self.loop.batches.num_batches  # where SWA writes
        return loaders.num_batches() if loaders is not None else self.loop.batches.num_batches or float("inf")

    @property
    def num_val_batches(self) -> list[float]:
        """Validation batches of each dataloader."""
        return self._limits(RunningStage.VALIDATING)

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """Sanity-check batches of each dataloader; empty where no fit would run them."""
        if self.state.fn is TrainerFn.VALIDATING:
            return []
        return [min(self.num_sanity_val_steps, batches) for batches in self.num_val_batches]

    @property
    def num_test_batches(self) -> list[float]:
        """Test batches of each dataloader."""
        return self._limits(RunningStage.TESTING)

    @property
    def num_predict_batches(self) -> list[float]:
        """Prediction batches of each dataloader."""
        return self._limits(RunningStage.PREDICTING)

    @property
    def train_dataloader(self) -> Any:
        """The training dataloader(s), as the loop iterates them."""
        return self._iterables(RunningStage.TRAINING)

    @property
    def val_dataloaders(self) -> Any:
        """The validation dataloader(s)."""
        return self._iterables(RunningStage.VALIDATING)

    @property
    def test_dataloaders(self) -> Any:
        """The test dataloader(s)."""
        return self._iterables(RunningStage.TESTING)

    @property
    def predict_dataloaders(self) -> Any:
        """The prediction dataloader(s)."""
        return self._iterables(RunningStage.PREDICTING)

    @property
    def enable_validation(self) -> bool:
        """Whether a fit validates."""
        if self.module is None or not self.limit_val_batches:
            return False
        return self.data.is_defined(RunningStage.VALIDATING) and overrides(self.module, "validation_step")

    def _limits(self, stage: RunningStage) -> list[float]:
        loaders = self.data.loaders(stage) if self.data.is_ready(stage) else self.eval_loops[stage].loaders
        return [] if loaders is None else loaders.limits

    def _iterables(self, stage: RunningStage) -> Any:
        loaders = self.data.loaders(stage) if self.data.is_ready(stage) else None
        return None if loaders is None else loaders.combined.iterables

    # --- progress ---------------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """Epochs completed."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps attempted, skipped ones included."""
        return self.progress.optimizer_steps

    @property
    def is_last_batch(self) -> bool:
        """Whether the current training batch is its epoch's last."""
        return self.progress.is_last_batch

    @property
    def should_stop(self) -> bool:
        """Whether training is to end after the current batch."""
        return self.loop.limits.should_stop

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        self.loop.limits.should_stop = stop

    @property
    def max_epochs(self) -> int | None:
        """Epochs to train in all; -1 for no limit. None where nobody said, until a fit starts."""
        return self.loop.limits.max_epochs

    @property
    def min_epochs(self) -> int | None:
        """Epochs before ``should_stop`` is heeded; likewise."""
        return self.loop.limits.min_epochs

    @property
    def max_steps(self) -> int:
        """Optimizer steps to take in all; -1 for no limit."""
        return self.loop.limits.max_steps

    @property
    def min_steps(self) -> int | None:
        """Optimizer steps before ``should_stop`` is heeded."""
        return self.loop.limits.min_steps

    @property
    def check_val_every_n_epoch(self) -> int | None:
        """Epochs between validations."""
        return self.loop.limits.check_val_every_n_epoch

    @property
    def val_check_batch(self) -> float | None:
        """Batches between validations; inf for the end of the epoch, None before a fit and where time decides."""
        return self.loop.limits.val_check_batch

    @property
    def _val_check_time_interval(self) -> float | None:
        return self.loop.limits.val_check_seconds

    @property
    def log_every_n_steps(self) -> int:
        """Weight updates between two rows in the loggers."""
        return self.loop.limits.log_every_n_steps

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches in one weight update."""
        return self.loop.window.batches

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, batches: int) -> None:
        self.loop.window.batches = batches

    # --- what is running --------------------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        """Whether training batches run."""
        return self.state.stage is RunningStage.TRAINING

    @training.setter
    def training(self, value: bool) -> None:
        self._set_stage(RunningStage.TRAINING, value)

    @property
    def validating(self) -> bool:
        """Whether validation runs."""
        return self.state.stage is RunningStage.VALIDATING

    @validating.setter
    def validating(self, value: bool) -> None:
        self._set_stage(RunningStage.VALIDATING, value)

    @property
    def testing(self) -> bool:
        """Whether test runs."""
        return self.state.stage is RunningStage.TESTING

    @testing.setter
    def testing(self, value: bool) -> None:
        self._set_stage(RunningStage.TESTING, value)

    @property
    def predicting(self) -> bool:
        """Whether predict runs."""
        return self.state.stage is RunningStage.PREDICTING

    @predicting.setter
    def predicting(self, value: bool) -> None:
        self._set_stage(RunningStage.PREDICTING, value)

    @property
    def sanity_checking(self) -> bool:
        """Whether the sanity check runs."""
        return self.state.stage is RunningStage.SANITY_CHECKING

    @sanity_checking.setter
    def sanity_checking(self, value: bool) -> None:
        self._set_stage(RunningStage.SANITY_CHECKING, value)

    def _set_stage(self, stage: RunningStage, value: bool) -> None:
        if value:
            self.state.stage = stage
        elif self.state.stage is stage:
            self.state.stage = None

    @property
    def evaluating(self) -> bool:
        """Whether any evaluation with metrics runs."""
        return self.state.stage is not None and self.state.stage.evaluating

    @property
    def interrupted(self) -> bool:
        """Whether the last run was interrupted."""
        return self.state.status is TrainerStatus.INTERRUPTED

    @property
    def received_sigterm(self) -> bool:
        """Whether a SIGTERM has come; the run ends after the current batch."""
        return self._signal_connector.received_sigterm

    @property
    def _active_loop(self) -> Any:
        stage = self.state.stage
        if stage is RunningStage.VALIDATING and self.state.fn is TrainerFn.FITTING:
            return self.fit_loop.epoch_loop.val_loop
        views = {
            RunningStage.TRAINING: self.fit_loop,
            RunningStage.SANITY_CHECKING: self.fit_loop.epoch_loop.val_loop,
            RunningStage.VALIDATING: self.validate_loop,
            RunningStage.TESTING: self.test_loop,
            RunningStage.PREDICTING: self.predict_loop,
        }
        return views.get(stage) if stage is not None else None

    @property
    def _evaluation_loop(self) -> EvalLoopView:
        views = {
            TrainerFn.FITTING: self.fit_loop.epoch_loop.val_loop,
            TrainerFn.VALIDATING: self.validate_loop,
            TrainerFn.TESTING: self.test_loop,
        }
        if self.state.fn not in views:
            raise RuntimeError("The `Trainer._evaluation_loop` property isn't defined. Accessed outside of scope")
        return views[self.state.fn]

    # --- metrics and loggers ----------------------------------------------------------------------------------

    @property
    def active_metrics(self) -> MetricStore | None:
        """Where ``self.log`` puts its values now; None where nothing may be logged."""
        stage = self.state.stage
        if stage is RunningStage.TRAINING:
            return self.loop.metrics
        if stage is None or stage is RunningStage.PREDICTING:
            return None
        return self.eval_loops[stage].metrics

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """Everything logged so far, for callbacks to monitor; 0-dim tensors. One live dict."""
        return self._fresh().callback

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """Everything logged so far that is meant for loggers; 0-dim tensors."""
        return self._fresh().logged

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        """Everything logged so far that is meant for the progress bar; numbers: asking waits for the device."""
        return self._fresh().read_progress_bar()

    def _fresh(self) -> PublishedMetrics:
        """The published metrics, with what the running stage has logged since they were published."""
        store = self.active_metrics
        if store is not None and store.entries:
            self.published.take(store.current())
        return self.published

    @property
    def loggers(self) -> list[Logger]:
        """The loggers."""
        return self.recorder.loggers

    @loggers.setter
    def loggers(self, loggers: Iterable[Logger] | None) -> None:
        self.recorder.loggers = list(loggers or [])

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self.loggers = [] if logger is None else [logger]

    @property
    def log_dir(self) -> str | None:
        """The first logger's folder, the same on all ranks."""
        if self.loggers:
            first = self.loggers[0]
            folder = first.log_dir if isinstance(first, (TensorBoardLogger, CSVLogger)) else first.save_dir
        else:
            folder = self.default_root_dir
        return self.engine.broadcast(folder)

    @property
    def default_root_dir(self) -> str:
        """Where files go that no logger has a folder for."""
        raise NotImplementedError

    @property
    def _results(self) -> Any:
        store = self.active_metrics
        return None if store is None else ResultsView(self, store)

    @property
    def _logger_connector(self) -> Any:
        progress = self.progress

        def log_metrics(metrics: dict[str, Any], step: int | None = None) -> None:
            self.recorder.send(metrics, progress.updates if step is None else step, exact_step=step is not None)

        return SimpleNamespace(
            should_update_logs=self._should_update_logs(),
            should_reset_tensors=lambda fx: False,
            log_metrics=log_metrics,
            _current_fx=None,
        )

    def _should_update_logs(self) -> bool:
        every, active = self.log_every_n_steps, self._active_loop
        if active is self.fit_loop:
            return self.loop.limits.logging_is_due()
        return every > 0 and (active is None or active.batch_progress.current.ready % every == 0 or self.should_stop)

    # --- callbacks --------------------------------------------------------------------------------------------

    def _first_callback(self, kind: type) -> Any:
        return next((callback for callback in self.callbacks if isinstance(callback, kind)), None)

    @property
    def is_out_of_time(self) -> bool:
        """Whether a ``max_time`` is over: what stops a fit then is that, and not what it has come to."""
        timer = self._first_callback(Timer)
        left = None if timer is None else timer.time_remaining()
        return left is not None and left <= 0

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        """The first callback that writes checkpoints."""
        found: Checkpoint | None = self._first_callback(Checkpoint)
        return found

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        """All callbacks that write checkpoints."""
        return [callback for callback in self.callbacks if isinstance(callback, Checkpoint)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first EarlyStopping callback."""
        found: EarlyStopping | None = self._first_callback(EarlyStopping)
        return found

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """All EarlyStopping callbacks."""
        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """The progress bar."""
        found: ProgressBar | None = self._first_callback(ProgressBar)
        return found

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Modules that are made inside have their weights on the device, and in the precision's dtype, at once.

        Args:
            empty_init: True leaves out the initialisation of weights, where a checkpoint will be loaded.
        """
        with self.strategy.tensor_init_context(empty_init=empty_init):
            yield

    def _teardown(self) -> None:
        self.engine.teardown()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print``, once, from rank 0."""
        if self.local_rank == 0:
            print(*args, **kwargs)
