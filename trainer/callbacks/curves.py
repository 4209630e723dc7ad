"""A picture of the run: ``curves.png``, and the numbers in it: ``curves.json``."""

import json
import logging
import os
import time
import warnings
from collections.abc import Iterable
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from trainer.callbacks.pace import Pace
from trainer.callbacks.plotting import INK, PALETTE, fit_loss_axis, label_ends, smooth, style, without_spikes
from trainer.callbacks.series import Series

if TYPE_CHECKING:  # takes a second to import, and is needed at the end of a fit only
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

_TRAIN, _VAL, *_OTHERS = PALETTE
_SKIPPED = "#cc3311"
_SECONDS_BETWEEN_WRITES = 10.0


class Curves(Callback):
    """Draws loss, accuracy and loss scale over the optimizer steps into ``curves.png`` when a fit has ended.

    The points go to ``curves.json`` beside it, in the form of `state_dict`: to draw them otherwise, or together with
    those of other runs. It is there while the fit goes on, too, written when an epoch or a validation has ended and the
    last time was 10 seconds ago; with the time and the memory that the training has taken (`Pace`).

    It needs no logger: the points are its own, at most `max_points` of each curve (then every second one is
    dropped), and they are saved in checkpoints, so that the picture of a resumed run is whole. What is drawn:

    - Loss: what ``training_step`` returned, and every metric of the validation with "loss" in its name.
    - Score: every metric of the validation that lies in [0, 1], and those of the training named "acc".
    - Loss scale: on a logarithmic axis, with the skipped steps marked; left out without loss scaling.

    Per batch it reads the loss on the CPU, where that is free, and copies it on a GPU without waiting for it;
    reading is done once an epoch. Only rank zero draws, its own losses.

    Args:
        dirpath: Folder of ``curves.png`` and ``curves.json``. Default: that of the first logger.
        max_points: The most points kept of each curve.

    Attributes:
        path: The picture of the last fit, or None when there is none.
        losses: Training loss of a batch.
        scales: Loss scale: the first step with it, for each change.
        skipped: Loss scale of the skipped steps.
        metrics: By stage ("train" or "val") and name, a point for each time that stage came to an end.
        pace: Time and memory over the steps.

    Raises:
        ValueError: If `max_points` is less than 2.
    """

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, max_points: int = 1024) -> None:
        if max_points < 2:
            raise ValueError(f"max_points={max_points}: a curve needs at least 2.")
        self.path: Path | None = None
        self.losses = Series(max_points)
        self.scales = Series(max_points)
        self.skipped = Series(max_points)
        self.metrics: dict[str, dict[str, Series]] = {"train": {}, "val": {}}
        self.pace = Pace(max_points)
        self._dirpath = dirpath
        self._max_points = max_points
        self._written = 0.0  # when, by time.monotonic
        self._batches = 0
        self._outcome: object = None
        self._scale: float | None = None
        self._known: dict[str, Tensor] = {}  # callback_metrics as last seen, to tell which ones are new
        self._fitting = False

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Forgets points that are not of this run: ahead of the step it starts from."""
        self._fitting = True
        for series in self._all():
            series.truncate(trainer.global_step + (series is self.scales))  # the next step's scale is known already
        scales = self.scales.read()
        self._scale = scales[-1] if scales else None
        self._known = dict(trainer.callback_metrics)
        self._take_up_pace(trainer)
        self.pace.start(trainer)
        self._written = time.monotonic()

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Records the loss."""
        batches = self._batches
        self._batches = batches + 1
        if batches % self.losses.stride:
            return
        if not batches % self.pace.stride:  # the same, or a multiple where some batches have no loss
            self.pace.note(trainer, batch)
        loss = training_loss(trainer, outputs)
        if loss is not None:
            # On a GPU `item` would wait for the device. A copy, because CUDA graphs reuse their outputs.
            self.losses.append(trainer.global_step, loss.item() if loss.is_cpu else loss.detach().clone())

    def on_after_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Any, outcome: Any
    ) -> None:
        """Records a change of the scale, and a skipped step."""
        if outcome is self._outcome:  # told once for each of several optimizers
            return
        self._outcome = outcome
        if outcome.skipped:
            self.skipped.append(trainer.global_step, outcome.scale)
        if outcome.scale != self._scale:
            self.scales.append(trainer.global_step, outcome.scale)
        if outcome.next_scale != outcome.scale:
            self.scales.append(trainer.global_step + 1, outcome.next_scale)
        self._scale = outcome.next_scale

    def on_validation_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Notes what the training has logged up to here."""
        self.pace.pause()
        self._known = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Records what the validation has logged."""
        if self._fitting:
            self._record(trainer, "val")
            self._write_now_and_then(trainer)
            self.pace.go_on()

    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Records what the training has logged for the epoch, and reads the losses."""
        self._record(trainer, "train")
        self.losses.read()
        self._write_now_and_then(trainer)

    def on_fit_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Draws."""
        self._fitting = False
        if trainer.is_global_zero:
            try:
                self._save(trainer, pl_module)
            except OSError as problem:  # no reason to fail a fit that went through
                warnings.warn(f"The curves could not be written: {problem}", stacklevel=2)

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Draws what there is."""
        if self._fitting and trainer.is_global_zero:
            try:
                self._save(trainer, pl_module)
            except Exception:  # what the user has to see is the exception that ended the fit
                log.warning("The run's curves could not be drawn.", exc_info=True)
        self._fitting = False

    def state_dict(self) -> dict[str, Any]:
        """The points, as lists of numbers."""
        return {
            "losses": self.losses.state_dict(),
            "scales": self.scales.state_dict(),
            "skipped": self.skipped.state_dict(),
            "batches": self._batches,
            "metrics": {
                stage: {name: series.state_dict() for name, series in metrics.items()}
                for stage, metrics in self.metrics.items()
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up the points of a checkpoint."""
        self.losses.load_state_dict(state_dict["losses"])
        self.scales.load_state_dict(state_dict["scales"])
        self.skipped.load_state_dict(state_dict["skipped"])
        self._batches = state_dict.get("batches", 0)
        for stage, metrics in state_dict["metrics"].items():
            for name, state in metrics.items():
                self._metric(stage, name).load_state_dict(state)

    def draw(self, title: str = "") -> "Figure | None":
        """Draws the recorded points.

        Args:
            title: Headline of the figure.

        Returns:
            The figure, bound to no window and unknown to ``pyplot``, or None without any points.
        """
        scores = [name for _, name, _ in self._scores()]
        accuracies = all("acc" in name.lower() for name in scores)
        panels = [
            ("Loss", self._draw_loss, bool(self.losses or [*self._named("val", "loss")])),
            ("Accuracy" if accuracies else "Score", self._draw_scores, bool(scores)),
            ("Loss scale", self._draw_scale, any(scale != 1 for scale in self.scales.read())),
        ]
        panels = [panel for panel in panels if panel[-1]]
        if not panels:
            return None
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 0.8 + 2.3 * len(panels)), dpi=150, facecolor="white", layout="constrained")
        if title:
            figure.suptitle(title, x=0.01, ha="left", size=12, weight="bold", color=INK)
        column = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
        for axes, (name, draw_panel, _) in zip(column, panels, strict=True):
            style(axes, name)
            draw_panel(axes)
        column[-1].set_xlabel("optimizer step", color=INK)
        return figure

    def _save(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self.path = None
        figure = self.draw(f"{type(pl_module).__name__}, {trainer.precision}")
        if figure is not None and (folder := self._write(trainer)) is not None:
            figure.savefig(folder / "curves.png")
            self.path = folder / "curves.png"

    def _take_up_pace(self, trainer: "pl.Trainer") -> None:
        """Goes on with an earlier run's in the same folder; not a checkpoint's, in which it would differ each time."""
        folder = self._folder(trainer)
        if trainer.global_step and not self.pace.seconds and trainer.is_global_zero and folder is not None:
            with suppress(OSError, ValueError, LookupError, TypeError):  # none, or half a file, or an older one
                written = json.loads((folder / "curves.json").read_text(encoding="utf-8"))
                self.pace.load_state_dict(written["pace"])

    def _write_now_and_then(self, trainer: "pl.Trainer") -> None:
        if trainer.is_global_zero and time.monotonic() - self._written >= _SECONDS_BETWEEN_WRITES:
            with suppress(OSError):  # the fit's end will tell
                self._write(trainer)
            self._written = time.monotonic()

    def _write(self, trainer: "pl.Trainer") -> Path | None:
        """Writes the points so that a reader sees all of them, or those of before. Returns the folder, if any."""
        folder = self._folder(trainer)
        if folder is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".curves.json.{os.getpid()}"
        points = self.state_dict() | {"pace": self.pace.state_dict()}
        temporary.write_text(json.dumps(points) + "\n", encoding="utf-8")
        temporary.replace(folder / "curves.json")
        return folder

    def _folder(self, trainer: "pl.Trainer") -> Path | None:
        return folder_of_files(trainer, self._dirpath)

    def _record(self, trainer: "pl.Trainer", stage: str) -> None:
        for name, value in trainer.callback_metrics.items():
            if stage == "train" and name in self.metrics["val"] and name not in self.metrics["train"]:
                continue  # of a validation that a checkpoint has brought along
            if self._known.get(name) is not value and not name.endswith("_step"):
                # Host-device synchronisation on a GPU, at the end of an epoch or a validation.
                self._metric(stage, name).append(trainer.global_step, float(value))
        self._known = dict(trainer.callback_metrics)

    def _metric(self, stage: str, name: str) -> Series:
        return self.metrics[stage].setdefault(name, Series(self._max_points))

    def _all(self) -> Iterable[Series]:
        yield from (self.losses, self.scales, self.skipped)
        for metrics in self.metrics.values():
            yield from metrics.values()

    def _named(self, stage: str, word: str) -> Iterable[tuple[str, Series]]:
        return ((name, series) for name, series in self.metrics[stage].items() if len(series) and word in name.lower())

    def _scores(self) -> Iterable[tuple[str, str, Series]]:
        for stage, metrics in self.metrics.items():
            for name, series in metrics.items():
                wanted = "acc" in name.lower() or (stage == "val" and "loss" not in name.lower())
                # A metric logged per step and per epoch comes under two names here, as well as under its own.
                twin = name.endswith("_epoch") and name.removesuffix("_epoch") in metrics
                if len(series) and wanted and not twin and all(0 <= value <= 1 for value in series.read()):
                    yield stage, name, series

    def _draw_loss(self, axes: "Axes") -> None:
        steps, losses = self.losses.steps, self.losses.read()
        labels = []
        shown = without_spikes(losses)
        if shown:
            smoothed = smooth(losses)
            axes.plot(steps, losses, color=_TRAIN, alpha=0.25, linewidth=0.8)
            axes.plot(steps, smoothed, color=_TRAIN, linewidth=1.8)
            labels.append((smoothed[-1], "train", _TRAIN))
            shown += smoothed
        for (name, series), color in zip(self._named("val", "loss"), cycle((_VAL, *_OTHERS)), strict=False):
            values = series.read()
            axes.plot(series.steps, values, color=color, linewidth=1.8, marker="o", markersize=3.5)
            labels.append((values[-1], name, color))
            shown += values
        fit_loss_axis(axes, shown)
        label_ends(axes, labels)

    def _draw_scores(self, axes: "Axes") -> None:
        labels = []
        colors = {"train": [_TRAIN, *_OTHERS[::-1]], "val": [_VAL, *_OTHERS]}
        for stage, name, series in self._scores():
            color = colors[stage].pop(0) if colors[stage] else INK
            values = series.read()
            axes.plot(series.steps, values, color=color, linewidth=1.8, marker="o", markersize=3.5)
            labels.append((values[-1], f"{name} {values[-1]:.3f}", color))
        label_ends(axes, labels)

    def _draw_scale(self, axes: "Axes") -> None:
        steps, scales = list(self.scales.steps), self.scales.read()
        last = max(series.steps[-1] for series in self._all() if len(series))
        axes.plot([*steps, last], [*scales, scales[-1]], color=INK, linewidth=1.8, drawstyle="steps-post")
        axes.set_yscale("log", base=2)
        axes.set_ylim(min(scales) / 2, max(scales) * 2)
        axes.minorticks_off()
        labels = [(scales[-1], f"{scales[-1]:,.10g}", INK)]
        if len(self.skipped):
            axes.plot(
                self.skipped.steps,
                self.skipped.read(),
                "x",
                color=_SKIPPED,
                markersize=6,
                markeredgewidth=1.6,
            )
            labels.append((self.skipped.read()[-1], "x skipped", _SKIPPED))
        label_ends(axes, labels)


def folder_of_files(trainer: "pl.Trainer", given: str | os.PathLike[str] | None) -> Path | None:
    """Where a callback writes the files of a run. Asks no other process.

    That is the folder that the callback was given, else that of the first logger, else ``trainer.default_root_dir``. A
    logger counts if it names a folder of this machine, in a str or a Path: not an address, and not what a mock says.
    None if ``default_root_dir`` is an address, too.
    """
    if given:
        return Path(given).absolute()
    folder = next(iter(folders_of_loggers(trainer)), str(trainer.default_root_dir))
    return None if "://" in folder else Path(folder).absolute()


def folders_of_loggers(trainer: "pl.Trainer") -> list[str]:
    """The folders of this machine that the loggers write into."""
    named = [[getattr(logger, name, None) for name in ("log_dir", "save_dir")] for logger in trainer.loggers]
    found = (next((folder for folder in folders if isinstance(folder, str | Path)), "") for folders in named)
    return [str(folder) for folder in found if folder and "://" not in str(folder)]


def training_loss(trainer: "pl.Trainer", outputs: Any) -> Tensor | None:
    """The loss of a batch, as ``training_step`` returned it, from what ``on_train_batch_end`` is given.

    The latter is the batch's share of its accumulation window's mean, and that is undone here.

    Args:
        trainer: Says what the share is.
        outputs: A dict with a "loss", a tensor, or anything else.

    Returns:
        A tensor with one element, unread, or None if there is no loss.
    """
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    share = getattr(trainer, "loss_share", 1.0 / trainer.accumulate_grad_batches)  # `lightning.Trainer` has but this
    return loss if isinstance(share, float) and share == 1.0 else loss / share
