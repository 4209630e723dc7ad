"""Lightning's weight averaging, told of skipped steps.

``WeightAveraging`` averages in ``on_train_batch_end``, after each optimizer step that ``trainer.global_step`` counts:
skipped ones too. Here the same method runs when an update's outcome is known, unless it was skipped. The weights are
then those that the update left, also where the outcome arrives late.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import WeightAveraging
from torch.optim import Optimizer

from trainer.optimization import StepOutcome

_HOOK = "on_after_optimizer_step"


def follows_outcomes(callback: Any) -> bool:
    """Whether a callback's ``on_train_batch_end`` runs with an update's outcome, not after the batch."""
    return isinstance(callback, WeightAveraging) and _HOOK in vars(callback)


def attach_averaging(callbacks: Iterable[Any]) -> None:
    """Let averaging callbacks follow outcomes; those of a subclass with an ``on_train_batch_end`` of its own do not."""
    for callback in callbacks:
        if isinstance(callback, WeightAveraging) and (
            type(callback).on_train_batch_end is WeightAveraging.on_train_batch_end
        ):
            vars(callback)[_HOOK] = partial(_average, callback)


def detach_averaging(callbacks: Iterable[Any]) -> None:
    """Undo :func:`attach_averaging`."""
    for callback in callbacks:
        if follows_outcomes(callback):
            del vars(callback)[_HOOK]


def _average(
    callback: WeightAveraging, trainer: Any, pl_module: LightningModule, optimizer: Optimizer, outcome: StepOutcome
) -> None:
    is_last = optimizer is trainer.optimizers[outcome.optimizers[-1]]  # called for each; averaged once
    if is_last and len(outcome.skipped_optimizers) < len(outcome.optimizers):
        callback.on_train_batch_end(trainer, pl_module, {}, None, trainer.progress.batch_idx)
