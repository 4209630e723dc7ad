"""The picture of a comparison: losses on top of each other, the metric, and bars. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trainer.callbacks.plotting import INK, PALETTE, canvas, fit_loss_axis, label_ends, smooth, style, without_spikes
from trainer.cli.compare.verdict import Metric, Run
from trainer.terminal import four_digits

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from trainer.record.curve import Curve

_PALE = 0.4  # opacity of the run that the others are compared with


def draw(runs: Sequence[Run], metric: Metric | None, title: str) -> Figure | None:
    """Draws the runs of a comparison.

    Args:
        runs: those to draw, the one that the others are compared with first.
        metric: drawn over the steps, where the runs have points of it.
        title: headline of the figure.

    Returns:
        The figure, bound to no window, or None without anything to draw.
    """
    losses = [run.losses for run in runs]
    metrics = [run.metric_curve(metric.name) if metric else run.losses for run in runs]
    rows = [2.9] * any(losses) + [2.1] * (metric is not None and any(metrics))
    place = "GPU" if any(run.memory_is_the_gpus for run in runs) else "whole process"
    bars: dict[str, tuple[list[float], Callable[[float, float], str]]] = {
        "Samples per second": ([run.samples_per_second or 0.0 for run in runs], _times),
        f"Peak memory ({place}), MiB": ([(run.peak_memory or 0.0) / 2**20 for run in runs], _percent),
    }
    bars = {name: panel for name, panel in bars.items() if any(panel[0])}
    if not rows and not bars:
        return None
    from matplotlib.ticker import MaxNLocator

    heights = rows + [0.55 + 0.27 * len(runs)] * bool(bars)
    figure = canvas(title, 9, 0.9 + sum(heights))
    grid = figure.add_gridspec(len(heights), max(1, len(bars)), height_ratios=heights)
    above: Axes | None = None
    for row in range(len(rows)):
        axes = figure.add_subplot(grid[row, :], sharex=above)
        if row == 0 and any(losses):
            _draw_losses(axes, runs)
        elif metric is not None:
            style(axes, metric.name)
            _draw_metric(axes, runs, metrics)
        if above is not None:
            above.tick_params(labelbottom=False)
        above = axes
    if above is not None:
        above.set_xlabel("optimizer step", color=INK)
        above.xaxis.set_major_locator(MaxNLocator(integer=True))
    for column, (name, (values, told)) in enumerate(bars.items()):
        axes = figure.add_subplot(grid[-1, column])
        style(axes, name)
        _draw_bars(axes, runs, values, told)
        if column:
            axes.set_yticklabels([])
    return figure


def _draw_losses(axes: Axes, runs: Sequence[Run]) -> None:
    style(axes, f"Training loss{' (x: a skipped step)' if any(run.skipped for run in runs) else ''}")
    labels, shown = [], []
    for index, run in enumerate(runs):
        losses, skipped = run.losses, run.skipped.steps
        height = 0.03 + 0.05 * index
        axes.plot(
            skipped,
            [height] * len(skipped),
            "x",
            color=_color(index),
            markersize=5,
            markeredgewidth=1.4,
            transform=axes.get_xaxis_transform(),
        )
        visible = without_spikes(losses.values)
        if visible:
            smoothed = smooth(list(losses.values))
            axes.plot(losses.steps, losses.values, color=_color(index), alpha=0.15, linewidth=0.7)
            _draw_curve(axes, index, losses.steps, smoothed, solid_capstyle="round")
            labels.append((smoothed[-1], run.label, _color(index)))
            shown += visible + smoothed
    fit_loss_axis(axes, shown)
    label_ends(axes, labels)


def _draw_metric(axes: Axes, runs: Sequence[Run], curves: Sequence[Curve]) -> None:
    labels = []
    for index, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        if curve:
            size = 3.5 if index else 6
            _draw_curve(axes, index, curve.steps, curve.values, marker="o", markersize=size, markeredgewidth=0)
            labels.append((curve.values[-1], f"{run.label} {curve.values[-1]:.4g}", _color(index)))
    label_ends(axes, labels)


def _draw_curve(axes: Axes, index: int, steps: Sequence[float], values: Sequence[float], **how: Any) -> None:
    """Curves may run together: the first is a broad, pale band on which the others lie."""
    axes.plot(steps, values, color=_color(index), linewidth=1.4 if index else 3.6, alpha=1.0 if index else _PALE, **how)


def _draw_bars(axes: Axes, runs: Sequence[Run], values: Sequence[float], told: Callable[[float, float], str]) -> None:
    colors = [_color(index) for index in range(len(runs))]
    bars = axes.barh(range(len(runs)), values, color=colors, height=0.6, alpha=0.85)
    bars[0].set_alpha(_PALE)
    texts = [told(value, values[0]) if value else "-" for value in values]
    axes.bar_label(bars, texts, padding=4, fontsize=9, color=INK)
    axes.set_yticks(range(len(runs)), [run.label for run in runs])
    axes.tick_params(axis="y", length=0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.grid(visible=False)
    axes.invert_yaxis()
    axes.margins(x=0.3)


def _color(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def _times(value: float, first: float) -> str:
    return four_digits(value) + (f"   {value / first:.2f}x" if first and value != first else "")


def _percent(value: float, first: float) -> str:
    return f"{value:,.0f}" + (f"   {value / first - 1:+z.0%}" if first and value != first else "")
