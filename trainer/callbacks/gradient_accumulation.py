"""Gradient accumulation: several batches make one weight update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from trainer.errors import ConfigurationError, expect
from trainer.loop.run_state import RunState


class GradientAccumulation(Callback):
    """Sets the number of batches between two weight updates, constant or by epoch.

    The gradients of a window of k batches are averaged over k. The last, short window of an epoch is averaged over the
    batches it has (Lightning divides by the full number), and also updates the weights. Processes average gradients
    once per window. ``Trainer(accumulate_grad_batches=...)`` is the short form.

    Args:
        batches: the number of batches in a window.
        schedule: used instead of ``batches``; maps an epoch to the number of batches from that epoch on, such as
            ``{0: 8, 10: 4}``. Before its first epoch, the number is 1.
        straddles_epochs: whether a window that is open at the end of an epoch continues in the next one. Default:
            False, the end of an epoch closes it. The last epoch always closes it.

    Raises:
        ConfigurationError: if both or neither of ``batches`` and ``schedule`` are given, or a number is below 1.
    """

    def __init__(
        self, batches: int | None = None, schedule: Mapping[int, int] | None = None, straddles_epochs: bool = False
    ) -> None:
        expect((batches is None) != (schedule is None), "exactly one of them", batches=batches, schedule=schedule)
        steps = {0: batches} if schedule is None else {int(epoch): number for epoch, number in schedule.items()}
        for epoch, number in steps.items():
            if not isinstance(number, int) or isinstance(number, bool) or number < 1 or epoch < 0:
                raise ConfigurationError(
                    f"Got {number!r} batches from epoch {epoch!r} on, expected a whole number of at least 1 from an"
                    " epoch of at least 0."
                )
        self.straddles_epochs = straddles_epochs
        self.schedule: dict[int, int] = {epoch: int(steps[epoch] or 1) for epoch in sorted(steps)}

    def batches_in(self, epoch: int) -> int:
        """Return the number of batches in a window of ``epoch``."""
        return batches_in(self.schedule, epoch)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Set the number of batches for the windows that open in this epoch."""
        trainer.accumulate_grad_batches = self.batches_in(trainer.current_epoch)


def batches_in(schedule: Mapping[int, int], epoch: int) -> int:
    """Return the number of batches in a window of ``epoch``, by a schedule such as ``{0: 8, 10: 4}``."""
    return next((schedule[first] for first in sorted(schedule, reverse=True) if epoch >= first), 1)


def find_callback(callbacks: Sequence[Any], class_: type) -> Any:
    """Return the first of ``callbacks`` that is of the class, or None."""
    return next((callback for callback in callbacks if isinstance(callback, class_)), None)


def accumulation_schedule(run: RunState) -> dict[int, int]:
    """Return the number of batches in an accumulation window, keyed by the first epoch with this number.

    The schedule is that of a callback, or the current ``accumulate_grad_batches`` if no callback sets it.
    """
    if (callback := find_callback(run.callbacks, GradientAccumulation)) is not None:
        return dict(callback.schedule)
    if (stock := find_callback(run.callbacks, GradientAccumulationScheduler)) is not None:
        return dict(stock.scheduling)
    return {0: run.accumulate_grad_batches}
