"""Which charts a run, or a sweep, gets, and what is drawn in them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from trainer.callbacks.plotting import smooth
from trainer.record.curve import Curve
from trainer.record.run_record import RunRecord

_STAGE = re.compile(r"^(train|training|val|valid|validation|test)[_/.\-](.+)$")
_PACE_POINTS = 60
_SHORTEST = 0.1
"""Seconds of training that a rate is taken over, at least: in less of it chance is all that one sees."""
_MOST_OTHERS = 24
_COLORS = {"tra": 0, "val": 1, "tes": 2}
"""Of the stages, by the first letters of their names."""
_LAYERS = 3
_LAYER_NORM = "grad_norm/"
"""What `trainer.callbacks.LayerNorms` logs begins so."""


@dataclass(frozen=True)
class Line:
    """A curve in a chart.

    Args:
        label: in the legend.
        curve: its points.
        color: its number in the palette; the same label has the same in all charts of a sweep.
        faint: whether it is only the ground on which another one is drawn, and not in the legend.
        steps: whether the value holds until the next point.
        name: the title of a chart with this line alone. Default: the chart's title, or the label if it has several.
        is_detail: whether the charts of several runs leave it out.
    """

    label: str
    curve: Curve
    color: int = 0
    faint: bool = False
    steps: bool = False
    name: str = ""
    is_detail: bool = False


@dataclass(frozen=True)
class Chart:
    """One picture.

    Args:
        title: above it.
        lines: what is drawn.
        scale: of the y-axis: "auto" is logarithmic for more than two decades; "log2".
        crosses: points of skipped steps.
        note: below the title, such as the unit.
        is_map: whether it is a heat map: a row for each line, which is dark where the value is large.
    """

    title: str
    lines: Sequence[Line]
    scale: str = "auto"
    crosses: Curve = field(default_factory=Curve)
    note: str = ""
    is_map: bool = False


@dataclass(frozen=True)
class Section:
    """Charts under one headline, and what is to be said where one is missing."""

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
    found = [
        Section("Learning", [*learning, *rate], missing if not (run.rows and (learning or rate)) else ()),
        Section("Loss scale and gradients", *amp),
        Section("Speed and memory", *_pace(run)),
        Section(
            "Other logged values",
            others[:_MOST_OTHERS],
            [f"{len(others) - _MOST_OTHERS} more are in metrics.csv."] if len(others) > _MOST_OTHERS else [],
        ),
    ]
    return [section for section in found if section.charts or section.notes]


def overlay(runs: Sequence[RunRecord], colors: Sequence[int | None], winner: RunRecord | None = None) -> list[Section]:
    """Return the charts of several runs: one for each curve, with the lines of all runs that have it.

    Args:
        runs: the runs, with their labels.
        colors: the number in the palette of each; None for one among too many to tell apart.
        winner: the best run, drawn on top.
    """
    gathered: dict[str, dict[tuple[str, str], Chart]] = {}
    # the coloured ones on top, and the best one on top of them
    drawn = sorted(zip(runs, colors, strict=True), key=lambda each: (each[1] is not None, each[0] is winner))
    for run, color in drawn:
        for section in sections_of(run):
            charts = gathered.setdefault(section.title, {})
            for chart in section.charts:
                named = [line for line in chart.lines if not (chart.is_map or line.faint or line.is_detail)]
                for line in named:
                    title = line.name or (chart.title if len(named) == 1 else line.label)
                    own = replace(line, label=run.label, color=-1 if color is None else color, faint=False)
                    key = chart.title, line.name or line.label
                    before = charts.get(key)
                    lines = [*(before.lines if before else ()), own]
                    charts[key] = replace(chart, title=title, lines=lines, crosses=Curve())
    return [Section(title, list(charts.values())) for title, charts in gathered.items() if charts]


def _metrics(run: RunRecord, rows: dict[str, Curve]) -> tuple[list[Chart], list[Chart]]:
    """What was logged for a stage, those of one name together, the loss first; and what is left."""
    rows |= {name: curve for name, curve in run.stages.get("val", {}).items() if curve and name not in rows}
    groups: dict[str, list[str]] = {}
    for name in rows:
        groups.setdefault(_base(name), []).append(name)
    has_losses = bool(run.losses.finite)
    learning: list[Chart] = []
    others: list[Chart] = []
    for base, names in groups.items():
        is_loss = base == "loss"
        losses = run.losses
        if is_loss and has_losses:
            of_steps = [rows[name] for name in names if _is_training(name) and not name.endswith("_epoch")]
            losses = _continued(losses, of_steps[0]) if of_steps else losses
            names = [name for name in names if not _is_training(name)]
        lines = list(_lines(names, rows))
        if is_loss and has_losses:
            lines = [
                *_training_loss(losses),
                *(replace(line, color=line.color or len(lines) + 1) for line in lines),
            ]
        title = "Loss" if is_loss else base if len(names) > 1 else names[0]
        is_metric = is_loss or any(_STAGE.match(name) for name in names)
        (learning if is_metric else others).append(Chart(title, lines))
    if has_losses and "loss" not in groups:
        learning.append(Chart("Loss", list(_training_loss(run.losses))))
    return sorted(learning, key=lambda chart: chart.title != "Loss"), others


def _base(name: str) -> str:
    """What is measured, whatever the stage: "acc" for "val_acc", "loss" for "train/loss_epoch"."""
    plain = name.removesuffix("_step").removesuffix("_epoch")
    found = _STAGE.match(plain)
    return found[2] if found else plain


def _is_training(name: str) -> bool:
    found = _STAGE.match(name)
    return found is None or found[1].startswith("train")


def _lines(names: Iterable[str], rows: dict[str, Curve]) -> Iterable[Line]:
    """A line each; a value of each step is only the ground for that of the epoch."""
    listed = sorted(names, key=lambda name: (not _is_training(name), name))
    free = [*range(8)]
    colors: dict[str, int] = {}
    for name in (name for name in listed if _epoch_of(name) not in listed):
        found = _STAGE.match(name)
        usual = _COLORS.get(found[1][:3], 0) if found else 0
        colors[name] = usual if usual in free else next(iter(free), 0)
        free = [color for color in free if color != colors[name]]
    for name in listed:
        is_ground = name not in colors
        yield Line(name, rows[name], colors[_epoch_of(name) if is_ground else name], faint=is_ground)


def _epoch_of(name: str) -> str:
    """The name that the mean over the epoch has, of a value that is logged for each step; "" of any other."""
    return f"{name.removesuffix('_step')}_epoch" if name.endswith("_step") else ""


def _training_loss(losses: Curve) -> Iterable[Line]:
    smoothed = smooth(list(losses.values))
    if len(losses) >= 80:  # fewer are left as they are
        yield Line("each batch", losses, 0, faint=True)
    yield Line("train", Curve(losses.steps, smoothed), 0, name="Training loss")


def _learning_rate(rows: dict[str, Curve]) -> list[Chart]:
    """Those of LearningRateMonitor: one for each optimizer and parameter group."""
    names = [name for name in rows if name.startswith("lr-") and not name.endswith(("-momentum", "-weight_decay"))]
    found = {name: rows.pop(name) for name in names}
    groups = list(found.items())
    if groups and all(curve == groups[0][1] for _, curve in groups):
        groups = groups[:1]
    alone = "Learning rate" if len(groups) == 1 else ""  # whatever the optimizer is called
    lines = [Line(name.removeprefix("lr-"), curve, number, name=alone) for number, (name, curve) in enumerate(groups)]
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
    norms = [rows.pop(name, Curve()) for name in ("grad_norm_step", "grad_norm", "grad_norm_epoch")]
    named = zip(("step", "grad_norm", "epoch mean"), norms, strict=True)
    lines = [
        Line(name, curve, number, name=f"Gradient norm ({name})") for number, (name, curve) in enumerate(named) if curve
    ]
    if lines:
        charts.append(Chart("Gradient norm", lines[:2], note="of all true gradients, before clipping"))
    if layers := {name: rows.pop(name) for name in [*rows] if name.startswith(_LAYER_NORM)}:
        lines = [Line(name.removeprefix(_LAYER_NORM), curve) for name, curve in layers.items()]
        note = "from the first layer, at the top, to the last one; of true gradients, before clipping"
        charts.append(Chart("Gradient norm by layer", lines, note=note, is_map=True))
    for kind, title, note in (
        ("underflow", "Underflow", "share of the non-zero gradient elements that are subnormal in float16"),
        ("zeros", "Zeros", "share of the gradient elements that are exactly zero"),
    ):
        whole = rows.pop(f"amp/{kind}", Curve())
        layers = {name: rows.pop(name) for name in [*rows] if name.startswith(f"amp/{kind}/")}
        worst = sorted(layers.items(), key=lambda item: -max(item[1].finite, default=0.0))[:_LAYERS]
        if whole:
            lines = [Line("all parameters", whole, 0)]
            if kind == "underflow":
                named_layers = ((name.removeprefix(f"amp/{kind}"), curve) for name, curve in worst)
                lines += [
                    Line(name, curve, color, is_detail=True) for color, (name, curve) in enumerate(named_layers, 1)
                ]
            charts.append(Chart(title, lines, "linear", note=note))
    if not charts and run.command == "fit" and run.rows:
        callbacks = run.config.get("callbacks")
        monitor = callbacks.get("scale_monitor") if isinstance(callbacks, dict) else None
        if isinstance(monitor, dict) and "_target_" in monitor:
            why = "the run was too short for it (trainer.log_every_n_steps, callbacks.scale_monitor.every_n_steps)"
        else:
            why = "that is ScaleMonitor's (callbacks=default has it)"
        notes.append(f"Nothing was logged of scale and gradients: {why}.")
    return charts, notes


def _continued(curve: Curve, logged: Curve) -> Curve:
    """``curve``, and what was logged after it: while a run goes on, rows are written sooner than ``run.json``."""
    end = curve.steps[-1] if curve else -math.inf
    later = [(step, value) for step, value in zip(logged.steps, logged.values, strict=True) if step > end]
    return Curve([*curve.steps, *(step for step, _ in later)], [*curve.values, *(value for _, value in later)])


def _pace(run: RunRecord) -> tuple[list[Chart], list[str]]:
    charts = list[Chart]()
    if len(rate := speed(run)) > 1:  # a single value is a tile above the curves
        unit = "training samples per second" if run.samples_per_step else "optimizer steps per second"
        charts.append(Chart("Throughput", [Line("rate", rate, 2)], "linear", note=f"{unit}, without validation"))
    if len(memory := run.memory) > 1:
        in_mib = Curve(memory.steps, [value / 2**20 for value in memory.values])
        what = "reserved on the GPU" if run.memory_is_the_gpus else "of the whole process"
        charts.append(Chart("Memory", [Line("memory", in_mib, 3)], "linear", note=f"MiB, {what}"))
    if charts or run.elapsed or run.command != "fit" or not run.rows:
        return charts, []
    return [], ["Time and memory over the steps come with run.json, which does not have them yet."]


def speed(run: RunRecord) -> Curve:
    """Training samples per second (steps, where a batch's size is not known) in up to 60 stretches of the training."""
    seconds, points = run.elapsed, list[tuple[float, float]]()
    if not seconds:
        return seconds
    step, time = seconds.steps[0], seconds.values[0]
    least = max(_SHORTEST, (seconds.values[-1] - time) / _PACE_POINTS)
    for now, there in zip(seconds.steps, seconds.values, strict=True):
        if there - time >= least and now > step:
            points.append((now, (run.samples_per_step or 1) * (now - step) / (there - time)))
            step, time = now, there
    return Curve([step for step, _ in points], [rate for _, rate in points])


def _without_rows(run: RunRecord) -> str:
    """Why there are fewer curves than could be."""
    what = "learning rate, gradient norm, underflow and whatever else the module logs"
    if run.status == "running":
        return f"No metrics.csv yet: it is written every 100 steps and at the end of an epoch. It has {what}."
    if run.command != "fit":
        return f"This was a {run.command}, which draws no curves."
    chosen = run.config.get("logger")
    names = sorted(chosen) if isinstance(chosen, dict) else []
    if chosen is not None and not names:
        return f"This run logged nothing (logger=none). The default logger writes {what}."
    if "csv" in names:
        every = (run.config.get("trainer") or {}).get("log_every_n_steps")
        if run.completed and isinstance(every, int) and (run.step or 0) < every:
            return (
                f"There is no metrics.csv: rows are written every {every} steps (trainer.log_every_n_steps), and the"
                f" run had {run.step}. They have {what}."
            )
        return f"There is no metrics.csv: the run ended before its first rows were written. They have {what}."
    by = f" by {' and '.join(names)} alone" if names else ""
    return f"There is no metrics.csv: the run was logged{by}. With logger=csv, or the default, there are also {what}."
