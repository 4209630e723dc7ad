"""The learning-rate range test: training with an increasing learning rate.

Leslie N. Smith, "Cyclical Learning Rates for Training Neural Networks", WACV 2017, section 3.3 (arXiv:1506.01186). The
rate grows exponentially, as in fastai's ``lr_find``. Lightning's ``Tuner.lr_find`` gives all parameter groups one rate,
counts skipped steps as points of the curve, and takes the slope against the rate instead of its logarithm.
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

_MEMORY = 0.9  # of the running mean that detects divergence
_DIVERGED = 4.0  # times the lowest running mean: the threshold of fastai and Lightning
_MOST_SKIPPED = 30  # in a row; 16 halvings lead from the first loss scale to 1


class LearningRateSweep(Callback):
    """Increase the learning rate from one weight update to the next, and record the loss that follows each.

    The rates replace the module's schedule. Parameter groups keep their proportions (the rate is the largest of them),
    and a skipped step does not advance the schedule and adds no point. The loss of a rate is the first one after an
    update with that rate. The fit ends with the last rate, or if the loss has diverged: it is not finite, or its
    running mean is four times the lowest and above the first.

    Args:
        min_lr: the first rate.
        max_lr: the last rate.
        steps: number of rates, at least 2.

    Attributes:
        points: pairs of a rate and the loss after it.
        first_loss: the loss before any update; None before the first batch.
        ended_by: ``the last rate``, ``divergence``, ``overflows`` or, if the data ended, ``the end of the fit``.
    """

    def __init__(self, min_lr: float, max_lr: float, steps: int) -> None:
        self.points: list[tuple[float, float]] = []
        self.first_loss: float | None = None
        self.ended_by = "the end of the fit"
        self._min_lr, self._max_lr, self._steps = min_lr, max_lr, steps
        self._own_rates: set[float] = set()  # that the module gave the optimizer
        self._window: list[float] = []  # losses of the batches of the current window
        self._rate: float | None = None  # of the last update
        self._learned: float | None = None  # the rate of the one before, if it was not skipped
        self._is_updated = False  # in this batch
        self._skips = self._skips_in_a_row = 0
        self._mean = self._lowest = math.inf  # running mean

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace the module's schedule.

        Raises:
            ConfigurationError: if the module uses manual optimization, or several optimizers, or one without ``lr``.
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
        # A schedule that changed the rate has stored the original in initial_lr; some change that as well.
        rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        given = optimizer.defaults.get("lr")
        self._own_rates = {*rates, *([] if given is None else [float(given)])}
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["initial_lr"] = rate / max(rates) if max(rates) > 0 else 1.0  # multiplied by the schedule
        trainer.lr_scheduler_configs[:] = [LRSchedulerConfig(LambdaLR(optimizer, self._rate_at), interval="step")]

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Record the rate of this update. The outcome of the one before is known by now."""
        self._learned = None if self._skips_in_a_row else self._rate
        self._rate = max(float(group["lr"]) for group in optimizer.param_groups)
        self._is_updated = True

    def on_after_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer, outcome: Any
    ) -> None:
        """Count skipped steps. With a fused optimizer, the outcome is known just before the next update."""
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
            return  # within a window
        self._is_updated = False
        loss, self._window = sum(self._window), []  # each is its share of the window's mean
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
            "own_rates": sorted(self._own_rates),
        }

    def _rate_at(self, step: int) -> float:
        """Return the rate after ``step`` updates that were not skipped."""
        share = min(step / (self._steps - 1), 1.0)
        rate: float = self._min_lr * (self._max_lr / self._min_lr) ** share
        return rate
