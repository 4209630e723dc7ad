"""The base class of ``Trainer``: Lightning's Trainer on top of our parts.

Properties that Lightning's Trainer derives from its strategy, loops, connectors and callbacks are inherited; the views
in ``lightning/views.py`` and other modules show the state of our loops. Lightning's constructor and ``fit`` never run.
This class defines the attributes that the constructor would assign, and the properties that must be faster than
Lightning's or differ from them.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.connectors.callback_connector import _CallbackConnector
from lightning.pytorch.trainer.states import RunningStage, TrainerState

from trainer import arguments
from trainer.checkpoint.process import ProcessState
from trainer.common.aliases import alias
from trainer.distributed.engine import LightningEngine
from trainer.distributed.signals import Signals
from trainer.errors import ConfigurationError
from trainer.lightning.checkpoint_connector import CheckpointConnector
from trainer.lightning.loader_set import DataSource
from trainer.lightning.views import EvalLoopView, FitLoopView, LoopAttribute, PredictLoopView
from trainer.loop.evaluation import EvalLoop
from trainer.loop.fit import FitLoop
from trainer.loop.overrides import overrides
from trainer.loop.run_state import RunState
from trainer.metrics.logging import LoggerConnector
from trainer.metrics.metrics import MetricStore, PublishedMetrics
from trainer.module_weights import LoadedWeights
from trainer.precision.scaler import LossScaler
from trainer.state.progress import FitProgress

Method = TypeVar("Method", bound=Callable[..., Any])

# so that `except MisconfigurationException` catches our errors. This is not in `trainer.errors`, which the command line
# imports to report mistyped arguments, because importing Lightning takes seconds
if not issubclass(ConfigurationError, MisconfigurationException):
    ConfigurationError.__bases__ = (*ConfigurationError.__bases__, MisconfigurationException)


def with_lightning_signature(method: Method) -> Method:
    """Show Lightning's signature of a method to LightningCLI, which creates an option for each parameter that it sees.

    All commands need the same options: if only ``fit`` had a parameter, ``validate`` would refuse the config that
    ``fit`` has saved.
    """
    signature = inspect.signature(getattr(LightningTrainer, method.__name__))
    method.__signature__ = signature  # type: ignore[attr-defined]
    return method


_METHODS = {
    name: method
    for name, method in vars(LightningTrainer).items()
    if name.startswith("_") and not name.endswith("__") and inspect.isfunction(method) and name != "_teardown"
}
"""The private methods of Lightning's Trainer that do not run, and their implementations."""
_CONNECTORS = {
    "_checkpoint_connector": CheckpointConnector, "_logger_connector": LoggerConnector, "_signal_connector": Signals
}  # fmt: skip


_SOURCE = _METHODS["_run"].__code__.co_filename


def _find_original(name: str) -> Any:
    """Return Lightning's own method, also if another library has replaced it before this import; None if it is gone."""

    def is_original(value: Any) -> bool:
        place = _SOURCE, f"{LightningTrainer.__qualname__}.{name}"
        return type(value) is FunctionType and (value.__code__.co_filename, value.__code__.co_qualname) == place

    current = vars(LightningTrainer)[name]
    return current if is_original(current) else next(filter(is_original, gc.get_objects()), None)


_ORIGINALS = {name: _find_original(name) for name in ("fit", "validate", "test", "predict", "save_checkpoint")}
"""The public methods of Lightning's Trainer that ours overrides, and that MLflow, ClearML and others replace."""


def replacement_of(trainer: TrainerBase, cls: type, name: str, given: Mapping[str, Any]) -> Callable[[], Any] | None:
    """Return a call of the function that another library has set on Lightning's class instead of a method, if any.

    Where it calls Lightning's method, that leads back to our method, which then runs. It receives the first argument by
    its position, and those of the others that differ from their defaults by name.

    Args:
        trainer: the Trainer.
        cls: the class with our method.
        name: the name of the method.
        given: the local variables of our method: its arguments.
    """
    is_led_here, trainer.led_to = trainer.led_to == name, ""
    original = _ORIGINALS[name]
    if is_led_here or vars(LightningTrainer)[name] is original:
        return None
    if original is not None and original.__code__ is not _call_selected.__code__:
        _lead_to(cls, name, original)
    parameters = inspect.signature(getattr(cls, name)).parameters
    defaults = {key: parameters[key].default if key in parameters else None for key in given}  # `weights` is not shown
    options = {key: value for key, value in given.items() if value is not defaults[key] and key != "self"}
    first = [options.pop(key) for key in list(parameters)[1:2] if key in options]
    return partial(getattr(super(TrainerBase, trainer), name), *first, **options)


def _lead_to(cls: type, name: str, original: Any) -> None:
    """Change Lightning's function, which a replacement may keep anywhere: with one of our Trainers, it calls ours."""
    kept = FunctionType(original.__code__, original.__globals__, name, original.__defaults__)

    def select(trainer: LightningTrainer, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(trainer, TrainerBase):
            return kept(trainer, *args, **kwargs)
        trainer.led_to = name
        return getattr(cls, name)(trainer, *args, **kwargs)

    original.__signature__ = inspect.signature(original)
    original.__defaults__, original.__kwdefaults__ = None, {"_select": select}
    original.__code__ = _call_selected.__code__


def _call_selected(self: Any, *args: Any, _select: Any, **kwargs: Any) -> Any:
    return _select(self, *args, **kwargs)


class TrainerBase(LightningTrainer):
    """Lightning's Trainer on top of our parts. ``Trainer`` assigns every attribute declared here in its constructor."""

    run_state: RunState
    prefetch_batches: int
    inference_mode: bool
    detect_anomaly: bool
    led_to = ""
    """The name of our method that Lightning's leads to: see :func:`replacement_of`."""

    # the parts of Lightning's Trainer that inherited methods read
    fit_loop = LoopAttribute[FitLoopView]()
    validate_loop = LoopAttribute[EvalLoopView]()
    test_loop = LoopAttribute[EvalLoopView]()
    predict_loop = LoopAttribute[PredictLoopView]()
    _signal_connector: Signals  # type: ignore[assignment]
    _checkpoint_connector: CheckpointConnector
    _logger_connector: LoggerConnector
    _accelerator_connector: Any = alias("run_state.engine.connector")
    _data_connector: Any = alias("run_state.data.connector")
    _loggers: list[Any] = alias("run_state.published.loggers", writable=True)

    # the state of the run
    engine: LightningEngine = alias("run_state.engine", writable=True)
    progress: FitProgress = alias("run_state.progress", writable=True)
    published: PublishedMetrics = alias("run_state.published", writable=True)
    loop: FitLoop = alias("run_state.loop", writable=True)
    eval_loops: dict[RunningStage | None, EvalLoop] = alias("run_state.eval_loops", writable=True)
    callbacks: list[Any] = alias("run_state.callbacks", writable=True)
    data: DataSource = alias("run_state.data", writable=True)
    process: ProcessState = alias("run_state.process", writable=True)
    state: TrainerState = alias("run_state.status", writable=True)
    fast_dev_run: int | bool = alias("run_state.fast_dev_run", writable=True)
    resume: str | None = alias("run_state.resume", writable=True)
    exact_resume: bool = alias("run_state.exact_resume", writable=True)
    pad_evaluation: bool = alias("run_state.pad_evaluation", writable=True)
    dataloader_timeout: float = alias("run_state.dataloader_timeout", writable=True)
    overfit_batches: int | float = alias("run_state.overfit_batches", writable=True)
    reload_dataloaders_every_n_epochs: int = alias("run_state.reload_dataloaders_every_n_epochs", writable=True)
    profiler: Profiler = alias("run_state.profiler", writable=True)
    log_metric: Callable[..., None] = alias("run_state.log_metric", writable=True)
    """Logs a value like the module's ``self.log``, with the same arguments, but bypasses overrides; for callbacks."""

    active_metrics: MetricStore | None = alias("run_state.active_metrics")
    loaded_weights: LoadedWeights | None = alias("_checkpoint_connector.loaded_weights")

    # attributes of Lightning's Trainer that our parts hold
    scaler: LossScaler = alias("run_state.engine.gradients.scaler")
    datamodule: LightningDataModule | None = alias("run_state.data.datamodule", writable=True)
    should_stop: bool = alias("run_state.loop.limits.should_stop", writable=True)
    check_val_every_n_epoch: int | None = alias("run_state.loop.limits.check_val_every_n_epoch", writable=True)
    log_every_n_steps: int = alias("run_state.loop.limits.log_every_n_steps", writable=True)
    val_check_batch: float | None = alias("run_state.loop.limits.val_check_batch", writable=True)
    _val_check_time_interval: float | None = alias("run_state.loop.limits.val_check_seconds")
    _last_val_time: float = alias("run_state.loop.limits.validated_at", writable=True)

    # same values as Lightning's, but without a view in between, because every step reads them
    global_step: int = alias("run_state.progress.optimizer_steps")
    current_epoch: int = alias("run_state.progress.epoch")
    is_last_batch: bool = alias("run_state.progress.is_last_batch")

    def _set_window(self, batches: int) -> None:
        loop = self.loop
        # StochasticWeightAveraging adds `forward_only` for its last epoch
        if loop.forward_only not in loop.path.wrappers:
            arguments.check({"accumulate_grad_batches": batches})
            self.engine.check_accumulation(batches or 1)
        loop.window.batches = batches or 1

    accumulate_grad_batches: int = alias("run_state.loop.window.batches").setter(_set_window)

    @property
    def _callback_connector(self) -> _CallbackConnector:  # type: ignore[override]
        return _CallbackConnector(self)

    @property
    def device_ids(self) -> list[int]:
        """The indices of this node's devices. (Lightning treats index 0 as a missing index.)"""
        strategy = self.strategy
        devices = strategy.parallel_devices if isinstance(strategy, ParallelStrategy) else [strategy.root_device]
        return [device.index if device.index is not None else i for i, device in enumerate(devices or [])]

    @property
    def enable_validation(self) -> bool:
        """Whether a fit validates. (Lightning ignores some kinds of ``validation_step`` set on an instance.)"""
        if self.lightning_module is None or not self.limit_val_batches:
            return False
        return self.data.source(RunningStage.VALIDATING).is_defined() and overrides(
            self.lightning_module, "validation_step"
        )

    def _teardown(self) -> None:
        self.engine.teardown()


def refuse_own_parts(trainer: TrainerBase) -> None:
    """Raise an error if the Trainer has its own private methods or connectors, which would not run."""
    class_ = type(trainer)
    replaced = [name for name, method in _METHODS.items() if getattr(class_, name) is not method]
    replaced += [name for name, connector in _CONNECTORS.items() if not isinstance(getattr(trainer, name), connector)]
    if replaced:
        raise ConfigurationError(
            f"Got a {class_.__qualname__} with its own {', '.join(replaced)}, expected a Trainer that keeps the private"
            " methods and connectors: Lightning's do not run. Use hooks of the module or of a callback."
        )
