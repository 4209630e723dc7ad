"""Callbacks that come with the Trainer.

They are ordinary ``lightning.Callback``s, and can be combined with Lightning's callbacks. Some of them require the
Trainer of this package.
"""

from __future__ import annotations

from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from trainer._lazy import attribute_from

if TYPE_CHECKING:
    from trainer.callbacks.activation_checkpointing import ActivationCheckpointing
    from trainer.callbacks.alignment_advisor import AlignmentAdvisor
    from trainer.callbacks.anomaly_detection import AnomalyDetection
    from trainer.callbacks.best_checkpoint import BestCheckpoint
    from trainer.callbacks.compile import Compile
    from trainer.callbacks.curves import Curves
    from trainer.callbacks.fast_settings import FastSettings
    from trainer.callbacks.gradient_accumulation import GradientAccumulation
    from trainer.callbacks.gradient_check import GradientCheck
    from trainer.callbacks.gradient_clipping import GradientClipping
    from trainer.callbacks.layer_norms import LayerNorms
    from trainer.callbacks.nonfinite_guard import NonFiniteGuard
    from trainer.callbacks.optuna_pruning import OptunaPruning
    from trainer.callbacks.overflow_report import OverflowReport
    from trainer.callbacks.progress_bar import ProgressBar
    from trainer.callbacks.roll_back_on_loss_spike import RollBackOnLossSpike
    from trainer.callbacks.run_recorder import RunRecorder
    from trainer.callbacks.run_summary import RunSummary
    from trainer.callbacks.scale_monitor import ScaleMonitor
    from trainer.callbacks.scaler_checkpoint import ScalerCheckpoint
    from trainer.callbacks.sync_detector import SyncDetector
    from trainer.callbacks.throughput import Throughput

__all__ = [
    "ActivationCheckpointing",
    "AnomalyDetection",
    "AlignmentAdvisor",
    "BestCheckpoint",
    "Compile",
    "Curves",
    "FastSettings",
    "GradientAccumulation",
    "GradientCheck",
    "GradientClipping",
    "LayerNorms",
    "NonFiniteGuard",
    "OptunaPruning",
    "OverflowReport",
    "ProgressBar",
    "RollBackOnLossSpike",
    "RunRecorder",
    "RunSummary",
    "ScaleMonitor",
    "ScalerCheckpoint",
    "SyncDetector",
    "Throughput",
]

# Each class is in the module of the same name: GradientClipping in gradient_clipping.
_MODULES = {module.name.replace("_", ""): module.name for module in iter_modules(__path__)}
_HOMES = {name: f"{__name__}.{_MODULES[name.lower()]}" for name in __all__}


def __getattr__(name: str) -> Any:
    return attribute_from(__name__, _HOMES, name)
