"""The default parts of a Trainer: its callbacks, its loggers, and its profiler."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, ModelSummary, RichModelSummary
from lightning.pytorch.callbacks import ProgressBar as AnyProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import Profiler
from lightning_utilities.core.imports import RequirementCache

from trainer.arguments import check, refuse_other_package, refuse_twice
from trainer.callbacks.alignment_advisor import AlignmentAdvisor
from trainer.callbacks.gradient_accumulation import GradientAccumulation
from trainer.callbacks.gradient_clipping import GradientClipping
from trainer.callbacks.progress_bar import ProgressBar
from trainer.callbacks.scaler_checkpoint import ScalerCheckpoint
from trainer.common.lightning_private import add_timer, init_profiler
from trainer.diagnosis.anomaly_detection import AnomalyDetection
from trainer.diagnosis.nonfinite_guard import NonFiniteGuard
from trainer.diagnosis.overflow_report import OverflowReport
from trainer.errors import ConfigurationError, rank_zero_warn
from trainer.loggers import adapter
from trainer.record.run_recorder import RecordView, RunRecorder

if TYPE_CHECKING:
    import lightning.pytorch as pl


class _ModelSummary(RichModelSummary):
    """Lightning's summary, without its warning about sizes in mixed precision, because the weights are float32."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Print the summary."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Precision .* is not supported by the model summary")
            super().on_fit_start(trainer, pl_module)


def build_callbacks(
    given: Mapping[str, Any],
    *,
    default_checkpoint: Callable[[], Checkpoint],
    scales_loss: bool,
    exposes_gradients: bool,
    uses_tensor_cores: bool,
) -> list[Any]:
    """Return the user's callbacks, those that ``gradient_clip_val`` and ``max_time`` stand for, and the defaults.

    Args:
        given: all arguments of the Trainer.
        default_checkpoint: creates the default callback that saves checkpoints.
        scales_loss: whether the precision scales the loss, so that steps may overflow.
        exposes_gradients: whether the engine can locate overflowed gradients.
        uses_tensor_cores: whether matrix products run in 16 bits on a GPU, so that layer sizes matter.

    Raises:
        ConfigurationError: if a setting is made twice, there are two progress bars, another argument forbids a
            callback, or an algorithm is unknown.
    """
    passed = given["callbacks"]
    refuse_other_package("callbacks", passed, *(passed if isinstance(passed, Sequence) else ()))
    callbacks: list[Any] = [] if passed is None else list(passed) if isinstance(passed, Iterable) else [passed]

    def missing(class_: type) -> bool:
        return not any(isinstance(callback, class_) for callback in callbacks)

    def wanted(name: str) -> bool:
        return given[name] is not False

    refuse_twice("accumulate_grad_batches", given["accumulate_grad_batches"], 1, callbacks, GradientAccumulation)
    refuse_twice("gradient_clip_val", given["gradient_clip_val"], None, callbacks, GradientClipping)
    for class_, argument in ((AnyProgressBar, "enable_progress_bar"), (Checkpoint, "enable_checkpointing")):
        names = [type(callback).__name__ for callback in callbacks if isinstance(callback, class_)]
        if names and not wanted(argument):
            raise ConfigurationError(
                f"Trainer was configured with `{argument}=False` but found `{names[0]}` in callbacks list."
            )
        if class_ is AnyProgressBar and len(names) > 1:
            raise ConfigurationError(
                "You added multiple progress bar callbacks to the Trainer, but currently only one progress bar is"
                f" supported. Got {', '.join(names)}: keep one of them."
            )
    callbacks += build_clipping(given["gradient_clip_val"], given["gradient_clip_algorithm"])
    add_timer(callbacks, given["max_time"])
    barebones, shows = given["barebones"], wanted("enable_progress_bar")
    scales_loss, uses_tensor_cores = scales_loss and not barebones, uses_tensor_cores and not barebones
    defaults: list[tuple[bool, type, Callable[[], Any]]] = [
        (True, ScalerCheckpoint, ScalerCheckpoint),  # in every precision, because it reports a changed precision
        (exposes_gradients and (scales_loss or not barebones), OverflowReport, OverflowReport),
        (not barebones, NonFiniteGuard, partial(NonFiniteGuard, every_step=False)),
        (scales_loss and given["detect_anomaly"], AnomalyDetection, AnomalyDetection),
        (uses_tensor_cores, AlignmentAdvisor, AlignmentAdvisor),
        (shows, AnyProgressBar, ProgressBar),
        (wanted("enable_model_summary"), ModelSummary, _ModelSummary),
        (not missing(RecordView), RunRecorder, partial(RunRecorder, writes=False)),
        (wanted("enable_checkpointing"), Checkpoint, default_checkpoint),
    ]
    callbacks += [default() for is_wanted, class_, default in defaults if is_wanted and missing(class_)]
    return callbacks


def build_clipping(limit: float | None, algorithm: str | None) -> list[GradientClipping]:
    """Return the callback that ``gradient_clip_val`` and ``gradient_clip_algorithm`` stand for; [] for no limit, or 0.

    Raises:
        ConfigurationError: if the limit is not a number or is below 0, or the algorithm is unknown.
    """
    check({"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm})
    if not limit:
        return []
    by_value = algorithm is not None and algorithm.lower() == "value"
    return [GradientClipping(clip_value=limit) if by_value else GradientClipping(max_norm=limit)]


def build_loggers(given: Logger | Iterable[Logger] | bool | None, folder: str, *, fast_dev_run: bool) -> list[Any]:
    """Return the list of loggers. True and None stand for Lightning's default logger, which writes below ``folder``.

    With ``fast_dev_run``, a logger that discards all values replaces them.
    """
    if given is None or given is True:
        return [DummyLogger() if fast_dev_run else _default_logger(folder)]
    loggers: list[Any] = [] if not given else list(given) if isinstance(given, Iterable) else [given]
    refuse_other_package("logger", *loggers)
    return [DummyLogger()] if loggers and fast_dev_run else loggers


def _default_logger(folder: str) -> Logger:
    try:
        return TensorBoardLogger(folder)
    except ModuleNotFoundError:
        rank_zero_warn(
            "`logger=True` will use `CSVLogger` as the default logger, unless the `tensorboard` or `tensorboardX`"
            " packages are found. Install one of them for TensorBoard's files."
        )
        return CSVLogger(folder)


def in_opening_order(loggers: Iterable[Any]) -> list[Any]:
    """Sort ``loggers`` in the order in which they open their files.

    See :attr:`trainer.loggers.LoggerAdapter.opening_order`.
    """
    return sorted(loggers, key=lambda logger: adapter(logger).opening_order)


def default_checkpoint(model_registry: str | None) -> Callable[[], Checkpoint]:
    """Return a function that creates the default checkpoint callback; with a model registry, one that uploads.

    That requires the package ``litmodels``. Without it, as in Lightning, ``model_registry`` has no effect.
    """
    if not model_registry or not RequirementCache("litmodels >=0.1.7"):
        return ModelCheckpoint
    from litmodels.integrations.checkpoints import LightningModelCheckpoint  # type: ignore[import-not-found]

    return partial(LightningModelCheckpoint, model_registry=model_registry)


def build_profiler(given: Profiler | str | None) -> Profiler:
    """Return the profiler that ``given`` names. None stands for a profiler that records nothing."""
    refuse_other_package("profiler", given)
    holder: Any = SimpleNamespace()
    init_profiler(holder, given)
    profiler: Profiler = holder.profiler
    return profiler
