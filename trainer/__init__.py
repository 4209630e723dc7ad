"""Mixed precision done right, in Lightning's style, at almost no overhead.

::

    from trainer import Trainer

    Trainer(precision="16-mixed", max_epochs=3).fit(module, datamodule=data)

Importing this package does not import torch; the first use of a name such as ``Trainer`` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer._lazy import attribute_from

if TYPE_CHECKING:
    from trainer.compat.checkpoint_io import CheckpointFiles
    from trainer.compat.deepspeed import DeepSpeedStrategy
    from trainer.compat.fsdp import FSDP2Strategy
    from trainer.images import log_images
    from trainer.precision import LossScaler, Precision
    from trainer.record.run_record import load_run
    from trainer.record.sweep import load_sweep
    from trainer.state.outcome import StepOutcome
    from trainer.trainer import Trainer
    from trainer.weights import LoadedWeights, load_weights

__all__ = [
    "CheckpointFiles",
    "DeepSpeedStrategy",
    "FSDP2Strategy",
    "LoadedWeights",
    "LossScaler",
    "Precision",
    "StepOutcome",
    "Trainer",
    "__version__",
    "load_run",
    "load_sweep",
    "load_weights",
    "log_images",
]
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


def __getattr__(name: str) -> Any:
    return attribute_from(__name__, _HOMES, name)
