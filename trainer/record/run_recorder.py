"""Collect the record of a fit, and write it to ``run.json``."""

from __future__ import annotations

import logging
import os
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from trainer.common import redaction
from trainer.data.samples import batch_size
from trainer.errors import memory_at, warn
from trainer.loggers import adapter
from trainer.loop.run_state import state_of
from trainer.precision.devices import synchronized_time
from trainer.record import measures
from trainer.record.measures import training_loss
from trainer.record.provenance import environment
from trainer.record.run_record import RUN, RunRecord

log = logging.getLogger(__name__)

_CURVES = ("losses", "scales", "skipped", "seconds", "memory")
_SECONDS_BETWEEN_WRITES = 10.0
_SECONDS_BETWEEN_READINGS = 1.0  # readings of the memory


@contextmanager
def _warning_if_not_written(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:  # must not fail a successful fit, and must not keep others from writing
        warn(f"The run's record could not be written to {folder}: {problem}")


class RecordView(Callback):
    """Base class of callbacks that show a run's record when a fit has ended.

    If the Trainer has no `RunRecorder`, one that writes no file is added.

    Args:
        dirpath: folder of the files that the callback writes. Default: the folder of ``run.json``, else that of the
            first logger.
        max_points: maximum number of points that the record keeps of each curve. None if the callback needs no curves.
    """

    observes_only: ClassVar = True

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, max_points: int | None = None) -> None:
        self.dirpath = dirpath
        self.max_points = max_points

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Add a recorder if the Trainer has none."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, RunRecorder) for callback in callbacks):
            callbacks.append(RunRecorder(writes=False))

    def draw(self, record: RunRecord, folder: Path) -> dict[str, Path]:
        """Write files of the callback on rank zero. Return their paths by name, for the record."""
        return {}

    def show(self, record: RunRecord) -> None:
        """Show the complete record, on rank zero."""


class Series:
    """A curve that drops every second point when it would get more than ``max_points``.

    Args:
        max_points: maximum number of points.

    Attributes:
        steps: x-values, in optimizer steps, ascending.
        max_points: as given.
        stride: the caller must append only every ``stride``-th point. It doubles when points are dropped.
    """

    def __init__(self, max_points: int) -> None:
        self.steps: list[int] = []
        self.stride = 1
        self.max_points = max_points
        self._floats: list[float] = []  # y-values
        self._tensors: list[Tensor] = []  # the next y-values, 0-dim and on their device

    def append(self, step: int, value: float | Tensor) -> None:
        """Add a point. A 0-dim tensor stays on its device until `read`."""
        if len(self.steps) >= self.max_points:
            del self.steps[1::2], self.read()[1::2]  # a host-device synchronization, once in `max_points / 2` points
            self.stride *= 2
        self.steps.append(step)
        values: list[Any] = self._tensors if isinstance(value, Tensor) else self.read()
        values.append(value)

    def read(self) -> list[float]:
        """Return the y-values. A host-device synchronization if any are on the device."""
        if self._tensors:
            self._floats += torch.stack(self._tensors).float().tolist()
            self._tensors.clear()
        return self._floats

    def truncate(self, step: int) -> None:
        """Drop the points after `step`."""
        keep = bisect_right(self.steps, step)
        del self.steps[keep:], self.read()[keep:]

    def state_dict(self) -> dict[str, Any]:
        """Return the points as lists of numbers."""
        return {"steps": list(self.steps), "values": list(self.read()), "stride": self.stride}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the points by those of a checkpoint."""
        self.steps, self.stride = list(state_dict["steps"]), state_dict["stride"]
        self._floats, self._tensors = list(state_dict["values"]), []


class RunRecorder(Callback):
    """Collect the record of a fit (status, counters, curves, times, memory), and write it to ``run.json``.

    The command line adds this callback to every run. In Python, pass it to the Trainer:
    ``Trainer(callbacks=[RunRecorder(), RunSummary()])``. ``python -m trainer report FOLDER`` reads the file.

    The file is written when the fit starts, at most every 10 seconds at the end of an epoch or a validation, and when
    the fit ends, even if it fails. Then every `RecordView` among the callbacks shows the record. A callback adds its
    own entries with a method ``run_facts`` that returns a dict.

    Curves are collected if a file is written, or a view draws them. A batch's loss is read if it is on the CPU. On a
    GPU it is copied without a synchronization, and the copies are read once per epoch. Each curve has at most
    `max_points` points (beyond that, every second point is dropped). Curves are saved in checkpoints, so that those of
    a resumed run are complete. Times and memory are not saved in checkpoints, because they differ in each run; a run
    that is resumed in the same folder reads them from its ``run.json``.

    Args:
        record: a record that the run has already begun. Default: a new one, ``run.json`` in `dirpath`.
        dirpath: folder of the file. Default: the folder of a view, else that of the first logger.
        writes: whether to write the file. Default: True.
        max_points: maximum number of points per curve; that of a view takes precedence. Default: 1024.
        settings: hyperparameters of the run, for loggers of tracking services such as W&B; requires `record`. The run's
            id in each of them is stored in ``tracking``. Default: None, nothing is logged.

    Attributes:
        record: the record of the run, or None before the first fit.
        losses: training loss of a batch, as ``training_step`` returned it.
        scales: loss scale, at the first step that uses it.
        skipped: number of skipped steps so far, at each skipped step.
        seconds: training time at the end of a batch, without validations, including the time before a resume. Measured
            with the host's clock, which on a GPU is ahead of the device: rates over many steps are correct.
        memory: bytes, at most once per second: on CUDA the memory that torch has reserved, else that of the process.
        metrics: by stage ("train" or "val") and name, one point for each end of the stage.
    """

    observes_only: ClassVar = True
    reads_epoch_metrics: ClassVar = True

    def __init__(
        self,
        record: RunRecord | None = None,
        dirpath: str | os.PathLike[str] | None = None,
        writes: bool = True,
        max_points: int = 1024,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.record: RunRecord | None = None
        self.losses, self.scales, self.skipped = (Series(max_points) for _ in range(3))
        self.seconds, self.memory = Series(max_points), Series(max_points)
        self.metrics: dict[str, dict[str, Series]] = {"train": {}, "val": {}}
        self._given = record
        self._settings = settings
        self._dirpath = dirpath
        self._writes = writes or record is not None
        self._keeps_curves = False
        self._max_points = max_points
        self._views: list[RecordView] = []
        self._is_fitting = self._on_device = False
        self._written = 0.0  # time of the last write, by time.monotonic
        self._outcome: object = None
        self._scale: float | None = None
        self._known: dict[str, Any] = {}  # callback_metrics as last seen, to recognize new ones
        self._clock = time.perf_counter
        self._began: float | None = None  # start of training, by the clock
        self._ended: float | None = None
        self._resumed: float | None = None  # last start of the clock; None during a validation
        self._trained = self._seconds_before = 0.0  # seconds of training until then, and those in earlier fits
        self._next_reading = 0.0
        self._batches = 0
        self._first_size = 0  # number of samples in the first batch; 0 if unknown
        self._samples = 0  # of this rank, in this fit

    # --- a fit begins -----------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Start the record of a fit, and log the settings of any run."""
        if self._given is not None and self._settings is not None and trainer.is_global_zero:
            ids = {logger.key(): logger.log_settings(self._settings) for logger in map(adapter, trainer.loggers)}
            self._given.facts["tracking"] = {name: run for name, run in ids.items() if run is not None}
        if stage != "fit":
            return
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._views = [callback for callback in callbacks if isinstance(callback, RecordView)]
        self._max_points = next((view.max_points for view in self._views if view.max_points), self._max_points)
        for series in self._all_series():
            series.max_points = self._max_points
        self._is_fitting = True
        self._began = self._ended = self._resumed = None
        self._samples = self._first_size = 0
        self.record = self._given or RunRecord.begin(self._folder(trainer) if trainer.is_global_zero else None)
        self._keeps_curves = self._writes or any(view.max_points for view in self._views)
        if trainer.is_global_zero:
            self.record.facts |= {"module": type(pl_module).__name__, "monitor": measures.monitor_of(trainer)}
            self.record.facts["environment"] = self.record.facts.get("environment") or environment()
            if trainer.ckpt_path is not None:  # keep the earlier curves until there are new ones
                kept = ("curves", "weights")
                self.record.facts |= {name: self.record.former[name] for name in kept if name in self.record.former}
            self._write_if_possible()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start to measure the peak of a GPU's memory."""
        device = measures.device_of(trainer)
        self._on_device = device.type != "cpu"
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drop points after the step that this run starts from, and start the clock."""
        assert self.record is not None
        if trainer.global_step and not self.seconds.steps:
            with suppress(LookupError, TypeError):  # no earlier run in this folder, or one without these curves
                for name in ("seconds", "memory"):
                    getattr(self, name).load_state_dict(self.record.former["curves"][name])
        for series in self._all_series():
            series.truncate(trainer.global_step + (series is self.scales))  # the next step's scale is known already
        self._scale = next(reversed(self.scales.read()), None)
        self._known = dict(trainer.callback_metrics)
        self._trained = self._seconds_before = next(reversed(self.seconds.read()), 0.0)
        self._next_reading = 0.0
        self._began = self._resumed = self._now(trainer)

    # --- at each step -----------------------------------------------------------------------------------------

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; record loss, time and memory."""
        batches, size = self._batches, batch_size(batch)
        self._batches = batches + 1
        self._samples += size
        self._first_size = self._first_size or size
        if not self._keeps_curves or batches % self.losses.stride:
            return
        if not batches % self.seconds.stride:  # the stride of the losses, or a multiple if some batches have no loss
            seconds = self._seconds(self._clock())
            self.seconds.append(trainer.global_step, seconds)
            if seconds >= self._next_reading and (memory := measures.memory_in_use(measures.device_of(trainer))):
                self.memory.append(trainer.global_step, memory)
                self._next_reading = seconds + _SECONDS_BETWEEN_READINGS
        loss = training_loss(trainer, outputs, keep=self._on_device)
        if loss is not None:  # `item` would synchronize with a GPU
            self.losses.append(trainer.global_step, loss.item() if loss.is_cpu else loss)

    def on_after_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any, outcome: Any
    ) -> None:
        """Record a change of the scale, and a skipped step."""
        if outcome is self._outcome:  # called once for each of several optimizers
            return
        self._outcome = outcome
        if outcome.skipped:
            self.skipped.append(trainer.global_step, state_of(trainer).progress.skipped_steps)
        if outcome.scale != self._scale:
            self.scales.append(trainer.global_step, outcome.scale)
        if outcome.next_scale != outcome.scale:
            self.scales.append(trainer.global_step + 1, outcome.next_scale)
        self._scale = outcome.next_scale

    # --- at the ends of epochs and validations ----------------------------------------------------------------

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock, and store the metrics that training has logged so far."""
        if self._resumed is not None:
            self._pause(self._now(trainer))
        self._known = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the metrics that the validation has logged, and restart the clock."""
        if self._began is None or not self._is_fitting:
            return
        self._record_metrics(trainer, "val")
        self._write_periodically(trainer)
        self._resumed = self._now(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the metrics that training has logged for the epoch, and read the losses."""
        self._record_metrics(trainer, "train")
        self.losses.read()
        self._write_periodically(trainer)

    # --- the fit ends -----------------------------------------------------------------------------------------

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock before other callbacks draw and write."""
        self._stop(self._now(trainer))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Complete the record of a successful fit. Its status is failed if no weight was ever updated.

        If a second fit of the Trainer has nothing left to do, the record of the first fit is kept.
        """
        self._is_fitting = False
        assert self.record is not None
        former = self.record.former if self._began is None else {}
        if former.get("status") == "completed" and former.get("steps") == trainer.global_step:
            self.record.facts = former
            self._write_if_possible()
        elif trainer.is_global_zero:
            problem = measures.reason_without_updates(trainer)
            self._update(trainer, "failed" if problem else "completed", problem, measures.facts_of(trainer))
            self._complete()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Complete the record of a fit that has failed or was interrupted."""
        if not self._is_fitting:
            return
        self._is_fitting = False
        self._stop(self._clock())  # without a synchronization, because the device may be the cause of the failure
        if trainer.is_global_zero:
            status = "interrupted" if isinstance(exception, KeyboardInterrupt | SystemExit) else "failed"
            error = redaction.text(f"{type(exception).__name__}: {exception}".rstrip(": "))
            try:
                self._update(trainer, status, error, memory_at(exception))
                self._update(trainer, status, error, measures.facts_of(trainer))  # raises if the device has failed
                self._complete()
            except Exception:  # the user must see the exception that ended the fit
                log.warning("The run's record is not complete.", exc_info=True)
                self._write_if_possible()

    def state_dict(self) -> dict[str, Any]:
        """Return the points, as lists of numbers, without times and memory."""
        curves = {name: value for name, value in self._curves().items() if name not in ("seconds", "memory")}
        return {"batches": self._batches, **curves}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the points of a checkpoint."""
        self._batches = state_dict["batches"]
        for name in ("losses", "scales", "skipped"):
            getattr(self, name).load_state_dict(state_dict[name])
        for stage, metrics in state_dict["metrics"].items():
            for name, state in metrics.items():
                self._metric(stage, name).load_state_dict(state)
        for series in (self.seconds, self.memory):  # of a run that was rolled back to the checkpoint
            series.truncate(max(self.losses.steps, default=0))

    # --- helpers ------------------------------------------------------------------------------------------------

    def _update(self, trainer: pl.Trainer, status: str, error: str | None, facts: dict[str, Any]) -> None:
        """Update the record; ``facts`` are those of the Trainer."""
        assert self.record is not None
        known = self.record.facts
        is_pruned = status == "completed" and facts.get("pruned")
        known |= {**facts, "status": "pruned" if is_pruned else status, "error": error}
        if self._scale is not None and known.get("scale") is not None:
            known["scale"] = self._scale  # of the last step: after a collapse, the scaler has the scale from before it
        processes = measures.data_parallel_size_of(trainer)
        if self._first_size:
            known["samples_per_step"] = self._first_size * trainer.accumulate_grad_batches * processes
        if self._began is not None:
            end = self._ended or self._clock()
            training = self._seconds(end) - self._seconds_before
            samples = self._samples * processes
            known |= {"seconds": end - self._began, "train_seconds": training, "samples": samples or None}
            rate = known.get("throughput", {}).get("samples_per_second")  # without warm-up
            known["samples_per_second"] = rate or (samples / training if samples and training else None)
        known |= {"paths": measures.paths_of(trainer), "curves": self._curves()}
        if (home := self.record.home) is not None:
            paths = {"run": str(home), "record": str(home / RUN)} if self._writes else {"run": str(home)}
            known["paths"] = paths | known["paths"]

    def _complete(self) -> None:
        """Let the views draw, write the file, and let the views show the record."""
        assert self.record is not None
        if (home := self.record.home) is not None:
            for view in self._views:
                folder = Path(view.dirpath).absolute() if view.dirpath else home
                with _warning_if_not_written(folder):
                    drawn = view.draw(self.record, folder)
                    self.record.facts["paths"] |= {name: str(path) for name, path in drawn.items()}
            if self._writes:
                with _warning_if_not_written(home):
                    self.record.write()
        for view in self._views:
            view.show(self.record)

    def _write_periodically(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero and time.monotonic() - self._written >= _SECONDS_BETWEEN_WRITES:
            self._update(trainer, "running", None, measures.facts_of(trainer))
            self._write_if_possible()

    def _write_if_possible(self) -> None:
        assert self.record is not None
        if self._writes:
            with suppress(OSError):  # the end of the fit reports the error
                self.record.write()
        self._written = time.monotonic()

    def folder_of_record(self, trainer: pl.Trainer) -> Path | None:
        """Return the folder of ``run.json``, or None if this process writes none. No communication."""
        if self._given is not None:
            return self._given.home
        return self._folder(trainer) if self._writes and trainer.is_global_zero else None

    def _now(self, trainer: pl.Trainer) -> float:
        return synchronized_time(measures.device_of(trainer), self._clock)

    def _folder(self, trainer: pl.Trainer) -> Path | None:
        named = next((view.dirpath for view in self._views if view.dirpath), None)
        return measures.folder_of_files(trainer, self._dirpath or named)

    def _seconds(self, now: float) -> float:
        """Return the seconds of training until ``now``, without validations."""
        return self._trained if self._resumed is None else self._trained + (now - self._resumed)

    def _pause(self, now: float) -> None:
        self._trained, self._resumed = self._seconds(now), None

    def _stop(self, now: float) -> None:
        if self._ended is None:
            self._pause(now)
            self._ended = now

    def _record_metrics(self, trainer: pl.Trainer, stage: str) -> None:
        for name, value in trainer.callback_metrics.items():
            if stage == "train" and name in self.metrics["val"] and name not in self.metrics["train"]:
                continue  # from a validation before the checkpoint
            if self._known.get(name) is not value and not name.endswith("_step"):
                # Host-device synchronization on a GPU, at the end of an epoch or a validation.
                self._metric(stage, name).append(trainer.global_step, float(value))
        self._known = dict(trainer.callback_metrics)

    def _metric(self, stage: str, name: str) -> Series:
        return self.metrics[stage].setdefault(name, Series(self._max_points))

    def _all_series(self) -> Iterable[Series]:
        yield from (getattr(self, name) for name in _CURVES)
        for metrics in self.metrics.values():
            yield from metrics.values()

    def _curves(self) -> dict[str, Any]:
        """Return the points, as lists of numbers."""
        return {
            **{name: getattr(self, name).state_dict() for name in _CURVES},
            "metrics": {
                stage: {name: series.state_dict() for name, series in metrics.items()}
                for stage, metrics in self.metrics.items()
            },
        }
