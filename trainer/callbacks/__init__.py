"""Callbacks that come with the Trainer.

They are ordinary ``lightning.Callback``s, and can be combined with Lightning's callbacks. Some of them require the
Trainer of this package. Those that change training or the screen are in this package, the others in the packages of
their subjects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.common.lazy import attribute_from

if TYPE_CHECKING:
    from trainer.callbacks.activation_checkpointing import ActivationCheckpointing
    from trainer.callbacks.alignment_advisor import AlignmentAdvisor
    from trainer.callbacks.best_checkpoint import BestCheckpoint
    from trainer.callbacks.compile import Compile
    from trainer.callbacks.fast_settings import FastSettings
    from trainer.callbacks.gradient_accumulation import GradientAccumulation
    from trainer.callbacks.gradient_clipping import GradientClipping
    from trainer.callbacks.layer_norms import LayerNorms
    from trainer.callbacks.optuna_pruning import OptunaPruning
    from trainer.callbacks.progress_bar import ProgressBar
    from trainer.callbacks.scale_monitor import ScaleMonitor
    from trainer.callbacks.scaler_checkpoint import ScalerCheckpoint
    from trainer.callbacks.throughput import Throughput
    from trainer.diagnosis.anomaly_detection import AnomalyDetection
    from trainer.diagnosis.gradient_check import GradientCheck
    from trainer.diagnosis.nonfinite_guard import NonFiniteGuard
    from trainer.diagnosis.overflow_report import OverflowReport
    from trainer.diagnosis.roll_back_on_loss_spike import RollBackOnLossSpike
    from trainer.diagnosis.sync_detector import SyncDetector
    from trainer.record.curves import Curves
    from trainer.record.run_recorder import RunRecorder
    from trainer.record.run_summary import RunSummary

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

_HOMES = {
    "ActivationCheckpointing": "trainer.callbacks.activation_checkpointing",
    "AlignmentAdvisor": "trainer.callbacks.alignment_advisor",
    "AnomalyDetection": "trainer.diagnosis.anomaly_detection",
    "BestCheckpoint": "trainer.callbacks.best_checkpoint",
    "Compile": "trainer.callbacks.compile",
    "Curves": "trainer.record.curves",
    "FastSettings": "trainer.callbacks.fast_settings",
    "GradientAccumulation": "trainer.callbacks.gradient_accumulation",
    "GradientCheck": "trainer.diagnosis.gradient_check",
    "GradientClipping": "trainer.callbacks.gradient_clipping",
    "LayerNorms": "trainer.callbacks.layer_norms",
    "NonFiniteGuard": "trainer.diagnosis.nonfinite_guard",
    "OptunaPruning": "trainer.callbacks.optuna_pruning",
    "OverflowReport": "trainer.diagnosis.overflow_report",
    "ProgressBar": "trainer.callbacks.progress_bar",
    "RollBackOnLossSpike": "trainer.diagnosis.roll_back_on_loss_spike",
    "RunRecorder": "trainer.record.run_recorder",
    "RunSummary": "trainer.record.run_summary",
    "ScaleMonitor": "trainer.callbacks.scale_monitor",
    "ScalerCheckpoint": "trainer.callbacks.scaler_checkpoint",
    "SyncDetector": "trainer.diagnosis.sync_detector",
    "Throughput": "trainer.callbacks.throughput",
}


def __getattr__(name: str) -> Any:
    return attribute_from(__name__, _HOMES, name)
