"""The picture of a learning-rate range test. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer.callbacks.plotting import INK, PALETTE, style

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.figure import Figure

_CURVE, _MARK = PALETTE[0], PALETTE[1]
_FAINT = "#888888"


def draw(
    points: Sequence[tuple[float, float]],
    smoothed: Sequence[float],
    *,
    suggestion: float | None,
    current: float | None,
    ended_by: str,
    title: str,
) -> Figure:
    """Loss against learning rate.

    Args:
        points: pairs of a rate and the loss after an update with it; at least one.
        smoothed: their losses, smoothed.
        suggestion: the rate to mark; None for none.
        current: the config's own rate, marked faintly; None for none.
        ended_by: how the test ended, as `trainer.cli.tune.lr_range.LearningRateSweep` says.
        title: headline of the figure.

    Returns:
        The figure, bound to no window.
    """
    from matplotlib.figure import Figure

    rates = [rate for rate, _ in points]
    figure = Figure(figsize=(8, 4.5), dpi=150, facecolor="white", layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", size=12, weight="bold", color=INK)
    axes = figure.add_subplot()
    style(axes, "Training loss after a weight update with each learning rate")
    axes.set_xscale("log")
    axes.plot(rates, [loss for _, loss in points], ".", color=_CURVE, alpha=0.35, markersize=4, label="one batch")
    axes.plot(rates, smoothed, color=_CURVE, linewidth=2, solid_capstyle="round", label="smoothed")
    axes.set_ylim(*_range([loss for _, loss in points], smoothed))
    axes.set_xlabel("learning rate", color=INK)
    axes.set_ylabel("loss", color=INK)
    if current is not None and rates[0] <= current <= rates[-1]:
        axes.axvline(current, color=_FAINT, linewidth=1, linestyle=":", zorder=1)
        axes.annotate(
            f"now {current:.2g}",
            (current, 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=9,
            color=_FAINT,
        )
    if suggestion is not None:
        height = smoothed[rates.index(suggestion)]
        axes.axvline(suggestion, color=_MARK, linewidth=1.2, linestyle="--", zorder=1)
        axes.plot([suggestion], [height], "o", color=_MARK, markersize=7, markeredgecolor="white", zorder=3)
        axes.annotate(
            f"suggestion {suggestion:.2g}",
            (suggestion, 0.95),
            xycoords=("data", "axes fraction"),
            xytext=(6, 0),
            textcoords="offset points",
            fontsize=10,
            weight="bold",
            color=_MARK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )
    if ended_by != "the last rate":
        axes.annotate(
            {"divergence": "diverged", "overflows": "only overflows"}.get(ended_by, "data ended"),
            (rates[-1], 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color=_FAINT,
        )
    axes.legend(loc="lower left", frameon=False, fontsize=9, labelcolor=INK)
    return figure


def _range(losses: Sequence[float], smoothed: Sequence[float]) -> tuple[float, float]:
    """The losses to show: all up to the lowest mean, and of a rise behind it about as much as has fallen."""
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__)
    before = losses[: lowest + 1]
    fall = max(smoothed[: lowest + 1]) - smoothed[lowest]
    top = max(*before, min(max(smoothed), smoothed[lowest] + 2 * fall), smoothed[lowest])
    low = min(*losses, smoothed[lowest])
    margin = 0.06 * (top - low) or 0.5
    return low - margin, top + margin
