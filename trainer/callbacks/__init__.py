"""Callbacks that ship with the Trainer. Plain ``lightning.Callback``s; Lightning's own work beside them."""

from __future__ import annotations

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
    from trainer.callbacks.halve_on_out_of_memory import HalveOnOutOfMemory
    from trainer.callbacks.inference_speed import InferenceSpeed
    from trainer.callbacks.layer_norms import LayerNorms
    from trainer.callbacks.memory_history import MemoryHistory
    from trainer.callbacks.nonfinite_guard import NonFiniteGuard
    from trainer.callbacks.optuna_pruning import OptunaPruning
    from trainer.callbacks.overflow_report import OverflowReport
    from trainer.callbacks.progress_bar import ProgressBar
    from trainer.callbacks.roll_back_on_loss_spike import RollBackOnLossSpike
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
    "HalveOnOutOfMemory",
    "InferenceSpeed",
    "LayerNorms",
    "MemoryHistory",
    "NonFiniteGuard",
    "OptunaPruning",
    "OverflowReport",
    "ProgressBar",
    "RollBackOnLossSpike",
    "RunSummary",
    "ScaleMonitor",
    "ScalerCheckpoint",
    "SyncDetector",
    "Throughput",
]

_HOMES = {
    "ActivationCheckpointing": "trainer.callbacks.activation_checkpointing",
    "AnomalyDetection": "trainer.callbacks.anomaly_detection",
    "AlignmentAdvisor": "trainer.callbacks.alignment_advisor",
    "BestCheckpoint": "trainer.callbacks.best_checkpoint",
    "Compile": "trainer.callbacks.compile",
    "Curves": "trainer.callbacks.curves",
    "FastSettings": "trainer.callbacks.fast_settings",
    "GradientAccumulation": "trainer.callbacks.gradient_accumulation",
    "GradientCheck": "trainer.callbacks.gradient_check",
    "GradientClipping": "trainer.callbacks.gradient_clipping",
    "HalveOnOutOfMemory": "trainer.callbacks.halve_on_out_of_memory",
    "InferenceSpeed": "trainer.callbacks.inference_speed",
    "LayerNorms": "trainer.callbacks.layer_norms",
    "MemoryHistory": "trainer.callbacks.memory_history",
    "NonFiniteGuard": "trainer.callbacks.nonfinite_guard",
    "OptunaPruning": "trainer.callbacks.optuna_pruning",
    "OverflowReport": "trainer.callbacks.overflow_report",
    "ProgressBar": "trainer.callbacks.progress_bar",
    "RollBackOnLossSpike": "trainer.callbacks.roll_back_on_loss_spike",
    "RunSummary": "trainer.callbacks.run_summary",
    "ScaleMonitor": "trainer.callbacks.scale_monitor",
    "ScalerCheckpoint": "trainer.callbacks.scaler_checkpoint",
    "SyncDetector": "trainer.callbacks.sync_detector",
    "Throughput": "trainer.callbacks.throughput",
}


def __getattr__(name: str) -> Any:
    return attribute_from(__name__, _HOMES, name)
