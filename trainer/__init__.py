"""Mixed precision done right, in Lightning's style, at almost no overhead.

::

    from trainer import Trainer as Trainer

    Trainer(precision="16-mixed", max_epochs=3).fit(module, datamodule=data)

Importing this package does not import torch; the first use of a name such as ``Trainer`` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer._lazy import attribute_from

if TYPE_CHECKING:
    from trainer.compat.checkpoint_io import CheckpointFiles as CheckpointFiles
    from trainer.compat.deepspeed import DeepSpeedStrategy as DeepSpeedStrategy
    from trainer.compat.fsdp import FSDP2Strategy as FSDP2Strategy
    from trainer.images import log_images as log_images
    from trainer.precision import LossScaler as LossScaler
    from trainer.precision import Precision as Precision
    from trainer.record.run_record import load_run as load_run
    from trainer.record.sweep import load_sweep as load_sweep
    from trainer.state.outcome import StepOutcome as StepOutcome
    from trainer.trainer import Trainer as Trainer
    from trainer.weights import LoadedWeights as LoadedWeights
    from trainer.weights import load_weights as load_weights

__version__ = "0.1.0"

_HOMES = {
    "CheckpointFiles": "trainer.compat.checkpoint_io",
    "DeepSpeedStrategy": "trainer.compat.deepspeed",
    "FSDP2Strategy": "trainer.compat.fsdp",
    "LoadedWeights": "trainer.weights",
    "LossScaler": "trainer.precision.scaler",
    "Precision": "trainer.precision.base",
    "StepOutcome": "trainer.state.outcome",
    "Trainer": "trainer.trainer",
    "load_run": "trainer.record.run_record",
    "load_sweep": "trainer.record.sweep",
    "load_weights": "trainer.weights",
    "log_images": "trainer.images",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    return attribute_from(__name__, _HOMES, name)
