"""The last weight update, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer


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


@dataclass(eq=False)
class LastUpdate:
    """The last weight update of a run, and the optimizer steps since then.

    Attributes:
        outcome: the last outcome that was read. None before the first.
        unresolved: the indices of the optimizers that the update stepped, until its outcome is read.
        skipped: the optimizers that skipped the update, if its outcome was read.
        has_run: whether the current batch has made it, even if it was skipped.
        grad_norms: the norm of each optimizer's gradients before clipping, until the outcome is read.
        stepped: the optimizers that the module or a closure has stepped since the last update of the loss scale.
        stepping: the optimizer whose step runs, or the object that runs it, in manual optimization.
        freezes_scale: whether a closure or a manual training step runs. The scale is updated once, after its end.
    """

    outcome: StepOutcome | None = None
    unresolved: tuple[int, ...] = ()
    skipped: tuple[Optimizer, ...] = ()
    has_run: bool = False
    grad_norms: dict[Optimizer, Tensor] = field(default_factory=dict)
    stepped: list[Optimizer] = field(default_factory=list)
    stepping: Any = None
    freezes_scale: bool = False
