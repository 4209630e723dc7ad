"""How the loss scale is doing."""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import rank_zero_only
from torch.optim import Optimizer

from trainer.errors import ConfigurationError
from trainer.optimization import StepOutcome


class ScaleMonitor(Callback):
    """Logs the loss scale, the skipped steps and their rate; warns once where the scale says that something is wrong.

    Logged with each step, where the loss is scaled: ``amp/scale``, the scale the step was computed with;
    ``amp/skipped_steps``, so far; ``amp/skip_rate``, over the last ``window`` steps.

    Args:
        healthy: scale from and to which nothing is amiss. A scale outside of it for ``patience`` steps in a row
            draws one warning.
        patience: optimizer steps.
        alarm: a scale below this draws one warning at once: overflows are frequent.
        window: optimizer steps that the skip rate looks back on.

    Raises:
        ConfigurationError: bounds out of order, or a number of steps below 1.
    """

    def __init__(
        self,
        healthy: tuple[float, float] = (1_000.0, 100_000.0),
        patience: int = 1_000,
        alarm: float = 100.0,
        window: int = 100,
    ) -> None:
        low, high = healthy
        if not 0 < alarm <= low < high:
            raise ConfigurationError(
                f"Got alarm={alarm!r} and healthy={tuple(healthy)!r}, expected 0 < alarm <= healthy[0] < healthy[1]."
            )
        if patience < 1 or window < 1:
            raise ConfigurationError(
                f"Got patience={patience!r} and window={window!r}, expected numbers of steps, at least 1."
            )
        self.healthy = (float(low), float(high))
        self.patience = patience
        self.alarm = alarm
        self.window = window
        self._recent: deque[bool] = deque(maxlen=window)
        self._recent_skips = 0
        self._steps_outside = 0
        self._warned: set[str] = set()

    @property
    def skip_rate(self) -> float:
        """The share of skipped steps among the last ``window``; 0 before the first."""
        return self._recent_skips / len(self._recent) if self._recent else 0.0

    def on_after_optimizer_step(
        self, trainer: Any, pl_module: LightningModule, optimizer: Optimizer, outcome: StepOutcome
    ) -> None:
        """Look at one step."""
        if not trainer.scaler.is_enabled() or optimizer is not trainer.optimizers[outcome.optimizers[0]]:
            return
        if len(self._recent) == self.window:
            self._recent_skips -= self._recent[0]
        self._recent.append(outcome.skipped)
        self._recent_skips += outcome.skipped
        pl_module.log("amp/scale", outcome.scale)
        pl_module.log("amp/skipped_steps", float(trainer.skipped_steps))
        pl_module.log("amp/skip_rate", self.skip_rate)
        self._judge(outcome.next_scale)

    def _judge(self, scale: float) -> None:
        low, high = self.healthy
        self._steps_outside = 0 if low <= scale <= high else self._steps_outside + 1
        if scale < self.alarm:
            self._warn(
                "alarm",
                f"The loss scale fell to {scale:g}, below {self.alarm:g}: gradients overflow often"
                f" ({self.skip_rate:.0%} of the last {len(self._recent)} steps were skipped)."
                " Lower the learning rate, clip gradients, or use precision='bf16-mixed'.",
            )
        elif self._steps_outside >= self.patience and scale < low:
            self._warn(
                "low",
                f"The loss scale has been outside [{low:g}, {high:g}] for {self.patience} steps, now {scale:g}: small"
                " gradients may vanish in float16. Lower the learning rate, or use precision='bf16-mixed'.",
            )
        elif self._steps_outside >= self.patience:
            self._warn(
                "high",
                f"The loss scale has been outside [{low:g}, {high:g}] for {self.patience} steps, now {scale:g}:"
                " gradients are very small. Check that the loss is not averaged twice; set max_scale to cap it.",
            )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            _say(message)


@rank_zero_only
def _say(message: str) -> None:
    warnings.warn(message, stacklevel=4)
