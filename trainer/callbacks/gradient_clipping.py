"""Gradient clipping, on unscaled gradients."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.optim import Optimizer

from trainer.common.run_callback import refuse_other_trainers
from trainer.errors import ConfigurationError, expect
from trainer.loop.gradients import Gradients
from trainer.loop.run_state import state_of
from trainer.state.outcome import StepOutcome


class GradientClipping(Callback):
    """Clips the gradients just before each optimizer step, by their total norm or by value.

    Runs after the gradients are unscaled and after every ``on_before_optimizer_step`` of callbacks and module. If the
    module overrides ``configure_gradient_clipping``, that method runs instead. Works with fused optimizers, too.
    ``Trainer(gradient_clip_val=...)`` is the short form.

    Logs ``grad_norm``, the norm before clipping, for every step that was taken. The norm of a skipped step (inf or NaN)
    is neither logged nor included in the mean of the epoch.

    Args:
        max_norm: the largest total norm; larger gradients are scaled down to it (``clip_grad_norm_``).
        clip_value: the largest absolute value of a gradient element (``clip_grad_value_``).
        norm_type: the order of the norm; inf for the largest element. Default: 2.0, the L2 norm.
        log_norm: whether to log ``grad_norm``. Default: True.

    Raises:
        ConfigurationError: if both or neither of ``max_norm`` and ``clip_value`` are given, or a limit is not positive.
        UnsupportedError: when a run begins, if the Trainer is Lightning's.
    """

    def __init__(
        self,
        max_norm: float | None = None,
        clip_value: float | None = None,
        norm_type: float = 2.0,
        log_norm: bool = True,
    ) -> None:
        is_one = (max_norm is None) != (clip_value is None)
        expect(is_one, "exactly one of them", max_norm=max_norm, clip_value=clip_value)
        limit = max_norm if max_norm is not None else clip_value
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
            raise ConfigurationError(f"Got {limit!r} as the limit of gradient clipping, expected a number above 0.")
        self.max_norm = max_norm
        self.clip_value = clip_value
        self.norm_type = norm_type
        self.log_norm = log_norm

    @property
    def unsupported_with(self) -> Mapping[str, str]:
        """The strategies that do not support this kind of clipping, and the reasons."""
        if not self.clip_value and self.norm_type == 2.0:
            return {}
        reason = "clips by value or by another norm than L2, but DeepSpeed clips only by the L2 norm."
        return {"deepspeed": f"{reason} Use GradientClipping(max_norm=...)."}

    @property
    def limit(self) -> float:
        """The limit: ``max_norm`` or ``clip_value``."""
        return float(self.max_norm if self.max_norm is not None else self.clip_value or 0.0)

    @property
    def algorithm(self) -> str:
        """``"norm"`` or ``"value"``, as in ``Trainer(gradient_clip_algorithm=...)``."""
        return "norm" if self.max_norm is not None else "value"

    def setup(self, trainer: pl.Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse Lightning's Trainer, which would not clip."""
        refuse_other_trainers(self, trainer)

    def clip(self, gradients: Gradients, optimizer: Optimizer) -> Tensor | None:
        """Clip the unscaled gradients of one optimizer in place, without a host-device synchronization.

        Args:
            gradients: the engine's operations on gradients.
            optimizer: the optimizer.

        Returns:
            The total norm before clipping, a 0-dim tensor; None when clipping by value without ``log_norm``.
        """
        return gradients.clip_(optimizer, self.limit, self.algorithm, self.norm_type, measure=self.log_norm)

    def on_after_optimizer_step(
        self, trainer: pl.Trainer, pl_module: LightningModule, optimizer: Optimizer, outcome: StepOutcome
    ) -> None:
        """Log the norm of a step that was not skipped."""
        if self.log_norm and outcome.grad_norm is not None and not outcome.skipped:
            # the gradients, and therefore their norm, are equal on all ranks
            state_of(trainer).log_metric(
                "grad_norm", outcome.grad_norm, on_step=True, on_epoch=True, batch_size=1, rank_zero_only=True
            )
