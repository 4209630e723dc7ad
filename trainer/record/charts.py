"""Select the charts of a run or several runs, and their curves."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trainer.record.curve import Curve, smooth
from trainer.record.run_record import RunRecord

_STAGE = re.compile(r"^(train|training|val|valid|validation|test)[_/.\-](.+)$")
_PACE_POINTS = 60
_SHORTEST = 0.1
"""Shortest training time in seconds to compute a rate over, because rates over shorter times are noise."""
_MOST_OTHERS = 24
_LAYERS = 3
_LAYER_NORM = "grad_norm/"
"""Prefix of the metrics of `trainer.callbacks.LayerNorms`."""


class Line(NamedTuple):
    """A curve in a chart.

    Args:
        label: label in the legend.
        curve: its points.
        color: index in the palette; equal labels have equal colors in all charts of a sweep.
        faint: whether it is drawn in the background of another line, without an entry in the legend.
        steps: whether the value is constant until the next point.
        name: title of the chart in which :func:`overlay` draws this line of each run. Default: the title of the line's
            own chart, or the label if :func:`overlay` draws several lines of that chart.
        is_detail: whether charts of several runs leave it out.
    """

    label: str
    curve: Curve
    color: int = 0
    faint: bool = False
    steps: bool = False
    name: str = ""
    is_detail: bool = False


class Chart(NamedTuple):
    """A chart.

    Args:
        title: title of the chart.
        lines: its lines.
        scale: scale of the y-axis: "linear", "log2", or "auto" for a logarithmic scale above two decades.
        crosses: points of skipped steps.
        note: text below the title, such as the unit.
        is_map: whether it is a heat map with a row for each line, in which large values are light.
    """

    title: str
    lines: Sequence[Line]
    scale: str = "auto"
    crosses: Curve = Curve()
    note: str = ""
    is_map: bool = False


class Section(NamedTuple):
    """Charts under one heading, with notes such as the reason for a missing chart."""

    title: str
    charts: Sequence[Chart]
    notes: Sequence[str] = ()


def sections_of(run: RunRecord) -> list[Section]:
    """Return the charts of one run."""
    is_fit = run.command == "fit"
    rows = {name: curve for name, curve in run.rows.items() if is_fit or len(curve) > 1}
    amp = _mixed_precision(run, rows)
    rate = _learning_rate(rows)
    learning, others = _metrics(run, rows)
    missing = [] if run.rows and is_fit else [_without_rows(run)]
    more = [f"{len(others) - _MOST_OTHERS} more are in metrics.csv."] if len(others) > _MOST_OTHERS else []
    sections = [
        Section("Learning", [*learning, *rate], missing if not (run.rows and (learning or rate)) else ()),
        Section("Loss scale and gradients", *amp),
        Section("Speed and memory", *_pace(run)),
        Section("Other logged values", others[:_MOST_OTHERS], more),
    ]
    return [section for section in sections if section.charts or section.notes]


def overlay(runs: Sequence[RunRecord], colors: Sequence[int | None], winner: RunRecord | None = None) -> list[Section]:
    """Return the charts of several runs: one for each curve, with the lines of all runs that have it.

    Args:
        runs: the runs, with their labels.
        colors: index in the palette of each run; None for runs without a color.
        winner: the best run, drawn on top.
    """
    gathered: dict[str, dict[tuple[str, str], Chart]] = {}
    # colored lines are drawn on top, and the best run on top of all
    drawn = sorted(zip(runs, colors, strict=True), key=lambda each: (each[1] is not None, each[0] is winner))
    for run, color in drawn:
        for section in sections_of(run):
            charts = gathered.setdefault(section.title, {})
            for chart in section.charts:
                named = [line for line in chart.lines if not (chart.is_map or line.faint or line.is_detail)]
                for line in named:
                    title = line.name or (chart.title if len(named) == 1 else line.label)
                    labeled = line._replace(label=run.label, color=-1 if color is None else color, faint=False)
                    key = chart.title, line.name or line.label
                    before = charts.get(key)
                    lines = [*(before.lines if before else ()), labeled]
                    charts[key] = chart._replace(title=title, lines=lines, crosses=Curve())
    return [Section(title, list(charts.values())) for title, charts in gathered.items() if charts]


def _metrics(run: RunRecord, rows: dict[str, Curve]) -> tuple[list[Chart], list[Chart]]:
    """Return charts of the metrics of stages, grouped by name with the loss first, and charts of other values."""
    for stage in ("val",) if run.rows else ("train", "val"):  # rows have the metrics of the training under other names
        rows |= {name: curve for name, curve in run.stages.get(stage, {}).items() if curve and name not in rows}
    validated = run.stages.get("val", {})
    groups: dict[str, list[str]] = {}
    for name in rows:
        groups.setdefault(_base(name), []).append(name)
    losses: list[Line] = []
    if run.losses.finite:
        names = groups.get("loss", [])
        per_step = [rows[name] for name in names if _is_training(name) and not name.endswith("_epoch")]
        losses = list(_training_loss(_continued(run.losses, per_step[0]) if per_step else run.losses))
        groups["loss"] = [name for name in names if not _is_training(name)]
    learning: list[Chart] = []
    others: list[Chart] = []
    for base, names in groups.items():
        is_loss = base == "loss"
        lines = list(_lines(names, rows, first=int(is_loss and bool(losses))))
        title = "Loss" if is_loss else base if len(names) > 1 else names[0]
        is_metric = is_loss or any(_STAGE.match(name) or name in validated for name in names)
        (learning if is_metric else others).append(Chart(title, [*losses, *lines] if is_loss else lines))
    return sorted(learning, key=lambda chart: chart.title != "Loss"), others


def _base(name: str) -> str:
    """Return the name without its stage: "acc" for "val_acc", "loss" for "train/loss_epoch"."""
    plain = name.removesuffix("_step").removesuffix("_epoch")
    staged = _STAGE.match(plain)
    return staged[2] if staged else plain


def _is_training(name: str) -> bool:
    staged = _STAGE.match(name)
    return staged is None or staged[1].startswith("train")


def _lines(names: Iterable[str], rows: dict[str, Curve], first: int) -> Iterable[Line]:
    """Iterate over a line for each name. Values per step are drawn faintly if there is a mean per epoch.

    Args:
        names: names of metrics.
        rows: their curves.
        first: color of the first line.
    """
    listed = sorted(names, key=lambda name: (not _is_training(name), name))
    colors = {name: color for color, name in enumerate((n for n in listed if _epoch_of(n) not in listed), first)}
    for name in listed:
        is_faint = name not in colors
        yield Line(name, rows[name], colors[_epoch_of(name) if is_faint else name], faint=is_faint)


def _epoch_of(name: str) -> str:
    """Return the name of the epoch mean of a value that is logged per step; "" for other values."""
    return f"{name.removesuffix('_step')}_epoch" if name.endswith("_step") else ""


def _training_loss(losses: Curve) -> Iterable[Line]:
    smoothed = smooth(list(losses.values))
    if len(losses) >= 80:  # fewer values are not smoothed
        yield Line("each batch", losses, 0, faint=True)
    yield Line("train", Curve(losses.steps, smoothed), 0, name="Training loss")


def _learning_rate(rows: dict[str, Curve]) -> list[Chart]:
    """Return a chart of the learning rates of LearningRateMonitor, with a line per optimizer and parameter group."""
    names = [name for name in rows if name.startswith("lr-") and not name.endswith(("-momentum", "-weight_decay"))]
    rates = [(name.removeprefix("lr-"), rows.pop(name)) for name in names]
    if all(curve == rates[0][1] for _, curve in rates):
        rates = rates[:1]
    title = "Learning rate" if len(rates) == 1 else ""  # so that runs with different optimizers share a chart
    lines = [Line(name, curve, number, name=title) for number, (name, curve) in enumerate(rates)]
    return [Chart("Learning rate", lines, "linear")] if lines else []


def _mixed_precision(run: RunRecord, rows: dict[str, Curve]) -> tuple[list[Chart], list[str]]:
    charts, notes = list[Chart](), list[str]()
    scale = _continued(run.scales_to_the_end, rows.pop("amp/scale", Curve()))
    if scale and (run.scale is not None or set(scale.values) != {1.0}):
        charts.append(Chart("Loss scale", [Line("scale", scale, 0, steps=True)], "log2", run.skips))
    skipped = _continued(run.skipped, rows.pop("amp/skipped_steps", Curve()))
    skip_rate = rows.pop("amp/skip_rate", Curve())
    if skipped.last:
        charts.append(Chart("Skipped steps", [Line("so far", skipped, 5, steps=True)], "linear"))
        if skip_rate:
            charts.append(Chart("Skip rate", [Line("share of the last steps", skip_rate, 5)], "linear"))
    elif scale and not run.skipped_steps:
        notes.append("No step was skipped.")
    labels = {"grad_norm_step": "step", "grad_norm": "grad_norm", "grad_norm_epoch": "epoch mean"}
    norms = [(label, rows.pop(name, Curve()), color) for color, (name, label) in enumerate(labels.items())]
    lines = [Line(*norm, name=f"Gradient norm ({norm[0]})") for norm in norms if norm[1]]
    if lines:
        charts.append(Chart("Gradient norm", lines[:2], note="of all unscaled gradients, before clipping"))
    if layers := {name: rows.pop(name) for name in [*rows] if name.startswith(_LAYER_NORM)}:
        lines = [Line(name.removeprefix(_LAYER_NORM), curve) for name, curve in layers.items()]
        note = "from the first layer (top) to the last; of unscaled gradients, before clipping"
        charts.append(Chart("Gradient norm by layer", lines, note=note, is_map=True))
    for metric, title, note in (
        ("underflow", "Underflow", "share of the nonzero gradient elements that are subnormal in float16"),
        ("zeros", "Zeros", "share of the gradient elements that are exactly zero"),
    ):
        whole = rows.pop(f"amp/{metric}", Curve())
        layers = {name: rows.pop(name) for name in [*rows] if name.startswith(f"amp/{metric}/")}
        worst = sorted(layers.items(), key=lambda item: -max(item[1].finite, default=0.0))[:_LAYERS]
        if whole:
            lines = [Line("all parameters", whole, 0)]
            for color, (name, curve) in enumerate(worst if metric == "underflow" else (), 1):
                lines.append(Line(name.removeprefix(f"amp/{metric}"), curve, color, is_detail=True))
            charts.append(Chart(title, lines, "linear", note=note))
    if not charts and run.command == "fit" and run.rows:
        notes.append("Loss scale and gradients were not logged. ScaleMonitor, in callbacks=default, logs them.")
    return charts, notes


def _continued(curve: Curve, logged: Curve) -> Curve:
    """Return ``curve`` with later points of ``logged``, because a running fit writes rows earlier than ``run.json``."""
    end = curve.steps[-1] if curve else -math.inf
    return Curve.through([*curve.points, *(point for point in logged.points if point[0] > end)])


def _pace(run: RunRecord) -> tuple[list[Chart], list[str]]:
    charts = list[Chart]()
    if len(rate := speed(run)) > 1:  # a single value is already in a tile
        unit = "training samples per second" if run.samples_per_step else "optimizer steps per second"
        charts.append(Chart("Throughput", [Line("rate", rate, 2)], "linear", note=f"{unit}, without validation"))
    if len(memory := run.memory) > 1:
        in_mib = Curve.through((step, size / 2**20) for step, size in memory.points)
        kind = "reserved on the GPU" if run.memory_is_the_gpus else "of the whole process"
        charts.append(Chart("Memory", [Line("memory", in_mib, 3)], "linear", note=f"MiB, {kind}"))
    if charts or run.elapsed or run.command != "fit" or not run.rows:
        return charts, []
    return [], ["run.json has no time and memory of the steps yet."]


def speed(run: RunRecord) -> Curve:
    """Return training samples per second, or steps per second if the batch size is unknown, in up to 60 intervals."""
    seconds, points = run.elapsed, list[tuple[float, float]]()
    if not seconds:
        return seconds
    step, start = seconds.steps[0], seconds.values[0]
    least = max(_SHORTEST, (seconds.values[-1] - start) / _PACE_POINTS)
    for next_step, end in seconds.points:
        if end - start >= least and next_step > step:
            points.append((next_step, (run.samples_per_step or 1) * (next_step - step) / (end - start)))
            step, start = next_step, end
    return Curve.through(points)


def _without_rows(run: RunRecord) -> str:
    """Return a sentence about the missing metrics.csv."""
    if run.command != "fit":
        return f"There are no curves for the command {run.command}."
    suffix = " yet" if run.status == "running" else ""
    return f"There is no metrics.csv{suffix} with the logged values. logger=csv and the default logger write it."
