"""Draw charts with matplotlib, for ``curves.png`` and the page of a report. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from trainer.record.charts import Chart, Line
from trainer.record.curve import Curve, thin

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.axes import Axes

PALETTE = ("#0072b2", "#d55e00", "#009070", "#b0508f", "#b98300", "#4b4fc4", "#2b9ccb", "#7f5539")
INK, GRID, BAD, PALE = "#59616b", "#e8ebef", "#cc2a12", "#c3c9d1"


def plot(axes: Axes, chart: Chart, last_step: float = 0) -> list[tuple[Line, Curve]]:
    """Draw the lines of a chart, and return them with the points that are drawn.

    Args:
        axes: empty axes.
        chart: its content.
        last_step: lower limit for the end of the x-axis.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator

    # more than 400 points cannot be distinguished at this width; with many lines, fewer keep the report's page small
    most = max(48, min(400, 3600 // max(1, len(chart.lines))))
    lines = [(line, thin(line.curve, most)) for line in chart.lines]
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=INK, length=0, pad=5)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    for line, curve in lines:
        axes.plot(
            curve.steps,
            curve.values,
            color=PALE if line.color < 0 else PALETTE[line.color % len(PALETTE)],
            label=f"_{line.label}" if line.faint else line.label,  # no entry in the legend
            linewidth=1.0 if line.faint else 1.8,
            alpha=0.35 if line.faint else None,
            drawstyle="steps-post" if line.steps else "default",
            marker="o" if len(curve) <= 12 and not line.steps else None,
            markersize=3.4,
        )
    # pale lines do not affect the y-axis: if one of them diverges, it would flatten the others
    relevant = [curve for line, curve in lines if line.color >= 0] or [curve for _, curve in lines]
    _scale(axes, chart.scale, [value for curve in relevant for value in without_spikes(curve.values)])
    end = max([*(curve.steps[-1] for _, curve in lines if curve), last_step, 1])
    axes.set_xlim(-0.015 * end, 1.015 * end)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if crosses := chart.crosses:
        axes.plot(crosses.steps, crosses.values, "x", color=BAD, markersize=6, zorder=3, label="skipped step")
    broken = sorted({step for _, curve in lines for step, value in curve.points if not math.isfinite(value)})
    if broken:
        bottom = [0.02] * len(broken)
        axes.plot(broken, bottom, "|", color=BAD, markersize=9, transform=axes.get_xaxis_transform())
    return lines


def _scale(axes: Axes, scale: str, values: list[float]) -> None:
    """Set the scale and the range of the y-axis so that it shows ``values``."""
    if not values:
        axes.set_yticks([])
        return
    low, high = min(values), max(values)
    if low > 0 and (scale == "log2" or (scale == "auto" and high > 100 * low)):
        axes.set_yscale("log", base=2 if scale == "log2" else 10)
        axes.set_ylim(low / 2, high * 2)
        axes.minorticks_off()
        return
    margin = 0.06 * (high - low) or 0.06 * abs(high) or 0.5
    axes.set_ylim(0 if scale == "linear" and low >= 0 else low - margin, high + margin)
    axes.yaxis.set_major_formatter("{x:,.6g}")


def without_spikes(values: Iterable[float]) -> list[float]:
    """Return the finite values without the largest 0.5 %, because a spike in one batch would flatten the rest."""
    shown = sorted(value for value in values if math.isfinite(value))
    return shown[: math.ceil(0.995 * len(shown))]
