"""The picture of a comparison: losses on top of each other, the metric, and bars. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from trainer.callbacks.plotting import INK, PALETTE, fit_loss_axis, label_ends, smooth, style, without_spikes
from trainer.cli.compare.verdict import Metric, Run
from trainer.cli.tables import four_digits

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FAINT_FIRST = 0.4  # opacity of the run that the others are compared with: it lies below them


def draw(runs: Sequence[Run], metric: Metric | None, title: str) -> Figure | None:
    """Draws the runs of a comparison.

    Args:
        runs: those to draw, the one that the others are compared with first.
        metric: drawn over the steps, where the runs have points of it.
        title: headline of the figure.

    Returns:
        The figure, bound to no window, or None without anything to draw.
    """
    colored = list(zip(runs, cycle(PALETTE), strict=False))
    curves = [
        ("Training loss", _draw_losses, any(run.losses[0] for run in runs)),
        (metric.name if metric else "", _draw_metric, metric is not None and any(_points(run, metric) for run in runs)),
    ]
    memory = "Peak memory (GPU), MiB" if any(run.on_gpu for run in runs) else "Peak memory (whole process), MiB"
    bars: list[tuple[str, list[float], Callable[[float, float], str]]] = [
        ("Samples per second", [run.rate or 0.0 for run in runs], _times),
        (memory, [(run.memory or 0.0) / 2**20 for run in runs], _percent),
    ]
    curves = [panel for panel in curves if panel[-1]]
    bars = [panel for panel in bars if any(panel[1])]
    if not curves and not bars:
        return None
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    heights = [2.9, 2.1][: len(curves)] + [0.55 + 0.27 * len(runs)] * bool(bars)
    figure = Figure(figsize=(9, 0.9 + sum(heights)), dpi=150, facecolor="white", layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", size=12, weight="bold", color=INK)
    grid = figure.add_gridspec(len(heights), max(1, len(bars)), height_ratios=heights)
    shared = None
    for row, (name, draw_panel, _) in enumerate(curves):
        axes = figure.add_subplot(grid[row, :], sharex=shared)
        style(axes, name)
        draw_panel(axes, colored, metric)
        if shared is not None:
            shared.tick_params(labelbottom=False)
        shared = axes
    if shared is not None:
        shared.set_xlabel("optimizer step", color=INK)
        shared.xaxis.set_major_locator(MaxNLocator(integer=True))
    for column, (name, values, tell) in enumerate(bars):
        axes = figure.add_subplot(grid[-1, column])
        style(axes, name)
        _draw_bars(axes, colored, values, tell)
        if column:
            axes.set_yticklabels([])
    return figure


def _draw_losses(axes: Axes, runs: Sequence[tuple[Run, str]], metric: Metric | None) -> None:
    labels, shown = [], []
    for index, (run, color) in enumerate(runs):
        steps, losses = run.losses
        visible = without_spikes(losses)
        if not visible:
            continue
        smoothed = smooth(losses)
        axes.plot(steps, losses, color=color, alpha=0.15, linewidth=0.7)
        # Curves that run together: the first is a broad band on which the others lie.
        axes.plot(
            steps,
            smoothed,
            color=color,
            linewidth=1.4 if index else 3.6,
            alpha=1.0 if index else _FAINT_FIRST,
            solid_capstyle="round",
        )
        labels.append((smoothed[-1], run.label, color))
        shown += visible + smoothed
    fit_loss_axis(axes, shown)
    if any(_skipped(run) for run, _ in runs):
        axes.set_title(f"{axes.get_title('left')} (x: a skipped step)", loc="left", size=10, color=INK)
    for index, (run, color) in enumerate(runs):
        height = 0.03 + 0.05 * index
        axes.plot(
            _skipped(run),
            [height] * len(_skipped(run)),
            "x",
            color=color,
            markersize=5,
            markeredgewidth=1.4,
            transform=axes.get_xaxis_transform(),
        )
    label_ends(axes, labels)


def _draw_metric(axes: Axes, runs: Sequence[tuple[Run, str]], metric: Metric | None) -> None:
    assert metric is not None
    labels = []
    for index, (run, color) in enumerate(runs):
        points = _points(run, metric)
        if points:
            steps, values = points
            axes.plot(
                steps,
                values,
                color=color,
                linewidth=1.4 if index else 3.6,
                alpha=1.0 if index else _FAINT_FIRST,
                marker="o",
                markersize=3.5 if index else 6,
                markeredgewidth=0,
            )
            labels.append((values[-1], f"{run.label} {values[-1]:.4g}", color))
    label_ends(axes, labels)


def _draw_bars(
    axes: Axes, runs: Sequence[tuple[Run, str]], values: Sequence[float], tell: Callable[[float, float], str]
) -> None:
    bars = axes.barh(range(len(runs)), values, color=[color for _, color in runs], height=0.6, alpha=0.85)
    bars[0].set_alpha(_FAINT_FIRST)
    texts = [tell(value, values[0]) if value else "-" for value in values]
    axes.bar_label(bars, texts, padding=4, fontsize=9, color=INK)
    axes.set_yticks(range(len(runs)), [run.label for run, _ in runs])
    axes.tick_params(axis="y", length=0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.grid(visible=False)
    axes.invert_yaxis()
    axes.margins(x=0.3)


def _times(value: float, first: float) -> str:
    return four_digits(value) + (f"   {value / first:.2f}x" if first and value != first else "")


def _percent(value: float, first: float) -> str:
    return f"{value:,.0f}" + (f"   {value / first - 1:+z.0%}" if first and value != first else "")


def _points(run: Run, metric: Metric) -> tuple[list[int], list[float]] | None:
    """The steps and the values of a metric, of the validation or, without those, of the training."""
    for stage in ("val", "train"):
        series: dict[str, Any] = run.curves.get("metrics", {}).get(stage, {}).get(metric.name, {})
        if series.get("steps"):
            return series["steps"], series["values"]
    return None


def _skipped(run: Run) -> list[int]:
    steps: list[int] = run.curves.get("skipped", {}).get("steps", [])
    return steps
