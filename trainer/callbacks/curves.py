"""A figure of a run: ``curves.png``."""

import os
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from trainer import packages
from trainer.callbacks.plotting import INK, PALETTE, canvas, fit_loss_axis, label_ends, smooth, style, without_spikes
from trainer.callbacks.run_recorder import RecordView
from trainer.errors import ConfigurationError
from trainer.record.curve import Curve
from trainer.record.run_record import RunRecord, without_step_epoch_variants

if TYPE_CHECKING:  # takes a second to import, and is only needed at the end of a fit
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TRAIN, _VAL, *_OTHERS = PALETTE
_SKIPPED = "#cc3311"


class Curves(RecordView):
    """Draw loss, accuracy and loss scale over the optimizer steps into ``curves.png`` at the end of a fit.

    It is not a default callback, and requires matplotlib. The points come from the run's record instead of a logger, so
    the curves of a resumed run are complete. To plot several runs together, use ``trainer.load_run(folder)``. The
    panels are:

    - Loss: the loss that ``training_step`` returned, and every validation metric with "loss" in its name.
    - Score: every metric with "acc" in its name, and all other validation metrics except losses, if their values are in
      [0, 1].
    - Loss scale: on a logarithmic axis, with the skipped steps marked; left out without loss scaling.

    Only rank zero draws. The training losses are those of rank zero.

    Args:
        dirpath: folder of ``curves.png``. Default: the folder of ``run.json``, else that of the first logger.
        max_points: maximum number of points per curve in the record. Default: 1024.

    Attributes:
        path: path of the last fit's figure. None if there is no figure.

    Raises:
        ValueError: if ``max_points`` is less than 2.
        ConfigurationError: if matplotlib is not installed.
    """

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, max_points: int = 1024) -> None:
        if max_points < 2:
            raise ValueError(f"max_points={max_points}: a curve needs at least 2.")
        if problem := packages.missing("plots"):
            raise ConfigurationError(f"The callback Curves needs {problem}")
        super().__init__(dirpath, max_points=max_points)
        self.path: Path | None = None

    def draw(self, record: RunRecord, folder: Path) -> dict[str, Path]:
        """Write ``curves.png``, and return its path by name. Return {} if there are no points."""
        self.path = None
        figure = figure_of(record)
        if figure is None:
            return {}
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / "curves.png")
        self.path = folder / "curves.png"
        return {"curves": self.path}


def figure_of(record: RunRecord) -> "Figure | None":
    """Return the figure of a run, without a window and without ``pyplot``, or None if there are no points."""
    scores = [name for _, name, _ in _scores(record)]
    accuracies = all("acc" in name.lower() for name in scores)
    panels = [
        ("Loss", _draw_loss, bool(record.losses or [*_matching_curves(record, "val", "loss")])),
        ("Accuracy" if accuracies else "Score", _draw_scores, bool(scores)),
        ("Loss scale", _draw_scale, bool(record.scales)),
    ]
    panels = [panel for panel in panels if panel[-1]]
    if not panels:
        return None
    figure = canvas(f"{record.module}, {record.precision}", 9, 0.8 + 2.3 * len(panels))
    column = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axes, (name, draw_panel, _) in zip(column, panels, strict=True):
        style(axes, name)
        draw_panel(record, axes)
    column[-1].set_xlabel("optimizer step", color=INK)
    return figure


def _matching_curves(record: RunRecord, stage: str, word: str) -> Iterable[tuple[str, Curve]]:
    return ((name, curve) for name, curve in record.stages.get(stage, {}).items() if curve and word in name.lower())


def _scores(record: RunRecord) -> Iterable[tuple[str, str, Curve]]:
    for stage, metrics in record.stages.items():
        for name in without_step_epoch_variants(metrics):
            wanted = "acc" in name.lower() or (stage == "val" and "loss" not in name.lower())
            if wanted and metrics[name] and all(0 <= value <= 1 for value in metrics[name].values):
                yield stage, name, metrics[name]


def _draw_loss(record: RunRecord, axes: "Axes") -> None:
    steps, losses = record.losses.steps, list(record.losses.values)
    labels = []
    shown = without_spikes(losses)
    if shown:
        smoothed = smooth(losses)
        axes.plot(steps, losses, color=_TRAIN, alpha=0.25, linewidth=0.8)
        axes.plot(steps, smoothed, color=_TRAIN, linewidth=1.8)
        labels.append((smoothed[-1], "train", _TRAIN))
        shown += smoothed
    for (name, curve), color in zip(_matching_curves(record, "val", "loss"), cycle((_VAL, *_OTHERS)), strict=False):
        axes.plot(curve.steps, curve.values, color=color, linewidth=1.8, marker="o", markersize=3.5)
        labels.append((curve.values[-1], name, color))
        shown += curve.values
    fit_loss_axis(axes, shown)
    label_ends(axes, labels)


def _draw_scores(record: RunRecord, axes: "Axes") -> None:
    labels = []
    colors = {"train": [_TRAIN, *_OTHERS[::-1]], "val": [_VAL, *_OTHERS]}
    for stage, name, curve in _scores(record):
        color = colors[stage].pop(0) if colors[stage] else INK
        axes.plot(curve.steps, curve.values, color=color, linewidth=1.8, marker="o", markersize=3.5)
        labels.append((curve.values[-1], f"{name} {curve.values[-1]:.3f}", color))
    label_ends(axes, labels)


def _draw_scale(record: RunRecord, axes: "Axes") -> None:
    scales, skips = record.scales_to_the_end, record.skips
    axes.plot(scales.steps, scales.values, color=INK, linewidth=1.8, drawstyle="steps-post")
    axes.set_yscale("log", base=2)
    axes.set_ylim(min(scales.values) / 2, max(scales.values) * 2)
    axes.minorticks_off()
    labels = [(scales.values[-1], f"{scales.values[-1]:,.10g}", INK)]
    if skips:
        axes.plot(skips.steps, skips.values, "x", color=_SKIPPED, markersize=6, markeredgewidth=1.6)
        labels.append((skips.values[-1], "x skipped", _SKIPPED))
    label_ends(axes, labels)
