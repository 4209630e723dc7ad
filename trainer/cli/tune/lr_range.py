"""The learning-rate range test: training with an ever larger learning rate.

Leslie N. Smith, "Cyclical Learning Rates for Training Neural Networks", WACV 2017, section 3.3 (arXiv:1506.01186). Here
the rate grows exponentially, as in fastai's ``lr_find``.

It is not Lightning's ``Tuner.lr_find`` (which works with our Trainer) because that gives all parameter groups one rate,
counts skipped steps as points of the curve, smooths with a memory of fifty steps, which is half of the curve, and takes
its slope against the rate itself and not against the logarithm, which favours small rates.
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

_MEMORY = 0.9  # of the running mean by which divergence is noticed
_DIVERGED = 4.0  # times the lowest running mean: fastai's and Lightning's threshold
_MOST_SKIPPED = 30  # in a row; 16 halvings lead from the first scale to 1
_SWEEP = "Try some rates in a sweep: fit -m optimizer.lr=0.001,0.01,0.1"


class LearningRateSweep(Callback):
    """Raises the learning rate from one weight update to the next, and notes the loss that follows each.

    The rates are a schedule, in the place of the module's own: parameter groups keep their proportions (the rate is
    that of the fastest), and an update that overflowed and was skipped does not advance it. The loss beside a rate is
    the first one after an update with that rate; a skipped update is no point of the curve. The fit ends with the last
    rate, or when the loss has diverged: it is not finite, or its running mean is four times the lowest and above the
    first.

    Args:
        min_lr: the first rate.
        max_lr: the last rate.
        steps: from the one to the other, both included; at least 2.

    Attributes:
        points: pairs of a rate and the loss after it.
        first_loss: before any update; None before the first batch.
        ended_by: ``the last rate``, ``divergence``, ``overflows`` or, when the data ended, ``the end of the fit``.
    """

    def __init__(self, min_lr: float, max_lr: float, steps: int) -> None:
        self.points: list[tuple[float, float]] = []
        self.first_loss: float | None = None
        self.ended_by = "the end of the fit"
        self._min_lr, self._max_lr, self._steps = min_lr, max_lr, steps
        self._own_rates: set[float] = set()  # that the module has given the optimizer
        self._groups = 0
        self._window: list[float] = []  # losses of the batches of the current window
        self._rate: float | None = None  # of the last update
        self._learned: float | None = None  # the rate of the one before, if it was not skipped
        self._is_updated = False  # in this batch
        self._skips = self._skips_in_a_row = 0
        self._is_skipped = False  # the last update whose outcome is known
        self._mean: float | None = None  # running
        self._lowest = math.inf  # running mean

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Puts the schedule of the test in the place of the module's.

        Raises:
            ConfigurationError: there is not one optimizer, the module steps it itself, or it has no learning rate.
        """
        if not pl_module.automatic_optimization:
            raise ConfigurationError(
                "tune lr got a module with manual optimization, which steps its optimizers itself, when it likes;"
                f" expected automatic optimization. {_SWEEP}"
            )
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"tune lr got a module with {len(trainer.optimizers)} optimizers, expected one, for one learning rate"
                f" is what it finds. {_SWEEP}"
            )
        (optimizer,) = trainer.optimizers
        if any("lr" not in group for group in optimizer.param_groups):
            raise ConfigurationError(
                f"tune lr got the optimizer {type(optimizer).__name__}, whose parameter groups have no lr; expected"
                " one with a learning rate."
            )
        # Where a schedule has changed the rate already, it has kept what it was.
        rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        given = optimizer.defaults.get("lr")  # some schedules change initial_lr as well
        self._own_rates = {*rates, *([] if given is None else [float(given)])}
        self._groups = len(rates)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["initial_lr"] = rate / max(rates) if max(rates) > 0 else 1.0  # the schedule multiplies it
        schedule = LambdaLR(optimizer, self._rate_at)
        trainer.lr_scheduler_configs[:] = [LRSchedulerConfig(schedule, interval="step")]

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Notes the rate of this update. What became of those before is known by now."""
        self._learned = None if self._is_skipped else self._rate
        self._rate = max(float(group["lr"]) for group in optimizer.param_groups)
        self._is_updated = True

    def on_after_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer, outcome: Any
    ) -> None:
        """Notes whether an update was skipped. With a fused optimizer that is known just before the next."""
        self._is_skipped = outcome.skipped
        self._skips += outcome.skipped
        self._skips_in_a_row = self._skips_in_a_row + 1 if outcome.skipped else 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes the loss, and ends the fit where it is time."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            self._window.append(float(loss))  # host-device synchronisation
        if not self._is_updated or not self._window:
            return  # within a window
        self._is_updated = False
        loss, self._window = sum(self._window), []  # each is its share of the window's mean
        if self.first_loss is None:
            self.first_loss = loss
        if self._learned is not None and math.isfinite(loss):
            self.points.append((self._learned, loss))
        if reason := self._reason_to_end(loss):
            self.ended_by = reason
            trainer.should_stop = True

    def found(self) -> dict[str, Any]:
        """The curve, as plain containers."""
        return {
            "points": self.points,
            "first_loss": self.first_loss,
            "ended_by": self.ended_by,
            "skipped": self._skips,
            "groups": self._groups,
            "own_rates": sorted(self._own_rates),
        }

    def _rate_at(self, step: int) -> float:
        """The rate after ``step`` updates that were not skipped."""
        share = min(step / (self._steps - 1), 1.0)
        rate: float = self._min_lr * (self._max_lr / self._min_lr) ** share
        return rate

    def _reason_to_end(self, loss: float) -> str | None:
        """Why the test ends with this loss; None where it goes on."""
        if not math.isfinite(loss):
            return "divergence"
        self._mean = loss if self._mean is None else _MEMORY * self._mean + (1 - _MEMORY) * loss
        self._lowest = min(self._lowest, self._mean)
        assert self.first_loss is not None
        if self._mean > self._lowest + (_DIVERGED - 1) * abs(self._lowest) and self._mean > self.first_loss:
            return "divergence"
        if self._skips_in_a_row >= _MOST_SKIPPED:
            return "overflows"
        return "the last rate" if len(self.points) >= self._steps else None
