"""The attributes of a callback's class that the framework reads, and their values for Lightning's own callbacks.

A callback of any package may define them::

    observes_only: bool          it saves, logs, reports or stops a run, and does not change a step. The trial
                                 runs of ``tune`` leave it out. Default: False.
    reads_epoch_metrics: bool    its ``on_train_epoch_end`` runs after the module's, to read the metrics logged there.
                                 Default: False.
    runs_last: bool              it writes or restores checkpoints, so its hooks at the end of a batch, an epoch or a
                                 validation are called after all others. Default: False.
    sees_each_save: bool         its ``on_save_checkpoint`` is also called if only the weights are saved.
                                 Default: False.
    unsupported_with: Mapping    by strategy (``"fsdp"``, ``"deepspeed"``), the reason why the callback cannot be used
                                 with it: "needs whole gradients. Use strategy='ddp'.". Default: empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import callbacks

_OBSERVERS = (
    callbacks.BatchSizeFinder, callbacks.Checkpoint, callbacks.EarlyStopping, callbacks.LearningRateFinder,
    callbacks.LearningRateMonitor, callbacks.ModelSummary, callbacks.ProgressBar, callbacks.Timer,
)  # fmt: skip
_SHARDED = dict.fromkeys(("fsdp", "deepspeed"), "has no rules for sharded weights: prune with strategy='ddp'.")


def observes_only(callback: Any) -> bool:
    """Return whether a callback saves, logs, reports or stops a run, and does not change a step."""
    return bool(getattr(callback, "observes_only", isinstance(callback, _OBSERVERS)))


def reads_epoch_metrics(callback: Any) -> bool:
    """Return whether the ``on_train_epoch_end`` of a callback runs after the module's."""
    default = isinstance(callback, (callbacks.EarlyStopping, callbacks.Checkpoint))
    return bool(getattr(callback, "reads_epoch_metrics", default))


def runs_last(callback: Any) -> bool:
    """Return whether a callback writes or restores checkpoints, and runs after all others."""
    return bool(getattr(callback, "runs_last", isinstance(callback, callbacks.Checkpoint)))


def sees_each_save(callback: Any) -> bool:
    """Return whether ``on_save_checkpoint`` of a callback is also called if only the weights are saved."""
    return bool(getattr(callback, "sees_each_save", False))


def unsupported_with(callback: Any) -> Mapping[str, str]:
    """Return the strategies that a callback cannot be used with, and the reasons."""
    default = _SHARDED if isinstance(callback, callbacks.ModelPruning) else {}
    return dict(getattr(callback, "unsupported_with", default))
