"""What runs in the child processes of ``tune``: a few real training steps that are measured.

Each try has a child process of its own (`trainer.cli.tune.child`), on every kind of device. On a GPU, only a new
process is free of what an out-of-memory error leaves behind (fragments, handles of libraries, a broken context). On a
CPU, only a new process tells the peak memory of one try, because a process rarely returns memory to the system.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as lightnings
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from trainer import callbacks as ours
from trainer import machine
from trainer.cli.failure import is_about_settings
from trainer.cli.run import assemble
from trainer.cli.tune.child import Message, Tell
from trainer.cli.tune.lr_range import LearningRateSweep
from trainer.data.samples import batch_size
from trainer.errors import PrecisionError, is_out_of_memory
from trainer.precision.devices import now

# Callbacks that are left out of a try: they save, log, stop, or handle an out-of-memory error. All others stay, because
# they may change the memory and time of a step: activation checkpointing, averages of the weights, the user's own.
_LEFT_OUT: tuple[type, ...] = (
    lightnings.BatchSizeFinder,
    lightnings.Checkpoint,
    lightnings.EarlyStopping,
    lightnings.LearningRateFinder,
    lightnings.LearningRateMonitor,
    lightnings.ModelSummary,
    lightnings.ProgressBar,
    lightnings.Timer,
    ours.Curves,
    ours.LayerNorms,
    ours.NonFiniteGuard,
    ours.OverflowReport,
    ours.RunRecorder,
    ours.RunSummary,
    ours.ScaleMonitor,
    ours.Throughput,
)
_MOST_SKIPPED = 30  # updates that may overflow before a scale is found; 16 halvings lead from the first scale to 1
_LOOK_EVERY = 0.02  # seconds


def try_batch_size(tell: Tell, folder: Path, settings: dict[str, Any], **measured: Any) -> None:
    """Train for a few steps, and tell what they took: for `trainer.cli.tune.child.run_in_child`.

    The message has a ``status``: ``ok``, ``out of memory`` or ``failed``. ``ok`` comes with the ``precision`` and what
    `Meter.found` has; the others with ``error``.

    Args:
        tell: takes the message.
        folder: for what a Trainer may write.
        settings: the config, resolved, with that size in it.
        measured: arguments of `Meter`.
    """
    _train(tell, folder, settings, Meter(tell, **measured))


def run_range_test(tell: Tell, folder: Path, settings: dict[str, Any], **rates: Any) -> None:
    """Train with ever larger learning rates: for `trainer.cli.tune.child.run_in_child`.

    It begins with the weights that a fit would. Tells as `try_batch_size` does; ``ok`` comes with what
    `trainer.cli.tune.lr_range.LearningRateSweep.found` has, whose arguments ``rates`` are.
    """
    begin = {} if settings["weights"] is None else {"weights": settings["weights"]}
    _train(tell, folder, settings, LearningRateSweep(**rates), **begin)


def _train(
    tell: Tell, folder: Path, settings: dict[str, Any], observer: Meter | LearningRateSweep, **begin: Any
) -> None:
    try:
        module, data, trainer = assemble(settings, folder)
        trainer.callbacks = [*callbacks_that_stay(trainer.callbacks), observer]
        trainer.fit(module, datamodule=data, **begin)
        message = {"status": "ok", "precision": trainer.precision, **observer.found()}
    except (Exception, SystemExit) as error:
        message = _failure(error)
    tell(message)


def callbacks_that_stay(callbacks: list[Callback]) -> list[Callback]:
    """The callbacks of a Trainer that may change the memory and time of a step."""
    return [callback for callback in callbacks if not isinstance(callback, _LEFT_OUT)]


class Meter(Callback):
    """Ends a fit after some weight updates, and measures their speed and the peak memory.

    The fit lasts until two updates have not been skipped: only then is the state of the optimizer complete.

    Args:
        tell: takes the message that the process has more memory than it may.
        steps: weight updates.
        memory: budget in bytes, of the process on a CPU, of torch's allocations on a GPU. None for what there is.
        only_on_cpu: the budget is the host's, and says nothing about a GPU.
    """

    def __init__(self, tell: Tell, steps: int, memory: int | None = None, only_on_cpu: bool = False) -> None:
        self._tell = tell
        self._steps = steps
        self._memory = memory
        self._only_on_cpu = only_on_cpu
        self._device = torch.device("cpu")
        self._rates: list[float] = []  # samples per second, of each update
        self._samples = self._batch = 0
        self._seconds = self._started = 0.0
        self._seen = self._skipped = 0  # optimizer steps and skipped ones, when the last update ended
        self._skips = 0  # updates
        self._in_set: int | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Limits the memory: by torch's allocator on a GPU, by a thread that watches the process on a CPU.

        Not ``RLIMIT_AS`` or ``RLIMIT_DATA``: they count addresses, of which libraries for GPUs reserve gigabytes that
        nobody ever uses, they count them differently from system to system, and Windows and macOS have none that hold.
        """
        self._device = trainer.strategy.root_device
        if self._memory is None or (self._only_on_cpu and self._device.type != "cpu"):
            return
        if self._device.type == "cuda":
            total = torch.cuda.get_device_properties(self._device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._memory / total), self._device)
        elif self._device.type == "cpu":
            threading.Thread(target=watch_memory, args=(self._memory, self._tell), daemon=True).start()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Notes the number of samples in the training set."""
        self._in_set = samples_in(trainer.train_dataloader)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts the clock."""
        self._started = now(self._device, time.perf_counter)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stops the clock, and after the last update the fit."""
        self._seconds += now(self._device, time.perf_counter) - self._started
        samples = batch_size(batch)
        self._samples += samples
        self._batch = max(self._batch, samples)
        if trainer.global_step == self._seen:  # within a window
            return
        skipped: int = trainer.skipped_steps  # type: ignore[attr-defined]  # ours has it
        self._skips += skipped > self._skipped
        self._rates.append(self._samples / self._seconds if self._seconds else 0.0)
        self._seen, self._skipped = trainer.global_step, skipped
        self._samples, self._seconds = 0, 0.0
        updates = len(self._rates)
        trainer.should_stop = (updates >= self._steps and updates - self._skips >= 2) or self._skips >= _MOST_SKIPPED

    def found(self) -> Message:
        """The measurements, at the end of the fit.

        ``memory``: bytes at the peak, of the process on a CPU, of tensors on a GPU. ``samples_per_second``: without the
        waiting for batches. ``batch``: samples in a batch, as it was. ``samples``: in the training set, if that is
        known. ``skipped``: updates that overflowed.
        """
        on_gpu = self._device.type == "cuda"
        memory = torch.cuda.max_memory_allocated(self._device) if on_gpu else machine.peak_memory()
        if self._device.type == "cpu" and self._memory is not None and memory > self._memory:
            return _over_budget(memory)
        timed = self._rates[1:]
        return {
            "memory": memory,
            "samples_per_second": statistics.median(timed) if timed else None,
            "batch": self._batch,
            "samples": self._in_set,
            "skipped": self._skips,
        }


def samples_in(loader: Any) -> int | None:
    """How many samples a dataloader draws in an epoch; None where that is not known, or where there are several."""
    if not isinstance(loader, DataLoader):
        return None
    try:
        return len(loader.sampler)  # type: ignore[arg-type]  # most have a length
    except (TypeError, NotImplementedError):
        return None


def watch_memory(budget: int, tell: Tell) -> None:
    """Tell, and so end the process, when its resident memory has grown beyond ``budget`` (bytes)."""
    while (peak := machine.peak_memory()) <= budget:
        time.sleep(_LOOK_EVERY)
    tell(_over_budget(peak))


def _over_budget(peak: int) -> Message:
    return {"status": "out of memory", "error": "the process grew beyond the budget", "memory": peak}


def _failure(error: BaseException) -> Message:
    traceback.print_exception(error, file=sys.stderr)
    words = " ".join(str(error).split())
    text = f"{type(error).__name__}: {words}"
    if is_out_of_memory(error):
        return {"status": "out of memory", "error": text}
    own = is_about_settings(error)
    return {
        "status": "failed",
        "error": words if own else text,
        "is_usage": own,
        "is_precision": isinstance(error, PrecisionError),
    }
