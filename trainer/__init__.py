"""Mixed precision done right, in Lightning's style, at almost no overhead.

::

    from trainer import Trainer

    Trainer(precision="16-mixed", max_epochs=3).fit(module, datamodule=data)

Importing this package does not import torch; the first use of a name such as ``Trainer`` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.common.lazy import attribute_from

if TYPE_CHECKING:
    from trainer.checkpoint.checkpoint_io import CheckpointFiles
    from trainer.distributed.deepspeed_engine import DeepSpeedStrategy
    from trainer.distributed.fsdp import FSDP2Strategy
    from trainer.loggers import log_images
    from trainer.module_weights import LoadedWeights, load_weights
    from trainer.precision import LossScaler, Precision
    from trainer.record.run_record import load_run
    from trainer.record.sweep_record import load_sweep
    from trainer.state.outcome import StepOutcome
    from trainer.trainer import Trainer

__all__ = [
    "CheckpointFiles", "DeepSpeedStrategy", "FSDP2Strategy", "LoadedWeights", "LossScaler", "Precision", "StepOutcome",
    "Trainer", "__version__", "load_run", "load_sweep", "load_weights", "log_images",
]  # fmt: skip
__version__ = "0.1.0"

_HOMES = {
    "CheckpointFiles": "trainer.checkpoint.checkpoint_io",
    "DeepSpeedStrategy": "trainer.distributed.deepspeed_engine",
    "FSDP2Strategy": "trainer.distributed.fsdp",
    "LoadedWeights": "trainer.module_weights",
    "LossScaler": "trainer.precision.scaler",
    "Precision": "trainer.precision.base",
    "StepOutcome": "trainer.state.outcome",
    "Trainer": "trainer.trainer",
    "load_run": "trainer.record.run_record",
    "load_sweep": "trainer.record.sweep_record",
    "load_weights": "trainer.module_weights",
    "log_images": "trainer.loggers",
}


def __getattr__(name: str) -> Any:
    return attribute_from(__name__, _HOMES, name)
