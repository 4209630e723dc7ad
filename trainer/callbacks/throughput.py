"""Samples per second of training, evaluation and prediction after their first batches, and checksums of batches."""

import statistics
import time
import zlib
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from trainer.common.module_tree import bytes_of, is_dense
from trainer.data.samples import batch_size, tensors_in
from trainer.precision.devices import synchronized_time
from trainer.record.flops import FlopCounter, is_compiled, peak_flops
from trainer.record.measures import data_parallel_size_of, device_of, tensor_cores_of


class Throughput(Callback):
    """Measure samples per second over all ranks: of training, of validation and test, and of prediction.

    An evaluation, or a prediction, is measured from the end of its first batch, or from its beginning if it has a
    single batch. Loading batches and writing predictions count; the sanity check does not. To measure the speed-up
    of a precision, run ``predict`` or ``test`` once with it and once with ``precision=32``.

    The rate of a training epoch is its number of samples divided by its time, from the start of the epoch to the end of
    its last batch. This includes waiting for batches, but not validations and checkpoints at the end of an epoch. The
    first batches of a fit do not count, because memory is allocated, kernels are chosen and models are compiled in
    them. The rate of a fit is the median of its epochs' rates, so that one epoch on a busy machine does not matter.

    Each batch costs two readings of the clock. Host and device are synchronized a few times per epoch and at each
    validation, never between batches of an epoch (Lightning's ``ThroughputMonitor`` synchronizes at every batch).

    If the peak of the device is known (``trainer.record.flops`` has the table and its sources), the model FLOPs
    utilization (MFU, https://arxiv.org/abs/2204.02311) is also computed: the operations in the forward and backward
    pass of a sample, times the rate, divided by the peak of all devices for dense products in the precision. The
    operations are counted with torch's formulas in the first batch of a fit, which therefore takes longer. They cannot
    be counted in a compiled module; pass them as an argument instead. The number per sample is assumed to be the same
    in all batches.

    Args:
        warmup_batches: number of batches of a fit that do not count; at most half of the first epoch's. Default: 10.
        flops_per_sample: number of operations in the forward and backward pass of a sample. Default: counted.

    Attributes:
        rates: samples per second, of each epoch.
        train_seconds: training time in this fit in seconds, including warm-up.
        measured_batches: number of batches of this rank that the rates are based on.
        waiting: share, in [0, 1], of `train_seconds` that the loop spent waiting for batches. On a GPU the loop is
            ahead of the device, so a short wait does not delay it; a large share means that data loading is the
            bottleneck.
        evaluation_rates: samples per second of the last "validate", "test" and "predict".
        batches: for each epoch two checksums of its first batch on this rank: of the floating-point tensors in it, as
            float32 (None if the precision has rounded them to 16 bits), and of all others. Runs with equal checksums
            had the same random state at these batches and, in all likelihood, the same batches.
        flops_per_sample: as given, or counted; None if it or the device's peak is unknown.
        mfu: share, in [0, 1], of the peak of all devices; None if it is unknown.

    Raises:
        ValueError: if `warmup_batches` is negative, or `flops_per_sample` is not above 0.
    """

    observes_only: ClassVar = True

    def __init__(self, warmup_batches: int = 10, flops_per_sample: float | None = None) -> None:
        if warmup_batches < 0:
            raise ValueError(f"warmup_batches={warmup_batches}: expected 0 or more.")
        if flops_per_sample is not None and flops_per_sample <= 0:
            raise ValueError(f"flops_per_sample={flops_per_sample}: expected a number above 0, or None to count them.")
        self.rates: list[float] = []
        self.evaluation_rates: dict[str, float] = {}
        self.train_seconds = 0.0
        self.measured_batches = 0
        self.batches: list[tuple[int | None, int]] = []
        self.flops_per_sample = flops_per_sample
        self._counts_flops = flops_per_sample is None
        self._counter: FlopCounter | None = None  # during the first batch
        self._peak: float | None = None  # of all devices, in operations per second
        self._warmup_batches = warmup_batches
        self._clock = time.perf_counter
        self._warmup: float = 0  # number of batches before measuring starts
        self._resumed: float | None = None  # last start of the clock; None while it is stopped
        self._left = 0.0  # end of the last batch, or start of the clock
        self._waited = 0.0  # seconds
        self._seconds = 0.0  # measured in this epoch, like the next two
        self._samples = 0
        self._batches = 0
        self._evaluated = _Evaluation()

    @property
    def samples_per_second(self) -> float | None:
        """The median of `rates`; None before the end of the first epoch."""
        return statistics.median(self.rates) if self.rates else None

    @property
    def waiting(self) -> float | None:
        """Share of `train_seconds` spent waiting for batches; None before the first batch."""
        return self._waited / self.train_seconds if self.train_seconds else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization; None before the end of the first epoch."""
        rate = self.samples_per_second
        known = rate is not None and self._peak is not None and self.flops_per_sample is not None
        return self.flops_per_sample * rate / self._peak if known else None  # type: ignore[operator]

    def run_facts(self) -> dict[str, Any]:
        """Return the entries for the record of the run."""
        return {
            "throughput": {
                "samples_per_second": self.samples_per_second,
                "train_seconds": self.train_seconds,
                "measured_batches": self.measured_batches,
                "waiting": self.waiting,
                "batches": self.batches,
                "flops_per_sample": self.flops_per_sample,
                "mfu": self.mfu,
                **self.evaluation_rates,
            }
        }

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Drop the rates of an earlier fit."""
        self.rates, self.batches = [], []
        self.train_seconds = self._waited = 0.0
        self.measured_batches = 0
        self._warmup = min(self._warmup_batches, trainer.num_training_batches // 2)
        self._resumed = None
        self._peak = _peak(trainer, convolves=False)
        if self._counts_flops:
            self.flops_per_sample = None
        self._reset_counts()

    def on_train_epoch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Start the clock: waiting for the first batch is part of an epoch."""
        self._reset_counts()
        self._resume(trainer)

    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Restart the clock after a validation."""
        if self._resumed is None:
            self._resume(trainer)
        else:
            self._waited += self._clock() - self._left
        if batch_idx == 0:
            self._stop(trainer)
            self.batches.append(checksums(batch))
            if self._counts_flops and self.flops_per_sample is None and self._peak and not is_compiled(pl_module):
                self._counter = FlopCounter()
                self._counter.__enter__()  # type: ignore[no-untyped-call]
            self._resume(trainer)

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch."""
        samples, counter = batch_size(batch), self._stop_counting()
        if counter is not None and counter.total and counter.is_whole and samples:
            self.flops_per_sample = counter.total / samples
            self._peak = _peak(trainer, convolves=2 * counter.convolutions > counter.total)
        self._samples += samples
        self._batches += 1
        if self._batches == self._warmup:
            self._stop(trainer)
            self._reset_counts()
            self._warmup = 0
            self._resume(trainer)
        self._left = self._clock()

    def on_validation_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Stop the clock of training, and start that of the evaluation."""
        if self._resumed is not None:
            self._stop(trainer)
        if not trainer.sanity_checking:
            self._evaluated = _Evaluation(self._now(trainer))

    def on_validation_batch_end(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count the batch."""
        if trainer.sanity_checking:
            return
        evaluated = self._evaluated
        evaluated.samples += batch_size(batch)
        evaluated.batches += 1
        if evaluated.batches == 1:
            evaluated.warm = self._now(trainer)
            evaluated.warm_samples = evaluated.samples

    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Store the rate of the evaluation."""
        if trainer.sanity_checking:
            return
        rate = self._evaluated.rate(self._now(trainer))
        if rate is not None:
            fn = trainer.state.fn
            assert fn is not None
            stage = "validate" if fn == "fit" else str(fn.value)
            self.evaluation_rates[stage] = rate * data_parallel_size_of(trainer)

    on_test_start = on_predict_start = on_validation_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_end = on_predict_end = on_validation_end

    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Store the rate of the epoch."""
        self._stop_counting()
        if self._resumed is not None:
            self._stop(trainer)
        if self._samples and self._seconds > 0:
            self.rates.append(self._samples * data_parallel_size_of(trainer) / self._seconds)
            self.measured_batches += self._batches
        self._warmup = 0  # in case the epoch was shorter than the warm-up

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Stop counting operations."""
        self._stop_counting()

    def _stop_counting(self) -> FlopCounter | None:
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return counter

    def _reset_counts(self) -> None:
        self._seconds = 0.0
        self._samples = self._batches = 0

    def _now(self, trainer: "pl.Trainer") -> float:
        return synchronized_time(device_of(trainer), self._clock)

    def _resume(self, trainer: "pl.Trainer") -> None:
        self._resumed = self._left = self._now(trainer)

    def _stop(self, trainer: "pl.Trainer") -> None:
        assert self._resumed is not None
        seconds = self._now(trainer) - self._resumed
        self._resumed = None
        self._seconds += seconds
        self.train_seconds += seconds


@dataclass
class _Evaluation:
    """Samples and batches of an evaluation so far, and the time and the samples at the end of its first batch."""

    started: float = 0.0
    samples: int = 0
    batches: int = 0
    warm: float = 0.0
    warm_samples: int = 0

    def rate(self, end: float) -> float | None:
        """Return samples per second up to ``end``, or None if there is no batch, or no time has passed."""
        if self.batches > 1:
            seconds, samples = end - self.warm, self.samples - self.warm_samples
        else:
            seconds, samples = end - self.started, self.samples
        return samples / seconds if samples and seconds > 0 else None


def _peak(trainer: "pl.Trainer", convolves: bool) -> float | None:
    """Return the peak operations per second of all devices in this precision, or None if it is unknown.

    Args:
        trainer: the Trainer with devices and a precision.
        convolves: whether most operations are convolutions: for these, TensorFloat-32 is a separate setting.
    """
    device = device_of(trainer)
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    uses = tensor_cores_of(device) or {}
    tf32 = ("convolutions" if convolves else "matrix products") in uses.get("tf32", ())
    peak = peak_flops(torch.cuda.get_device_name(device), str(trainer.precision), tf32)
    return None if peak is None else peak * trainer.world_size


def checksums(batch: object) -> tuple[int | None, int]:
    """Return two checksums (CRC-32) of a batch: of its floating-point tensors as float32, and of its other tensors.

    The first is None if the batch has 16-bit tensors, because a precision may have rounded the values of the
    dataloader. Reading the batch is a host-device synchronization on a GPU.
    """
    floats: int | None = 0
    others = 0
    for on_device in tensors_in(batch):
        if not is_dense(on_device):
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
    return zlib.crc32(bytes_of(tensor).data, start)
