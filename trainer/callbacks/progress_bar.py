"""The progress bar: live on a terminal and in a notebook, plain lines elsewhere."""

import logging
import math
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any, ClassVar, TextIO

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar
from lightning.pytorch.callbacks.progress.progress_bar import get_standard_metrics
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from rich import get_console
from rich.console import Console, ConsoleOptions, RenderResult
from rich.jupyter import JupyterMixin
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.segment import Segment
from rich.text import Text
from torch import Tensor

from trainer.common.run_callback import RunCallback
from trainer.record.measures import training_loss

# Maximum share of the time for drawing: a slow terminal (such as a busy ssh connection) is written to less often than
# `refresh_rate`.
_MAX_SHARE = 0.02
# Span of the moving average behind the rate, in seconds.
_RATE_WINDOW = 5.0


class ProgressBar(RunCallback, LightningProgressBar):
    """Shows epoch, batch, rate, loss, the metrics logged with ``prog_bar=True``, loss scale and skipped steps.

    On a terminal this is a live bar, with a second one during validation; ``print``, warnings and log records appear
    above it. In a notebook the same bar is in the output of the cell, with all other output below it; ipywidgets is not
    required. Elsewhere (a file, a pipe, ``TERM=dumb``) it prints plain lines: one at the end of every epoch, and one
    every `seconds_between_lines` during a long epoch. Only rank zero shows anything.

    A batch without a refresh costs one reading of the clock. Metrics are only read when a refresh is due, because on a
    GPU each reading is a host-device synchronization; the scale comes from ``trainer.settled_outcome``, which is on the
    host already. There is no background thread.

    Without a metric with "loss" in its name, the loss that ``training_step`` returned is shown. Override
    ``get_metrics`` to show other values.

    Args:
        refresh_rate: seconds between two refreshes of the live bar; drawing takes about half a millisecond. 0 disables
            the progress bar, including lines. Default: 0.2.
        seconds_between_lines: seconds between two plain lines within an epoch. Default: 30.
        leave: keep a line for every finished epoch above the live bar. Default: False.
        console: the console to draw on. Default: rich's global console, which writes to ``sys.stdout``.

    Raises:
        ValueError: if `refresh_rate` is negative or `seconds_between_lines` is not positive.
    """

    reads_epoch_metrics: ClassVar = True
    # A live display and a console hold locks and streams, which cannot be pickled or deep-copied.
    reset_in_copies: ClassVar = {
        "_trainer": None,
        "_live": None,
        "_console": None,
        "_redirected": [],
        "_running": False,
        "_due": math.inf,
    }

    def __init__(
        self,
        refresh_rate: float = 0.2,
        seconds_between_lines: float = 30.0,
        leave: bool = False,
        console: Console | None = None,
    ) -> None:
        super().__init__()
        if refresh_rate < 0:
            raise ValueError(f"refresh_rate={refresh_rate}: expected seconds between refreshes, or 0 to disable.")
        if seconds_between_lines <= 0:
            raise ValueError(f"seconds_between_lines={seconds_between_lines}: expected a positive number of seconds.")
        self._refresh_rate = refresh_rate
        self._seconds_between_lines = seconds_between_lines
        self._leave = leave
        self._console = console
        self._enabled = True
        self._running = False
        self._live: Live | _NotebookDisplay | None = None  # None: plain lines, or nothing runs
        self._redirected: list[tuple[logging.StreamHandler[Any], TextIO]] = []
        self._due = math.inf  # time of the next refresh; infinite while nothing is shown
        self._train = _Row("", math.inf, 0.0)
        self._evaluation: _Row | None = None
        self._loss: Tensor | None = None
        self._display = _Display()

    # Lightning's interface of a progress bar

    @property
    def refresh_rate(self) -> float:
        """Seconds between two refreshes of the live bar."""
        return self._refresh_rate

    @property
    def is_enabled(self) -> bool:
        """Whether anything is shown; False on every rank except zero."""
        return self._enabled and self._refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        """The opposite of `is_enabled`."""
        return not self.is_enabled

    def enable(self) -> None:
        """Show progress from the next stage on."""
        self._enabled = True

    def disable(self) -> None:
        """Show nothing from now on, and remove a live bar."""
        self._enabled = False
        self._stop()

    def get_metrics(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule"
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return the metrics to show, by name: those logged with ``prog_bar=True``."""
        metrics = super().get_metrics(trainer, pl_module)  # warns about a metric with a reserved name
        for name in get_standard_metrics(trainer):
            if not isinstance(metrics[name], float):  # the logger's version, not a value that the user logged
                del metrics[name]
        return metrics

    # Training

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Start the display with the row of an epoch, because no epoch start follows if a fit resumes within one."""
        self._start()
        self._begin_epoch(trainer)
        self._draw()

    def on_train_epoch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Begin an epoch."""
        self._begin_epoch(trainer)

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, and refresh if it is due."""
        row = self._train
        row.completed = batch_idx + 1
        row.seen += 1
        due = time.monotonic() >= self._due
        if due or row.completed == row.total:  # the line of the epoch shows the last loss
            self._loss = training_loss(trainer, outputs, keep=True)
        if due:
            self._refresh(trainer, pl_module)

    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Print the line of the epoch, if lines are shown."""
        if not self._running:
            return
        if self._live is None or self._leave:
            self._read(trainer, pl_module)
            self._print_line(self._train, self._display.items)
        elif time.monotonic() >= self._due:
            self._refresh(trainer, pl_module)

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Draw the final state and stop."""
        if self._live is not None:
            self._read(trainer, pl_module)
        self._stop()

    # Validation, test and prediction

    def on_validation_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Start the display, or pause the rate of training."""
        self._train.mark(time.monotonic())
        self._start()

    def on_sanity_check_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Start the display."""
        self._start()

    on_test_start = on_sanity_check_start
    on_predict_start = on_sanity_check_start

    def on_validation_batch_end(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count the batch, and refresh if it is due."""
        if self.has_dataloader_changed(dataloader_idx):
            stage = trainer.state.stage
            assert stage is not None
            name = "validation" if stage is RunningStage.VALIDATING else stage.value
            label = getattr(self, f"{name}_description").lower() + (f" {dataloader_idx}" if dataloader_idx else "")
            total = getattr(self, f"total_{stage.dataloader_prefix}_batches_current_dataloader")
            self._evaluation = _Row(label, total, time.monotonic())
            self._display.rows = [row for row in (self._train, self._evaluation) if row.label]
        row = self._evaluation
        if row is None:
            return
        row.completed = batch_idx + 1
        row.seen += 1
        now = time.monotonic()
        if row.seen == 1:
            row.resume(now)  # the first batch waited for the dataloader's workers
        if now >= self._due:
            row.mark(now)
            if self._live is not None:
                self._draw()
            elif row.completed < row.total:
                self._print_line(row, [])

    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Return to training, or draw the final state and stop."""
        row, self._evaluation = self._evaluation, None
        self.reset_dataloader_idx_tracker()
        if trainer.state.fn != TrainerFn.FITTING:
            if self._running and row is not None:
                row.mark(time.monotonic())
                self._read(trainer, pl_module)
                if self._live is None:
                    self._print_line(row, self._display.items)
            self._stop()
            return
        self._display.rows = [self._train] if self._train.label else []
        self._train.resume(time.monotonic())

    on_test_end = on_validation_end
    on_predict_end = on_validation_end

    def _clean_up(self, trainer: "pl.Trainer") -> None:
        self._stop()  # reads no metrics, because the device may be the cause of the failure

    # The display

    def _start(self) -> None:
        if self._running or not self.is_enabled:
            return
        self._running = True
        self._train = _Row("", math.inf, time.monotonic())
        self._evaluation = None
        self._loss = None
        self._display = _Display()
        self.reset_dataloader_idx_tracker()
        console = self._console or get_console()
        if console.is_jupyter:
            self._live = _NotebookDisplay(self._display)
            self._live.start()
            self._due = time.monotonic()
            return
        # Under FORCE_COLOR rich treats a log file as a terminal, and a bar would fill it.
        terminal = console.is_terminal and (self._console is not None or console.file.isatty())
        if not terminal or console.is_dumb_terminal:
            self._due = time.monotonic() + self._seconds_between_lines
            return
        # A redirected stderr (`2> errors.txt`) is left alone: it is not printed above the bar.
        redirect_stderr = sys.stderr is not None and sys.stderr.isatty()
        self._live = Live(self._display, console=console, auto_refresh=False, redirect_stderr=redirect_stderr)
        self._live.start()
        self._redirected = _redirect_logging()
        self._due = time.monotonic()

    def _stop(self) -> None:
        self._running = False
        self._due = math.inf
        self._loss = None
        for handler, stream in self._redirected:
            handler.setStream(stream)
        self._redirected = []
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()  # draws once more

    def _refresh(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._train.mark(time.monotonic())
        if self._live is not None:
            self._read(trainer, pl_module)
            self._draw()
        elif self._train.completed < self._train.total:  # otherwise the line of the epoch follows
            self._read(trainer, pl_module)
            self._print_line(self._train, self._display.items)

    def _draw(self) -> None:
        if self._live is not None:
            began = time.monotonic()
            self._live.refresh()
            ended = time.monotonic()
            self._due = ended + max(self._refresh_rate, (ended - began) / _MAX_SHARE)

    def _print_line(self, row: "_Row", items: list[tuple[str, str]]) -> None:
        now = time.monotonic()
        row.mark(now)
        words = [row.label, f"batch {row.count}", *(f"{name} {value}" for name, value in items), row.speed]
        line = "  ".join(filter(None, words))
        # Not wrapped: each line of a log is one line.
        console = self._console or get_console()
        console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)
        if self._live is None:
            self._due = now + self._seconds_between_lines

    def _read(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Update the shown metrics; reading each one on a GPU is a host-device synchronization."""
        metrics = self.get_metrics(trainer, pl_module)
        if self._loss is not None and not any("loss" in name.lower() for name in metrics):
            metrics = {"loss": self._loss.item(), **metrics}
        items = [(name, _format(value)) for name, value in metrics.items()]
        scaler = trainer.scaler
        outcome = getattr(trainer, "settled_outcome", None)  # `lightning.Trainer` does not have it
        if scales := scaler is not None and scaler.is_enabled() and outcome is not None:
            items.append(("scale", f"{outcome.next_scale:.10g}"))
        if scales or getattr(scaler, "skips_steps", False):
            items.append(("skipped", str(trainer.progress.skipped_steps)))  # type: ignore[attr-defined]  # without waiting
        self._display.items = items

    def _begin_epoch(self, trainer: "pl.Trainer") -> None:
        epoch, max_epochs = trainer.current_epoch + 1, trainer.max_epochs
        label = f"epoch {epoch}"
        if max_epochs is not None and max_epochs > 0:
            label = f"epoch {epoch:>{len(str(max_epochs))}}/{max_epochs}"
        rate = self._train.rate  # shown until there is a new one
        self._train = _Row(label, self.total_train_batches, time.monotonic(), rate)
        self._display.rows = [self._train]


@dataclass(eq=False, slots=True)
class _Row:
    """The progress of one pass over a dataloader.

    Attributes:
        label: such as ``epoch 3/10``; empty if there is nothing to show.
        total: number of batches in the pass; infinite if unknown.
        completed: number of batches that are done, including those before a resume.
        seen: number of batches that were done in this process, for the rate.
        rate: batches per second, a moving average over some seconds, or None before the first measurement.
    """

    label: str
    total: float
    _marked_at: float
    rate: float | None = None
    completed: int = 0
    seen: int = 0
    _marked_seen: int = 0
    _measured: float = 0.0

    def mark(self, now: float) -> None:
        """Add the batches since the last mark to the rate."""
        seconds, batches = now - self._marked_at, self.seen - self._marked_seen
        if seconds <= 0 or batches == 0:
            return
        self._measured += seconds
        share = min(1.0, seconds / min(self._measured, _RATE_WINDOW))  # the plain mean at first
        self.rate = (1 - share) * (self.rate or 0.0) + share * batches / seconds
        self.resume(now)

    def resume(self, now: float) -> None:
        """Exclude the time since the last mark from the rate."""
        self._marked_at = now
        self._marked_seen = self.seen

    @property
    def count(self) -> str:
        if not math.isfinite(self.total):
            return str(self.completed)
        return f"{self.completed:>{len(str(int(self.total)))}}/{int(self.total)}"

    @property
    def speed(self) -> str:
        return "" if self.rate is None else f"{self.rate:.1f} it/s"

    @property
    def eta(self) -> str:
        if not self.rate or self.completed >= self.total or not math.isfinite(self.total):
            return ""
        return f"eta {timedelta(seconds=round((self.total - self.completed) / self.rate))}"


class _Display(JupyterMixin):
    """The live display: a bar for each row, and the metrics below.

    Drawn directly instead of with `rich.progress.Progress`, because its table layout takes four times as long.
    """

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        self.items: list[tuple[str, str]] = []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        indent = max(10, *(len(row.label) for row in self.rows)) + 2 if self.rows else 0
        for row in self.rows:
            left = Text(f"{row.label:<{indent}}", style="bold", end="")
            right = Text(no_wrap=True, overflow="ellipsis")
            right.append(f"  {row.count}", style="progress.download")
            right.append(f"  {row.speed:>10}")
            right.append(f"  {row.eta:<11}", style="progress.remaining")
            width = options.max_width - left.cell_len - right.cell_len
            yield left
            if width >= 4:
                known = math.isfinite(row.total)
                bar = Bar(row.total if known else None, row.completed, pulse=not known)
                # Padded to its width: without colors, rich draws the completed part only.
                segments = list(console.render(bar, options.update_width(width)))
                yield from Segment.adjust_line_length(segments, width)
            yield right
        if self.items:
            text = Text(" " * indent, no_wrap=True, overflow="ellipsis")
            for name, value in self.items:
                skips = name == "skipped" and value != "0"
                text.append(f"{name} ", style="dim").append(f"{value}  ", style="bold yellow" if skips else "")
            is_too_long = text.cell_len - 2 > options.max_width  # it ends with two spaces
            yield text[indent:] if is_too_long else text  # keep the end: the last item counts skipped steps


class _NotebookDisplay:
    """The counterpart of rich's `Live` for the output of a notebook's cell.

    In a notebook, `Live` requires ipywidgets, and the state of widgets is not saved in the file. IPython can replace an
    output without them.

    Args:
        display: the display to show.
    """

    def __init__(self, display: _Display) -> None:
        self._display = display
        self._handle: Any = None

    def start(self) -> None:
        """Show the display for the first time."""
        show = import_module("IPython.display").display  # a notebook has it
        self._handle = show(self._display, display_id=True)

    def refresh(self) -> None:
        """Show the current state of the display instead of the earlier one."""
        self._handle.update(self._display)

    stop = refresh


def _format(value: object) -> str:
    if isinstance(value, Tensor):
        value = value.item()  # host-device synchronization on a GPU
    return f"{value:#.4g}" if isinstance(value, float) else str(value)


def _redirect_logging() -> list[tuple[logging.StreamHandler[Any], TextIO]]:
    """Redirect log handlers to rich's streams, so that log records appear above the bar.

    The handlers hold the original streams, which rich has replaced in ``sys``.

    Returns:
        The handlers that were changed, with their previous streams.
    """
    proxies = {id(getattr(proxy, "rich_proxied_file", None)): proxy for proxy in (sys.stdout, sys.stderr)}
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {handler for logger in loggers for handler in getattr(logger, "handlers", ())}
    redirected = []
    for handler in handlers:
        if isinstance(handler, logging.StreamHandler) and id(handler.stream) in proxies:
            redirected.append((handler, handler.stream))
            handler.setStream(proxies[id(handler.stream)])
    return redirected
