"""The table at the end of a fit, and the same as ``summary.json``."""

import json
import logging
import os
import shlex
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from rich import box, get_console
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer import machine
from trainer.callbacks.curves import Curves, folder_of_files, folders_of_loggers
from trainer.data.samples import batch_size
from trainer.record.environment import ENVIRONMENT, write_environment

log = logging.getLogger(__name__)


class RunSummary(Callback):
    """Prints one table when a fit has ended, in whatever way, and writes the same as ``summary.json``.

    When a fit begins it writes ``environment.json`` beside it (`trainer.record.environment`), if there is none yet.

    Per batch it costs one addition. Only rank zero prints and writes. Put it behind `Curves` among the
    callbacks, so that it can say where the picture is.

    Args:
        dirpath: Folder of ``summary.json``. Default: that of the first logger.
        console: Where to print. Default: rich's global console, which writes to ``sys.stdout``.
        writes: Whether there is to be a ``summary.json``. A Trainer that logs nothing makes its own without.

    Attributes:
        summary: What was printed, as plain Python values; empty before the end of the first fit. A value
            that is not known is None. The keys:

            - ``status``: "finished", "interrupted" (Ctrl-C, or a signal to stop) or "failed".
            - ``error``: The exception that ended the fit, or None.
            - ``precision``, ``devices``: Such as "16-mixed" and "2 x NVIDIA A100".
            - ``epochs``: Completed epochs, those before a resume included.
            - ``steps``, ``skipped_steps``: Optimizer steps attempted, and how many of these were skipped.
            - ``seconds``: Wall time of training in this fit, validation included.
            - ``train_seconds``: The same without validation.
            - ``samples``: Training samples of this fit, over all ranks. Counted as batches times the first
              batch's size, with the last batch of an epoch as it is: exact for the usual dataloader, an
              estimate if batches differ in size.
            - ``samples_per_second``: ``samples / train_seconds``.
            - ``peak_memory_bytes``: On CUDA the most that tensors occupied on rank zero's device during
              this fit; elsewhere the most physical memory that the process has ever held.
            - ``metrics``: The last value of everything in ``trainer.callback_metrics``, as floats.
            - ``scale``: The loss scale at the end; None without loss scaling.
            - ``paths``: ``run``, ``summary``, and as far as they exist ``best_checkpoint``,
              ``last_checkpoint``, ``curves`` and ``loggers`` (a list). All absolute.
    """

    def __init__(
        self, dirpath: str | os.PathLike[str] | None = None, console: Console | None = None, writes: bool = True
    ) -> None:
        self.summary: dict[str, Any] = {}
        self._writes = writes
        self._dirpath = dirpath
        self._console = console
        self._clock = time.perf_counter
        self._fitting = False
        self._began: float | None = None  # when training began
        self._ended: float | None = None
        self._resumed: float | None = None  # when training last went on; None while validating
        self._train_seconds = 0.0
        self._samples = 0
        self._batches = 0  # of this epoch
        self._num_batches: float = 0
        self._first_size: int | None = None  # samples in this epoch's first batch; 0 when that cannot be told
        self._last_size = 0

    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Starts afresh."""
        self._fitting = True
        self._began = self._ended = self._resumed = None
        self._train_seconds = 0.0
        self._samples = 0
        self._begin_epoch(trainer)
        if self._writes and trainer.is_global_zero:
            self._tell_environment(trainer)
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Starts the clocks, also in the middle of an epoch, where no epoch start will follow."""
        self._begin_epoch(trainer)
        self._began = self._resumed = self._now(trainer)

    def on_train_epoch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Begins to count an epoch."""
        self._begin_epoch(trainer)

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the batch."""
        self._batches += 1
        if self._first_size is None:
            self._first_size = self._last_size = batch_size(batch)
        elif batch_idx + 1 == self._num_batches:
            self._last_size = batch_size(batch)

    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Adds the epoch to the samples."""
        self._end_epoch()

    def on_validation_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Stops the training clock."""
        if self._resumed is not None:
            self._train_seconds += self._now(trainer) - self._resumed
            self._resumed = None

    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Lets the training clock go on."""
        if self._began is not None:
            self._resumed = self._now(trainer)

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Stops both clocks, before other callbacks draw and write."""
        self._stop_clocks(self._now(trainer))

    def on_fit_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Summarises a fit that went through."""
        self._fitting = False
        if trainer.is_global_zero:
            self._summarise(trainer, "finished", None)

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Summarises a fit that was cut short."""
        if not self._fitting:
            return
        self._fitting = False
        self._stop_clocks(self._clock())  # without waiting for a device that may be what failed
        if trainer.is_global_zero:
            stopped = isinstance(exception, KeyboardInterrupt | SystemExit)
            error = f"{type(exception).__name__}: {exception}".rstrip(": ")
            try:
                self._summarise(trainer, "interrupted" if stopped else "failed", error)
            except Exception:  # what the user has to see is the exception that ended the fit
                log.warning("The run's summary could not be written.", exc_info=True)

    def _folder(self, trainer: "pl.Trainer") -> Path | None:
        return folder_of_files(trainer, self._dirpath)

    def _tell_environment(self, trainer: "pl.Trainer") -> None:
        folder = self._folder(trainer)
        # the command line has written it before it built anything
        if folder is None or (folder / ENVIRONMENT).exists():
            return
        with suppress(OSError):  # no reason to fail a fit, whose end will tell
            write_environment(folder)

    def _now(self, trainer: "pl.Trainer") -> float:
        device = trainer.strategy.root_device
        if device.type == "cuda":
            # Host-device synchronisation: the host is ahead of the device. Twice per validation.
            torch.cuda.synchronize(device)
        return self._clock()

    def _stop_clocks(self, now: float) -> None:
        if self._resumed is not None:
            self._train_seconds += now - self._resumed
        if self._ended is None:
            self._ended = now
        self._resumed = None
        self._end_epoch()

    def _begin_epoch(self, trainer: "pl.Trainer") -> None:
        self._batches = 0
        self._num_batches = trainer.num_training_batches
        self._first_size = None
        self._last_size = 0

    def _end_epoch(self) -> None:
        if self._batches and self._first_size:
            self._samples += self._first_size * (self._batches - 1) + self._last_size
        self._batches = 0

    def _summarise(self, trainer: "pl.Trainer", status: str, error: str | None) -> None:
        folder = self._folder(trainer)
        path = folder / "summary.json" if self._writes and folder is not None else None
        scaler = trainer.scaler  # None under `lightning.Trainer` without loss scaling
        samples = self._samples * trainer.world_size
        seconds = self._ended - self._began if self._began is not None and self._ended is not None else 0.0
        self.summary = {
            "status": status,
            "error": error,
            "precision": str(trainer.precision),
            "devices": devices_of(trainer),
            "epochs": trainer.current_epoch,
            "steps": trainer.global_step,
            "skipped_steps": getattr(trainer, "skipped_steps", None),
            "seconds": seconds,
            "train_seconds": self._train_seconds,
            "samples": samples or None,
            "samples_per_second": samples / self._train_seconds if samples and self._train_seconds else None,
            "peak_memory_bytes": _peak_memory(trainer.strategy.root_device),
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "scale": scaler.get_scale() if scaler is not None and scaler.is_enabled() else None,
            "paths": {
                **({"run": str(folder)} if folder is not None else {}),
                **({"summary": str(path)} if path is not None else {}),
                **_paths(trainer),
            },
        }
        console = self._console or get_console()
        if not console.is_terminal:  # where a width of 80 is assumed, and would break every path in two
            console = Console(file=console.file, width=250)
        console.print(_table(self.summary))
        if path is None:
            return
        try:
            _write(path, json.dumps(self.summary, indent=2) + "\n")
        except OSError as problem:  # no reason to fail a fit that went through
            warnings.warn(f"The run's summary could not be written to {path}: {problem}", stacklevel=2)


def devices_of(trainer: "pl.Trainer") -> str:
    """Number and kind of a trainer's devices, such as "2 x NVIDIA A100"."""
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    return f"{trainer.world_size} x {name}"


def _peak_memory(device: torch.device) -> int | None:
    """In bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return machine.peak_memory() or None


def _paths(trainer: "pl.Trainer") -> dict[str, str | list[str]]:
    """Where things were written, as absolute paths."""
    checkpoints = trainer.checkpoint_callback
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # Lightning assigns it from outside
    curves = next((callback.path for callback in callbacks if isinstance(callback, Curves)), None)
    found = {
        "best_checkpoint": getattr(checkpoints, "best_model_path", None),
        "last_checkpoint": getattr(checkpoints, "last_model_path", None),
        "curves": curves,
    }
    paths: dict[str, str | list[str]] = {name: os.path.abspath(path) for name, path in found.items() if path}
    # CSV and TensorBoard loggers share one folder.
    if loggers := list(dict.fromkeys(os.path.abspath(folder) for folder in folders_of_loggers(trainer))):
        paths["loggers"] = loggers
    return paths


def _table(summary: Mapping[str, Any]) -> Table:
    title = f"fit {summary['status']}" + (f": {summary['error']}" if summary["error"] else "")
    table = Table(
        title=Text(title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_header=False,
        pad_edge=False,
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    train_seconds, speed, memory = (summary[k] for k in ("train_seconds", "samples_per_second", "peak_memory_bytes"))
    rows = {
        "precision": summary["precision"],
        "devices": summary["devices"],
        "epochs": summary["epochs"],
        "optimizer steps": f"{summary['steps']:,}",
        "time": f"{_duration(summary['seconds'])} (training {_duration(train_seconds)})",
        "samples/s": None if speed is None else f"{speed:,.1f}",
        "peak memory": None if memory is None else f"{memory / 2**20:,.0f} MiB",
        "scale": None if summary["scale"] is None else f"{summary['scale']:,.10g}",
        "skipped steps": summary["skipped_steps"],
    }
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, str(value))
    table.add_section()
    metrics = summary["metrics"]
    for name, value in metrics.items():
        # Of a metric logged per step and per epoch there are three, of which one says it all.
        if name.removesuffix("_step").removesuffix("_epoch") in metrics.keys() - {name}:
            continue
        table.add_row(Text(name), f"{value:.4g}")
    table.add_section()
    labels = {"run": "run folder", "loggers": "logger"}
    for name, value in summary["paths"].items():
        for path in value if isinstance(value, list) else [value]:
            table.add_row(labels.get(name, name.replace("_", " ")), Text(_short(path)))
    if "summary" in summary["paths"]:
        table.add_row(
            "report", Text(shlex.join(["python", "-m", "trainer", "report", _short(summary["paths"]["run"])]))
        )
    return table


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def _short(path: str) -> str:
    """As seen from the working directory, where it lies in there: shorter, and still good to paste."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def _write(path: Path, text: str) -> None:
    """Writes a file so that a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")  # same folder: a rename across disks is a copy
    temporary.write_text(text)
    temporary.replace(path)
