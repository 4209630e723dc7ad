"""The outcome of an optimizer step."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StepOutcome(NamedTuple):
    """The outcome of one optimizer step.

    Attributes:
        skipped: whether the weights stayed unchanged because a gradient was not finite. With several optimizers:
            whether any of them skipped.
        scale: the loss scale that the gradients were computed with; 1 without a scaler.
        next_scale: the loss scale from the next batch on.
        grad_norm: total norm of the unscaled gradients before clipping, over all optimizers with measured gradients. A
            0-dim tensor on the gradients' device; inf or nan if the step was skipped; None if it was not measured.
        optimizers: indices (in ``trainer.optimizers``) of the optimizers that attempted to step.
        skipped_optimizers: indices of those among them that skipped the step.
        nonfinite_loss: whether the step was skipped and a loss was not finite, on any process, so that no loss scale
            can avoid the skip. Default: False; always False with DeepSpeed.
    """

    skipped: bool
    scale: float
    next_scale: float
    grad_norm: Tensor | None
    optimizers: tuple[int, ...]
    skipped_optimizers: tuple[int, ...] = ()
    nonfinite_loss: bool = False
