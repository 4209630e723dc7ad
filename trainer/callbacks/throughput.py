"""Samples per second of training after its first batches, and whether two runs were given the same batches."""

import statistics
import time
import zlib
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from trainer.data.samples import batch_size, tensors_in
from trainer.record.measures import data_parallel_size_of


class Throughput(Callback):
    """Measures the rate of training: samples per second, over all ranks.

    An epoch's rate is its samples over its time, from the start of the epoch to the end of its last batch: with the
    waiting for batches, without validations and without checkpoints written at the end of an epoch. The first batches
    of a fit do not count, in which memory is allocated, kernels are chosen and models compiled. The rate of a fit is
    the median of its epochs' rates, so that one epoch in which the machine had other work does no harm.

    Per batch it costs two looks at the clock. It waits for the device a few times an epoch and at each validation,
    never within an epoch's batches (Lightning's ``ThroughputMonitor`` waits at every batch).

    Args:
        warmup_batches: Batches of a fit that do not count; at most half of the first epoch's.

    Attributes:
        rates: Samples per second, of each epoch.
        train_seconds: Time of training in this fit in seconds, warm-up included.
        measured_batches: Batches of this rank that the rates rest on.
        waiting: Share, in [0, 1], of `train_seconds` that the loop spent waiting for batches. On a GPU the loop is
            ahead of the device, which does not notice a short wait; a large share means that data are too slow.
        batches: For each epoch two checksums of its first batch on this rank: of the floating-point tensors in it,
            as float32 (None where the precision has rounded them to 16 bits), and of all others. Runs with equal
            ones had the same random state there and, as far as can be told, the same batches.

    Raises:
        ValueError: If `warmup_batches` is negative.
    """

    def __init__(self, warmup_batches: int = 10) -> None:
        if warmup_batches < 0:
            raise ValueError(f"warmup_batches={warmup_batches}: expected 0 or more.")
        self.rates: list[float] = []
        self.train_seconds = 0.0
        self.measured_batches = 0
        self.batches: list[tuple[int | None, int]] = []
        self._warmup_batches = warmup_batches
        self._clock = time.perf_counter
        self._warmup: float = 0  # batches still to come before measuring starts
        self._resumed: float | None = None  # when the clock was last started; None while it is stopped
        self._left = 0.0  # when the last batch ended, or the clock was started
        self._waited = 0.0  # seconds
        self._seconds = 0.0  # measured in this epoch; likewise:
        self._samples = 0
        self._batches = 0

    @property
    def samples_per_second(self) -> float | None:
        """The median of `rates`; None before the end of the first epoch."""
        return statistics.median(self.rates) if self.rates else None

    @property
    def waiting(self) -> float | None:
        """See the class; None before the first batch."""
        return self._waited / self.train_seconds if self.train_seconds else None

    def run_facts(self) -> dict[str, Any]:
        """What the record of the run says."""
        return {
            "throughput": {
                "samples_per_second": self.samples_per_second,
                "train_seconds": self.train_seconds,
                "measured_batches": self.measured_batches,
                "waiting": self.waiting,
                "batches": self.batches,
            }
        }

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Forgets the rates of an earlier fit."""
        self.rates, self.batches = [], []
        self.train_seconds = self._waited = 0.0
        self.measured_batches = 0
        self._warmup = min(self._warmup_batches, trainer.num_training_batches // 2)
        self._resumed = None
        self._reset_counts()

    def on_train_epoch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Starts the clock: waiting for the first batch is part of an epoch."""
        self._reset_counts()
        self._resume(trainer)

    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Starts the clock again after a validation."""
        if self._resumed is None:
            self._resume(trainer)
        else:
            self._waited += self._clock() - self._left
        if batch_idx == 0:
            self._stop(trainer)
            self.batches.append(checksums(batch))
            self._resume(trainer)

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the batch."""
        self._samples += batch_size(batch)
        self._batches += 1
        if self._batches == self._warmup:
            self._stop(trainer)
            self._reset_counts()
            self._warmup = 0
            self._resume(trainer)
        self._left = self._clock()

    def on_validation_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Stops the clock."""
        if self._resumed is not None:
            self._stop(trainer)

    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Notes the epoch's rate."""
        if self._resumed is not None:
            self._stop(trainer)
        if self._samples and self._seconds > 0:
            self.rates.append(self._samples * data_parallel_size_of(trainer) / self._seconds)
            self.measured_batches += self._batches
        self._warmup = 0  # an epoch too short for it

    def _reset_counts(self) -> None:
        self._seconds = 0.0
        self._samples = self._batches = 0

    def _resume(self, trainer: "pl.Trainer") -> None:
        self._resumed = self._left = self._now(trainer)

    def _stop(self, trainer: "pl.Trainer") -> None:
        assert self._resumed is not None
        seconds = self._now(trainer) - self._resumed
        self._resumed = None
        self._seconds += seconds
        self.train_seconds += seconds

    def _now(self, trainer: "pl.Trainer") -> float:
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # host-device synchronisation: the host is ahead of the device
        return self._clock()


def checksums(batch: object) -> tuple[int | None, int]:
    """Two checksums (CRC-32) of what is in a batch: of its floating-point tensors as float32, and of its other tensors.

    The first is None with tensors of 16 bits, into which a precision may have rounded what a dataloader gave.
    Reads the batch: a host-device synchronisation on a GPU.
    """
    floats: int | None = 0
    others = 0
    for on_device in tensors_in(batch):
        if on_device.layout is not torch.strided:
            continue
        tensor = on_device.detach().cpu()
        if not tensor.is_floating_point():
            others = _checksum(tensor, others)
        elif tensor.element_size() < 4:
            floats = None
        elif floats is not None:
            floats = _checksum(tensor.float(), floats)
    return floats, others


def _checksum(tensor: Tensor, start: int) -> int:
    return zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data, start)
