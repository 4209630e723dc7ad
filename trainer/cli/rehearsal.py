"""Run a few steps of a config for ``checks``, ``export`` and ``tune``, with objects that are discarded afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from trainer.precision.devices import synchronized_time
from trainer.record.measures import device_of

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class RehearsalDone(Exception):  # noqa: N818 - not an error
    """Raised by a callback to end the run."""


def rehearse(trainer: Trainer, module: Any, observer: pl.Callback, stage: str = "fit", **arguments: Any) -> None:
    """Run a stage of the Trainer to its end, or until ``observer`` raises :class:`RehearsalDone`.

    Args:
        trainer: from :func:`trainer.cli.execution.assemble`.
        module: from :func:`trainer.cli.execution.assemble`.
        observer: added to the callbacks of the Trainer.
        stage: name of the Trainer's method, such as ``"fit"``.
        arguments: keyword arguments of that method.
    """
    trainer.callbacks = [*trainer.callbacks, observer]
    with suppress(RehearsalDone):
        getattr(trainer, stage)(module, **arguments)


class Clock(pl.Callback):
    """Measure the seconds of each training step, without the time to load its batch.

    Args:
        clock: returns the time in seconds.

    Attributes:
        seconds: duration of each step so far.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._started = 0.0
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        self._started = synchronized_time(device_of(trainer), self.clock)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop the clock."""
        self.seconds.append(synchronized_time(device_of(trainer), self.clock) - self._started)
