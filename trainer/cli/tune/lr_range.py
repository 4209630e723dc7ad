"""The learning-rate range test: training with an ever larger learning rate.

Leslie N. Smith, "Cyclical Learning Rates for Training Neural Networks", WACV 2017, section 3.3 (arXiv:1506.01186). Here
the rate grows exponentially, as in fastai's ``lr_find``.

It is not Lightning's ``Tuner.lr_find`` (which works with our Trainer) because that gives all parameter groups one rate,
counts skipped steps as points of the curve, smooths with a memory of fifty steps, which is half of the curve, and takes
its slope against the rate itself and not against the logarithm, which favours small rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from trainer.errors import ConfigurationError

_MEMORY = 0.9  # of the running mean by which divergence is noticed
_DIVERGED = 4.0  # times the lowest running mean: fastai's and Lightning's threshold
_MOST_SKIPPED = 30  # in a row; 16 halvings lead from the first scale to 1
_SWEEP = "Try some rates in a sweep: fit -m optimizer.lr=0.001,0.01,0.1"


@dataclass
class _Update:
    rate: float
    skipped: bool | None = None  # not known yet


class LearningRateSweep(Callback):
    """Raises the learning rate from one weight update to the next, and notes the loss that follows each.

    The loss beside a rate is the first one after an update with that rate. An update that overflowed and was skipped
    has changed nothing: it is no point of the curve, and its rate is tried again. Parameter groups keep their
    proportions; the rate is that of the fastest. Schedules are taken away. The fit ends with the last rate, or when the
    loss has diverged: it is not finite, or its running mean is four times the lowest and above the first.

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
        self._rates = [min_lr * (max_lr / min_lr) ** (step / (steps - 1)) for step in range(steps)]
        self._own_rates: set[float] = set()  # that the module has given the optimizer
        self._shares: list[float] = []  # of the fastest group's rate, for each group
        self._updates: list[_Update] = []
        self._window: list[float] = []  # losses of the batches of the current window
        self._windows = 0  # that are over
        self._mean: float | None = None  # running
        self._lowest = math.inf  # running mean

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Looks at the optimizer, and takes the schedules away.

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
        self._shares = [rate / max(rates) if max(rates) > 0 else 1.0 for rate in rates]
        given = optimizer.defaults.get("lr")  # some schedules change initial_lr as well
        self._own_rates = {*rates, *([] if given is None else [float(given)])}
        trainer.lr_scheduler_configs.clear()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Gives the optimizer the rate of this update. What became of those before is known by now."""
        done = sum(not update.skipped for update in self._updates)
        update = _Update(self._rates[min(done, len(self._rates) - 1)])
        self._updates.append(update)
        for group, share in zip(optimizer.param_groups, self._shares, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(update.rate * share)
            else:
                group["lr"] = update.rate * share

    def on_after_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer, outcome: Any
    ) -> None:
        """Notes whether the update was skipped. With a fused optimizer that is known just before the next."""
        self._updates[-1].skipped = outcome.skipped

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes the loss, and ends the fit where it is time."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            self._window.append(float(loss))  # host-device synchronisation
        if len(self._updates) == self._windows or not self._window:
            return  # within a window
        self._windows += 1
        loss, self._window = sum(self._window), []  # each is its share of the window's mean
        before = self._updates[self._windows - 2] if self._windows > 1 else None
        if before is None:
            self.first_loss = loss
        elif not before.skipped and math.isfinite(loss):
            self.points.append((before.rate, loss))
        if reason := self._is_over(loss, before):
            self.ended_by = reason
            trainer.should_stop = True

    def found(self) -> dict[str, Any]:
        """The curve, as plain containers."""
        return {
            "points": self.points,
            "first_loss": self.first_loss,
            "ended_by": self.ended_by,
            "skipped": sum(bool(update.skipped) for update in self._updates),
            "groups": len(self._shares),
            "own_rates": sorted(self._own_rates),
        }

    def _is_over(self, loss: float, before: _Update | None) -> str | None:
        """Why the test ends with this loss; None where it goes on."""
        if not math.isfinite(loss):
            return "divergence"
        self._mean = loss if self._mean is None else _MEMORY * self._mean + (1 - _MEMORY) * loss
        self._lowest = min(self._lowest, self._mean)
        assert self.first_loss is not None
        if self._mean > self._lowest + (_DIVERGED - 1) * abs(self._lowest) and self._mean > self.first_loss:
            return "divergence"
        last = self._updates[-_MOST_SKIPPED:]
        if len(last) == _MOST_SKIPPED and all(update.skipped for update in last):
            return "overflows"
        is_last = before is not None and not before.skipped and len(self.points) >= len(self._rates)
        return "the last rate" if is_last else None
