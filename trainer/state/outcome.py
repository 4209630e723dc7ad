"""The outcome of a weight update."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StepOutcome(NamedTuple):
    """The outcome of one weight update.

    Attributes:
        skipped: whether the weights were left alone because a gradient was not finite. With several optimizers:
            whether any of them was.
        scale: the loss scale that the gradients were computed with; 1 without a scaler.
        next_scale: the loss scale from the next batch on.
        grad_norm: total norm of the gradients before clipping, unscaled, over all optimizers whose gradients were
            measured; a 0-dim tensor on the gradients' device, inf or nan when skipped; None where nothing measured it.
        optimizers: the indices (in ``trainer.optimizers``) of those that were to step.
        skipped_optimizers: the indices of those among them that skipped a step.
    """

    skipped: bool
    scale: float
    next_scale: float
    grad_norm: Tensor | None
    optimizers: tuple[int, ...]
    skipped_optimizers: tuple[int, ...] = ()
