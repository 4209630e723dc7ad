"""What happens in the processes of ``tune``: a few real training steps, and what they have shown.

Each try has a process of its own (`trainer.cli.tune.apart`), on every kind of device. On a GPU that is the only way in
which nothing of a try that ran out of memory is left to the next (fragments, handles of libraries, a broken context);
on a CPU it is the only way to say how much memory one took, for a process rarely gives any back.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
import traceback
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    Checkpoint,
    EarlyStopping,
    LearningRateFinder,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    Timer,
)
from torch.utils.data import DataLoader

from trainer import machine
from trainer.callbacks import (
    Curves,
    HalveOnOutOfMemory,
    NonFiniteGuard,
    OverflowReport,
    RunSummary,
    ScaleMonitor,
    Throughput,
)
from trainer.cli.run import assemble
from trainer.cli.tune import RangeTest, Try
from trainer.cli.tune.apart import Tell
from trainer.cli.tune.lr_range import LearningRateSweep
from trainer.errors import ConfigurationError, PrecisionError, is_out_of_memory
from trainer.record.measures import batch_size
from trainer.record.recorder import RunRecorder

# Of the user's callbacks those stay that change what a step takes: activation checkpointing, averages of the weights,
# whatever is the user's own. These save, log, stop, or do something else than to fail when memory runs out.
_NOT_OURS_TO_RUN: tuple[type, ...] = (
    BatchSizeFinder,
    Checkpoint,
    Curves,
    EarlyStopping,
    HalveOnOutOfMemory,
    LearningRateFinder,
    LearningRateMonitor,
    ModelSummary,
    NonFiniteGuard,
    OverflowReport,
    ProgressBar,
    RunRecorder,
    RunSummary,
    ScaleMonitor,
    Throughput,
    Timer,
)
_MOST_SKIPPED = 30  # steps that may overflow before a scale is found; 16 halvings lead from the first scale to 1
_LOOK_EVERY = 0.02  # seconds


def try_batch_size(job: Try, tell: Tell) -> None:
    """Train for a few steps, and tell what they took: for `trainer.cli.tune.apart.run_apart`.

    The message has a ``status``: ``ok``, ``out of memory`` or ``failed``. ``ok`` comes with ``device``, ``memory``
    (bytes at the peak: of the process on a CPU, of tensors on a GPU), ``samples_per_second`` (without the waiting for
    batches), ``batch`` (samples in a batch, as it was), ``samples`` (in the training set, if that is known) and
    ``skipped`` (updates that overflowed); the others with ``error``.
    """
    meter = Meter(job.steps)
    device = torch.device("cpu")
    try:
        module, data, trainer = assemble(job.settings, job.folder)
        use_only(trainer, meter)
        device = trainer.strategy.root_device
        _limit(device, None if job.only_on_cpu and device.type != "cpu" else job.memory, tell)
        trainer.fit(module, datamodule=data)
    except (Exception, SystemExit) as error:
        tell(_failure(error))
        return
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else machine.peak_memory()
    if device.type == "cpu" and job.memory is not None and memory > job.memory:
        tell(_over(memory))
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    tell({"status": "ok", "device": name, "precision": trainer.precision, "memory": memory, **meter.found()})


def run_range_test(job: RangeTest, tell: Tell) -> None:
    """Train with ever larger learning rates: for `trainer.cli.tune.apart.run_apart`.

    Tells as `try_batch_size` does; ``ok`` comes with what `trainer.cli.tune.lr_range.LearningRateSweep.found` has.
    """
    sweep = LearningRateSweep(job.min_lr, job.max_lr, job.steps)
    try:
        module, data, trainer = assemble(job.settings, job.folder)
        use_only(trainer, sweep)
        trainer.fit(module, datamodule=data)
    except (Exception, SystemExit) as error:
        tell(_failure(error))
        return
    tell({"status": "ok", "precision": trainer.precision, **sweep.found()})


def use_only(trainer: Any, callback: Callback) -> None:
    """Leave ``trainer`` with ``callback`` and those of its own that change what a step takes."""
    trainer.callbacks = [one for one in trainer.callbacks if not isinstance(one, _NOT_OURS_TO_RUN)] + [callback]


class Meter(Callback):
    """Ends a fit after some weight updates, and knows how fast they were.

    It goes on until two updates have not been skipped, for only then has the optimizer its whole state.

    Args:
        steps: weight updates.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._rates: list[float] = []  # samples per second, of each update
        self._samples = self._batch = 0
        self._seconds = self._started = 0.0
        self._seen = self._skipped = 0  # optimizer steps and skipped ones, when the last update ended
        self._updates = self._skips = 0
        self._in_set: int | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Looks how many samples there are."""
        self._in_set = samples_in(trainer.train_dataloader)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts the clock."""
        self._started = self._now(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stops it, and the fit, where that was the last update."""
        self._seconds += self._now(trainer) - self._started
        samples = batch_size(batch)
        self._samples += samples
        self._batch = max(self._batch, samples)
        if trainer.global_step == self._seen:  # within a window
            return
        skipped: int = trainer.skipped_steps  # type: ignore[attr-defined]  # ours has it
        self._updates += 1
        self._skips += skipped > self._skipped
        self._rates.append(self._samples / self._seconds if self._seconds else 0.0)
        self._seen, self._skipped = trainer.global_step, skipped
        self._samples, self._seconds = 0, 0.0
        done = self._updates - self._skips
        trainer.should_stop = (self._updates >= self._steps and done >= 2) or self._skips >= _MOST_SKIPPED

    def found(self) -> dict[str, Any]:
        """What it knows at the end of the fit."""
        timed = self._rates[1:]
        return {
            "samples_per_second": statistics.median(timed) if timed else None,
            "batch": self._batch,
            "samples": self._in_set,
            "skipped": self._skips,
        }

    def _now(self, trainer: pl.Trainer) -> float:
        device = trainer.strategy.root_device
        if device.type in ("cuda", "mps", "xpu"):
            torch.get_device_module(device).synchronize()  # host-device synchronisation: this is a measurement
        return time.perf_counter()


def samples_in(loader: Any) -> int | None:
    """How many samples a dataloader draws in an epoch; None where that is not known, or where there are several."""
    if not isinstance(loader, DataLoader):
        return None
    try:
        return len(loader.sampler)  # type: ignore[arg-type]  # most have a length
    except (TypeError, NotImplementedError):
        return None


def _limit(device: torch.device, memory: int | None, tell: Tell) -> None:
    """Hold the process to ``memory``: torch's allocator does on a GPU, and a thread that looks on a CPU.

    Not ``RLIMIT_AS`` or ``RLIMIT_DATA``: they count addresses, of which libraries for GPUs reserve gigabytes that
    nobody ever uses, they count them differently from system to system, and Windows and macOS have none that hold.
    """
    if memory is None:
        return
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory / total), device)
    elif device.type == "cpu":
        threading.Thread(target=_watch, args=(memory, tell), daemon=True).start()


def _watch(memory: int, tell: Tell) -> None:
    while (peak := machine.peak_memory()) <= memory:
        time.sleep(_LOOK_EVERY)
    tell(_over(peak))
    os._exit(1)  # at once: it goes on growing


def _over(peak: int) -> dict[str, Any]:
    return {"status": "out of memory", "error": "the process grew beyond the budget", "memory": peak}


def _failure(error: BaseException) -> dict[str, Any]:
    traceback.print_exception(error, file=sys.stderr)
    text = f"{type(error).__name__}: {error}"
    if is_out_of_memory(error):
        return {"status": "out of memory", "error": text, "memory": None}
    own = isinstance(error, ConfigurationError) or any(
        kind.__name__ == "MisconfigurationException" for kind in type(error).__mro__
    )
    return {
        "status": "failed",
        "error": str(error) if own else text,
        "is_usage": own,
        "is_precision": isinstance(error, PrecisionError),
    }
