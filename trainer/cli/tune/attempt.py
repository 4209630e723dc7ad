"""Run and measure a few training steps in the child processes of ``tune``.

Each attempt has its own child process (`trainer.cli.tune.child`). On a GPU, an out-of-memory error leaves fragments,
handles of libraries or a broken context in its process. On a CPU, the peak memory of one attempt can only be measured
in a new process, because a process rarely returns memory to the system.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim.lr_scheduler import LambdaLR

from trainer.cli.execution import assemble
from trainer.cli.failure import is_about_settings
from trainer.cli.rehearsal import Clock, rehearse
from trainer.cli.tune.child import Message, Send
from trainer.common import machine
from trainer.common.traits import observes_only
from trainer.data.samples import batch_size
from trainer.errors import ConfigurationError, PrecisionError, is_out_of_memory
from trainer.precision.devices import peak_memory
from trainer.record.measures import device_of

_MOST_SKIPPED = 30  # the initial loss scale reaches 1 after 16 skipped steps
_MEMORY = 0.9  # decay of the running mean that detects divergence
_DIVERGED = 4.0  # multiple of the lowest running mean that counts as divergence, as in fastai and Lightning
_LOOK_EVERY = 0.02  # seconds
_MARGIN = 0.9  # of the free memory of a CPU; the rest is for the system and the growth of other processes


def train(
    send: Send,
    folder: Path,
    settings: dict[str, Any],
    limits: dict[str, Any] | None = None,
    rates: dict[str, Any] | None = None,
) -> None:
    """Train, and send the measurements. `trainer.cli.tune.child.run_in_child` calls this function.

    Args:
        send: sends the message. Its ``status`` is ``ok``, ``out of memory`` or ``failed``. If it is ``ok``, the message
            contains ``precision`` and the entries that ``found`` of the callback returns, otherwise ``error``.
        folder: the Trainer's ``default_root_dir``.
        settings: the resolved config. Its ``weights`` initialize a range test.
        limits: arguments of :class:`Meter`, to try a batch size.
        rates: arguments of :class:`LearningRateSweep`, for a range test.
    """
    observer = Meter(send, **limits or {}) if rates is None else LearningRateSweep(**rates)
    try:
        module, data, trainer = assemble(settings, folder)
        trainer.callbacks = [callback for callback in trainer.callbacks if not observes_only(callback)]
        weights = {} if rates is None or settings["weights"] is None else {"weights": settings["weights"]}
        rehearse(trainer, module, observer, datamodule=data, **weights)
        message = {"status": "ok", "precision": trainer.precision, **observer.found()}
    except (Exception, SystemExit) as error:
        message = _failure(error)
    send(message)


class Meter(Clock):
    """End a fit after some optimizer steps, and measure their speed and the peak memory.

    The fit lasts until two steps were not skipped, because only then is the state of the optimizer complete.

    Args:
        send: sends the message that the process exceeded the budget.
        steps: number of optimizer steps.
        memory: budget in bytes, of the process on a CPU, of torch's allocations on a GPU. Default: 90% of the free
            memory on a CPU, all memory on a GPU.
    """

    def __init__(self, send: Send, steps: int, memory: int | None = None) -> None:
        super().__init__()
        self._send, self._steps, self._memory = send, steps, memory
        self._device = torch.device("cpu")
        self._samples: list[int] = []  # number of samples in each batch
        self._warm_up = self._skipped = 0  # number of batches until the first optimizer step, and of skipped steps
        self._in_set: int | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Limit the memory: with torch's allocator on a GPU, with a thread that watches the process on a CPU.

        ``RLIMIT_AS`` and ``RLIMIT_DATA`` are not used: they limit the address space, and GPU libraries reserve
        gigabytes of it that they never use.
        """
        self._device = device_of(trainer)
        if self._device.type == "cuda" and self._memory is not None:
            total = torch.cuda.get_device_properties(self._device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._memory / total), self._device)
        if self._device.type == "cpu":
            self._memory = self._memory or int(_MARGIN * (machine.memory().usable or 0)) or sys.maxsize
            threading.Thread(target=watch_memory, args=(self._memory, self._send), daemon=True).start()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read the number of samples in the training set, if the sampler of the dataloader has a length."""
        with suppress(AttributeError, TypeError, NotImplementedError):
            self._in_set = len(trainer.train_dataloader.sampler)  # type: ignore[union-attr]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop the clock, and end the fit after the last step."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._samples.append(batch_size(batch))
        updates = trainer.global_step
        self._skipped = getattr(trainer, "skipped_steps", 0)  # `lightning.Trainer` does not count them
        self._warm_up = self._warm_up or (len(self._samples) if updates else 0)
        is_measured = updates >= self._steps and updates - self._skipped >= 2
        trainer.should_stop = is_measured or self._skipped >= _MOST_SKIPPED

    def found(self) -> Message:
        """Return the measurements.

        ``memory``: peak in bytes, of the process on a CPU, of tensors on a GPU. ``samples_per_second``: without the
        time to load batches and the first step. ``batch``: samples in a batch. ``samples``: samples in the training
        set, or None. ``skipped``: number of skipped steps.
        """
        memory = peak_memory(self._device)
        if self._device.type == "cpu" and self._memory is not None and memory > self._memory:
            return _over_budget(memory)
        seconds = sum(self.seconds[self._warm_up :])
        return {
            "memory": memory,
            "samples_per_second": sum(self._samples[self._warm_up :]) / seconds if seconds else None,
            "batch": max(self._samples, default=0),
            "samples": self._in_set,
            "skipped": self._skipped,
        }


class LearningRateSweep(Callback):
    """Increase the learning rate with each optimizer step, and record the loss after each.

    This is the learning rate range test: Leslie N. Smith, "Cyclical Learning Rates for Training Neural Networks", WACV
    2017, section 3.3 (arXiv:1506.01186). The rate grows exponentially, as in fastai's ``lr_find``. Lightning's
    ``Tuner.lr_find`` sets all parameter groups to one rate, counts skipped steps as points of the curve, and uses the
    slope over the rate instead of its logarithm.

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
        self._rate: float | None = None  # rate of the last step, if it was not skipped
        self._attempts = self._skips = self._skips_in_a_row = 0
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
            expected = "expected automatic optimization of one optimizer that has a learning rate"
            advice = "Try some rates in a sweep: fit -m optimizer.lr=0.001,0.01,0.1"
            raise ConfigurationError(f"tune lr got {manual}{len(optimizers)} optimizers, {expected}. {advice}")
        (optimizer,) = optimizers
        # Schedulers store the original rate in initial_lr; some of them change initial_lr, too.
        rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["initial_lr"] = rate / max(rates) if max(rates) > 0 else 1.0  # multiplied by the schedule
        trainer.lr_scheduler_configs[:] = [LRSchedulerConfig(LambdaLR(optimizer, self._rate_at), interval="step")]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss, and end the fit after the last rate."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            self._window.append(float(loss))  # host-device synchronization
        if trainer.global_step == self._attempts or not self._window:
            return  # within an accumulation window
        loss, self._window = sum(self._window), []  # each loss is divided by the size of the window
        if self.first_loss is None:
            self.first_loss = self._mean = loss
        if self._rate is not None and math.isfinite(loss):
            self.points.append((self._rate, loss))
        skips: int = getattr(trainer, "skipped_steps", 0)  # `lightning.Trainer` does not count them
        is_skipped, learned = skips > self._skips, self._attempts - self._skips
        self._rate = None if is_skipped else self._rate_at(learned)
        self._skips_in_a_row = self._skips_in_a_row + 1 if is_skipped else 0
        self._attempts, self._skips = trainer.global_step, skips
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
        return {"points": self.points, "first_loss": self.first_loss, "ended_by": self.ended_by, "skipped": self._skips}

    def _rate_at(self, step: int) -> float:
        """Return the rate after ``step`` steps that were not skipped."""
        return float(self._min_lr * (self._max_lr / self._min_lr) ** min(step / (self._steps - 1), 1.0))


def watch_memory(budget: int, send: Send) -> None:
    """Send a message, which ends the process, when its resident memory exceeds ``budget`` (bytes)."""
    while (peak := machine.peak_memory()) <= budget:
        time.sleep(_LOOK_EVERY)
    send(_over_budget(peak))


def _over_budget(peak: int) -> Message:
    return {"status": "out of memory", "error": "the process exceeded the budget", "memory": peak}


def _failure(error: BaseException) -> Message:
    traceback.print_exception(error, file=sys.stderr)
    message, is_usage = " ".join(str(error).split()), is_about_settings(error)
    return {
        "status": "out of memory" if is_out_of_memory(error) else "failed",
        "error": message if is_usage else f"{type(error).__name__}: {message}",
        "is_usage": is_usage,
        "is_precision": isinstance(error, PrecisionError),
    }
