"""The style of our figures: colors, axes, and labels at the ends of curves instead of a legend. Imports no torch."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT = "#333333", "#bbbbbb"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""The palette of Okabe and Ito, which color-blind readers can distinguish."""


def smooth(values: list[float]) -> list[float]:
    """Return the centered moving average over about 1/40 of the points, ignoring those that are not finite."""
    import numpy as np

    points = np.asarray(values)
    finite = np.isfinite(points)
    window = np.ones(2 * (len(values) // 80) + 1)
    counts = np.convolve(finite, window, mode="same")
    sums = np.convolve(np.where(finite, points, 0.0), window, mode="same")
    means: list[float] = np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0).tolist()
    return means


def canvas(title: str, width: float, height: float) -> Figure:
    """Create an empty figure with a title; sizes in inches. It has no window, and is not registered with ``pyplot``."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # at DEBUG it logs hundreds of lines about fonts
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, facecolor="white", layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", size=12, weight="bold", color=INK)
    return figure


def style(axes: Axes, title: str) -> None:
    """Set the title and the style of axes."""
    axes.set_title(title, loc="left", size=10, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9, length=3, color=FAINT)
    axes.grid(axis="y", color="#eeeeee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)


def fit_loss_axis(axes: Axes, values: Iterable[float]) -> None:
    """Set the range of a loss axis so that it shows ``values``; logarithmic if they span more than two decades.

    Args:
        axes: the axes with the loss.
        values: the values to show; those that are not finite are ignored.
    """
    shown = [value for value in values if math.isfinite(value)]
    if shown and min(shown) > 0 and max(shown) > 100 * min(shown):
        axes.set_yscale("log")
    elif shown:
        margin = 0.05 * (max(shown) - min(shown)) or 0.5
        axes.set_ylim(min(shown) - margin, max(shown) + margin)


def without_spikes(values: Iterable[float]) -> list[float]:
    """Return the finite values without the largest 0.5 %, because a spike in one batch would flatten the rest."""
    shown = sorted(value for value in values if math.isfinite(value))
    return shown[: math.ceil(0.995 * len(shown))]


def label_ends(axes: Axes, labels: list[tuple[float, str, str]]) -> None:
    """Label each curve at its end, in its color, and keep the labels apart.

    Args:
        axes: the axes with the curves, with their final scale.
        labels: last y-value, name and color of each curve.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    axes.autoscale_view()
    ends = [(float(to_axes.transform((0, y))[1]), name, color) for y, name, color in labels if math.isfinite(y)]
    ends.sort()
    heights = [end[0] for end in ends]
    for _ in range(50):  # push neighbors apart
        for lower, upper in pairwise(range(len(heights))):
            overlap = max(0.0, 0.1 - (heights[upper] - heights[lower]))
            heights[lower] -= overlap / 2
            heights[upper] += overlap / 2
    for height, (_, name, color) in zip(heights, ends, strict=True):
        axes.annotate(
            name,
            xy=(1, height),
            xycoords="axes fraction",
            xytext=(6, 0),
            textcoords="offset points",
            verticalalignment="center",
            fontsize=9,
            color=color,
        )
