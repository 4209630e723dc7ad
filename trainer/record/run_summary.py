"""Print a table at the end of a fit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from trainer.common import terminal
from trainer.common.files import from_here
from trainer.common.terminal import Table, format_seconds
from trainer.errors import counted
from trainer.record.run_record import RunRecord, without_step_epoch_variants
from trainer.record.run_recorder import RecordView

_RECORDED = ("amp/scale", "amp/skipped_steps", "amp/nonfinite_losses")
"""Logged values that the table leaves out, because the record has the same counters, as of the last step."""


class RunSummary(RecordView):
    """Print one table of the run's record when a fit has ended, also if it failed.

    The command line adds it by default (``conf/callbacks/default.yaml``). In Python, pass it to the Trainer; together
    with `RunRecorder` the record is also written to ``run.json``. Only rank zero prints.

    Args:
        console: console to print to. Default: rich's global console, which writes to ``sys.stdout``.

    Attributes:
        summary: the contents of ``run.json`` without curves and environment; empty before the end of the first fit.
            Unknown values are None. The keys, to which callbacks add others (``run_facts``):

            - ``status``: "completed", "pruned", "interrupted" (Ctrl-C, or a signal) or "failed". A fit that skipped all
              steps has the status "failed".
            - ``error``: the exception that ended the fit, the reason why no weight was updated, or None.
            - ``module``: the class of the module.
            - ``precision``, ``devices``: such as "16-mixed" and "2 x NVIDIA A100".
            - ``sharding``: number of processes, and when gradients are reduced. Missing if nothing is sharded.
            - ``gpu``: on CUDA, ``capability`` and ``tf32``, the operations that use TF32. Otherwise None.
            - ``prefetching``: "1 batch, from pinned memory" or "1 batch, from memory that is not pinned: ..." with
              advice. Missing if no batches were prefetched.
            - ``epochs``: number of completed epochs, including those before a resume.
            - ``steps``, ``skipped_steps``: number of attempted and of skipped optimizer steps.
            - ``nonfinite_losses``: number of skipped steps with a loss that was not finite. Missing if there were none.
            - ``scale``: loss scale after the last step. None without loss scaling.
            - ``seconds``: wall time of training in this fit, with validations.
            - ``train_seconds``: the same without validations.
            - ``samples``: number of training samples of this fit over all ranks. An epoch's last batch is counted with
              its own size, each other batch with that of the first.
            - ``samples_per_second``: measured by the callback Throughput, otherwise ``samples / train_seconds``.
            - ``samples_per_step``: samples of an optimizer step over all ranks, by the size of an epoch's first batch.
            - ``peak_memory``: a dict with one entry, in bytes. On CUDA ``gpu``, the peak of tensors on rank zero's
              device in this fit; otherwise ``process``, the peak physical memory of the process.
            - ``compile``: with the callback Compile, ``modules`` and settings, ``compilations``, ``recompilations`` and
              their ``reasons``, ``graph_breaks``, ``seconds``.
            - ``fast_settings``: with the callback FastSettings, the enabled settings.
            - ``metrics``: the last values in ``trainer.callback_metrics``, as floats.
            - ``monitor``: ``metric`` and ``mode`` monitored by checkpoints, otherwise by early stopping, or None.
            - ``best_score``: the monitored metric at the best checkpoint. None if checkpoints monitor no metric.
            - ``paths``: absolute paths: ``run``, ``record``, and if they exist ``best_checkpoint``,
              ``last_checkpoint``, ``curves`` and ``loggers`` (a list).
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self.summary: dict[str, Any] = {}
        self._console = console

    def show(self, record: RunRecord) -> None:
        """Print the table."""
        self.summary = record.brief
        console = terminal.console(self._console, 250)
        console.print(_table(record).drawn())
        for name, path in _paths(record.paths):  # not wrapped, so that a path can be copied
            console.print(Text.assemble((f" {name:<17} ", "dim"), path), soft_wrap=True)


def _table(record: RunRecord) -> Table:
    counters = [(name, str(value)) for name, value in _counters(record).items() if value is not None]
    names = [name for name in without_step_epoch_variants(record.metrics) if name not in _RECORDED]
    metrics = [(name, f"{record.metrics[name]:.4g}") for name in names]
    best = []
    if record.monitor is not None and record.best_score is not None:
        metric, mode = record.monitor
        best = [("best by", f"{metric}, the {'lowest' if mode == 'min' else 'highest'}: {record.best_score:.4g}")]
    title = f"fit {record.status}" + (f": {terminal.shortened(record.error)}" if record.error else "")
    return Table(title, (), [*counters, (), *metrics, (), *best])


def _counters(record: RunRecord) -> dict[str, Any]:
    seconds, training, rate = record.seconds, record.train_seconds, record.samples_per_second
    return {
        "precision": record.precision,
        "devices": record.devices,
        "sharding": record.sharding,
        "prefetching": record.prefetching,
        "epochs": record.epochs,
        "optimizer steps": None if record.steps is None else f"{record.steps:,}",
        "time": None if seconds is None else f"{format_seconds(seconds)} (training {format_seconds(training or 0.0)})",
        "samples/s": None if rate is None else f"{rate:,.1f}",
        "MFU": None if (mfu := record.throughput.get("mfu")) is None else f"{mfu:.1%}",
        "peak memory": None if record.peak_memory is None else terminal.format_mebibytes(record.peak_memory),
        "fast settings": None if record.fast_settings is None else ", ".join(record.fast_settings) or "none",
        "compiled": _compiled(record.compile) if record.compile else None,
        "scale": None if record.scale is None else f"{record.scale:,.10g}",
        "skipped steps": record.skipped_steps,
        "of these, losses not finite": record.nonfinite_losses,
    }


def _compiled(facts: Mapping[str, Any]) -> str:
    number, recompilations = facts["compilations"], facts["recompilations"]
    mode = f" ({facts['mode']})" if facts.get("mode") not in (None, "default") else ""
    reason = f", {recompilations} of them because something had changed" if recompilations else ""
    return f"{', '.join(facts['modules'])}{mode}: {counted(number, 'graph')} in {facts['seconds']:.1f} s{reason}"


def _paths(paths: Mapping[str, str | list[str]]) -> list[tuple[str, str]]:
    labels = {"run": "run folder", "loggers": "logger"}
    rows = [
        (labels.get(name, name.replace("_", " ")), str(from_here(Path(path))))
        for name, value in paths.items()
        for path in (value if isinstance(value, list) else [value])
        if name == "run" or path != paths.get("run")  # not the run's folder again; W&B writes to a folder inside it
    ]
    if "record" in paths:
        run = from_here(Path(str(paths["run"])))
        rows.append(("report", terminal.command_line("report", run)))
    return rows
