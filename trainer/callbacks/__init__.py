"""Callbacks that come with the Trainer.

They are ordinary ``lightning.Callback``s, and can be combined with Lightning's callbacks. Some of them require the
Trainer of this package. Those that change training or the screen are in this package, the others in the packages of
their subjects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.common.lazy import attribute_from

if TYPE_CHECKING:
    from trainer.callbacks.activation_checkpointing import ActivationCheckpointing as ActivationCheckpointing
    from trainer.callbacks.alignment_advisor import AlignmentAdvisor as AlignmentAdvisor
    from trainer.callbacks.best_checkpoint import BestCheckpoint as BestCheckpoint
    from trainer.callbacks.compile import Compile as Compile
    from trainer.callbacks.fast_settings import FastSettings as FastSettings
    from trainer.callbacks.gradient_accumulation import GradientAccumulation as GradientAccumulation
    from trainer.callbacks.gradient_clipping import GradientClipping as GradientClipping
    from trainer.callbacks.layer_norms import LayerNorms as LayerNorms
    from trainer.callbacks.optuna_pruning import OptunaPruning as OptunaPruning
    from trainer.callbacks.progress_bar import ProgressBar as ProgressBar
    from trainer.callbacks.scale_monitor import ScaleMonitor as ScaleMonitor
    from trainer.callbacks.scaler_checkpoint import ScalerCheckpoint as ScalerCheckpoint
    from trainer.callbacks.throughput import Throughput as Throughput
    from trainer.diagnosis.anomaly_detection import AnomalyDetection as AnomalyDetection
    from trainer.diagnosis.gradient_check import GradientCheck as GradientCheck
    from trainer.diagnosis.nonfinite_guard import NonFiniteGuard as NonFiniteGuard
    from trainer.diagnosis.overflow_report import OverflowReport as OverflowReport
    from trainer.diagnosis.roll_back_on_loss_spike import RollBackOnLossSpike as RollBackOnLossSpike
    from trainer.diagnosis.sync_detector import SyncDetector as SyncDetector
    from trainer.record.curves import Curves as Curves
    from trainer.record.run_recorder import RunRecorder as RunRecorder
    from trainer.record.run_summary import RunSummary as RunSummary

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
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    return attribute_from(__name__, _HOMES, name)
