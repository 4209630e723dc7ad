"""The learning rate range test: train with an increasing learning rate.

Leslie N. Smith, "Cyclical Learning Rates for Training Neural Networks", WACV 2017, section 3.3 (arXiv:1506.01186). The
rate grows exponentially, as in fastai's ``lr_find``. Lightning's ``Tuner.lr_find`` sets all parameter groups to one
rate, counts skipped steps as points of the curve, and uses the slope over the rate instead of its logarithm.
"""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from trainer.errors import ConfigurationError

_MEMORY = 0.9  # decay of the running mean that detects divergence
_DIVERGED = 4.0  # multiple of the lowest running mean that counts as divergence, as in fastai and Lightning
_MOST_SKIPPED = 30  # consecutive skipped steps; the initial loss scale reaches 1 after 16


class LearningRateSweep(Callback):
    """Increase the learning rate with each optimizer step, and record the loss after each.

    The rates replace the module's schedule. Parameter groups keep the ratios of their rates (the recorded rate is the
    largest), and a skipped step does not advance the schedule and adds no point. The loss of a rate is the first one
    after a step with that rate. The fit ends with the last rate, after 30 skipped steps in a row, or if the loss
    diverges: it is not finite, or its running mean is above four times the lowest one and above the first loss.

    Args:
        min_lr: the first rate.
        max_lr: the last rate.
        steps: number of rates, at least 2.

    Attributes:
        points: pairs of a rate and the loss after it.
        first_loss: the loss before the first step; None before the first batch.
        ended_by: ``the last rate``, ``divergence``, ``overflows`` or, if the data ended, ``the end of the fit``.
    """

    def __init__(self, min_lr: float, max_lr: float, steps: int) -> None:
        self.points: list[tuple[float, float]] = []
        self.first_loss: float | None = None
        self.ended_by = "the end of the fit"
        self._min_lr, self._max_lr, self._steps = min_lr, max_lr, steps
        self._window: list[float] = []  # losses of the batches in the current accumulation window
        self._rate: float | None = None  # rate of the last step
        self._learned: float | None = None  # rate of the step before, if it was not skipped
        self._is_updated = False  # whether this batch had a step
        self._skips = self._skips_in_a_row = 0
        self._mean = self._lowest = math.inf  # running mean

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace the module's schedule.

        Raises:
            ConfigurationError: if the module uses manual optimization, several optimizers, or one without ``lr``.
        """
        optimizers = trainer.optimizers
        has_rate = [all("lr" in group for group in optimizer.param_groups) for optimizer in optimizers]
        if not pl_module.automatic_optimization or has_rate != [True]:
            manual = "" if pl_module.automatic_optimization else "manual optimization and "
            raise ConfigurationError(
                f"tune lr got a module with {manual}{len(optimizers)} optimizers, expected automatic optimization of"
                " one optimizer that has a learning rate. Try some rates in a sweep: fit -m optimizer.lr=0.001,0.01,0.1"
            )
        (optimizer,) = optimizers
        # Schedulers store the original rate in initial_lr; some of them change initial_lr, too.
        rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["initial_lr"] = rate / max(rates) if max(rates) > 0 else 1.0  # multiplied by the schedule
        trainer.lr_scheduler_configs[:] = [LRSchedulerConfig(LambdaLR(optimizer, self._rate_at), interval="step")]

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Record the rate of this step. The outcome of the previous step is known by now."""
        self._learned = None if self._skips_in_a_row else self._rate
        self._rate = max(float(group["lr"]) for group in optimizer.param_groups)
        self._is_updated = True

    def on_after_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer, outcome: Any
    ) -> None:
        """Count skipped steps. With a fused optimizer, the outcome is known only just before the next step."""
        self._skips += outcome.skipped
        self._skips_in_a_row = self._skips_in_a_row + 1 if outcome.skipped else 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss, and end the fit after the last rate."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            self._window.append(float(loss))  # host-device synchronization
        if not self._is_updated or not self._window:
            return  # within an accumulation window
        self._is_updated = False
        loss, self._window = sum(self._window), []  # each loss is divided by the size of the window
        if self.first_loss is None:
            self.first_loss = self._mean = loss
        if self._learned is not None and math.isfinite(loss):
            self.points.append((self._learned, loss))
        self._mean = _MEMORY * self._mean + (1 - _MEMORY) * loss
        self._lowest = min(self._lowest, self._mean)
        threshold = max(self.first_loss, self._lowest + (_DIVERGED - 1) * abs(self._lowest))
        if not math.isfinite(loss) or self._mean > threshold:
            self.ended_by = "divergence"
        elif self._skips_in_a_row >= _MOST_SKIPPED:
            self.ended_by = "overflows"
        elif len(self.points) >= self._steps:
            self.ended_by = "the last rate"
        else:
            return
        trainer.should_stop = True

    def found(self) -> dict[str, Any]:
        """Return the curve, as plain containers."""
        return {
            "points": self.points,
            "first_loss": self.first_loss,
            "ended_by": self.ended_by,
            "skipped": self._skips,
        }

    def _rate_at(self, step: int) -> float:
        """Return the rate after ``step`` steps that were not skipped."""
        share = min(step / (self._steps - 1), 1.0)
        rate: float = self._min_lr * (self._max_lr / self._min_lr) ** share
        return rate
