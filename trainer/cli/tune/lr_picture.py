"""The picture of a learning-rate range test. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer.callbacks.plotting import INK, PALETTE, fit_loss_axis, style

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CURVE, _MARK = PALETTE[0], PALETTE[1]
_FAINT = "#888888"
_ENDS = {
    "the last rate": "",
    "divergence": ", until it diverged",
    "overflows": ", until every update overflowed",
    "the end of the fit": ", until the data ended",
}


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

    rates, losses = [rate for rate, _ in points], [loss for _, loss in points]
    figure = Figure(figsize=(8, 4.5), dpi=150, facecolor="white", layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", size=12, weight="bold", color=INK)
    axes = figure.add_subplot()
    style(axes, f"Training loss after a weight update with each learning rate{_ENDS[ended_by]}")
    axes.set_xscale("log")
    axes.plot(rates, losses, ".", color=_CURVE, alpha=0.35, markersize=4, label="one batch")
    axes.plot(rates, smoothed, color=_CURVE, linewidth=2, solid_capstyle="round", label="smoothed")
    fit_loss_axis(axes, _shown(losses, smoothed))
    axes.set_xlabel("learning rate", color=INK)
    axes.set_ylabel("loss", color=INK)
    if current is not None and rates[0] <= current <= rates[-1]:
        _mark(axes, current, 0.02, f"now {current:.2g}", ":", color=_FAINT)
    if suggestion is not None:
        height = smoothed[rates.index(suggestion)]
        axes.plot([suggestion], [height], "o", color=_MARK, markersize=7, markeredgecolor="white", zorder=3)
        white = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        _mark(axes, suggestion, 0.95, f"suggestion {suggestion:.2g}", "--", color=_MARK, weight="bold", bbox=white)
    axes.legend(loc="lower left", frameon=False, fontsize=9, labelcolor=INK)
    return figure


def _mark(axes: Axes, rate: float, height: float, text: str, line: str, *, color: str, **font: Any) -> None:
    axes.axvline(rate, color=color, linewidth=1.1, linestyle=line, zorder=1)
    axes.annotate(
        text,
        (rate, height),
        xycoords=("data", "axes fraction"),
        xytext=(5, 0),
        textcoords="offset points",
        fontsize=9,
        color=color,
        **font,
    )


def _shown(losses: Sequence[float], smoothed: Sequence[float]) -> list[float]:
    """The losses to show: all up to the lowest mean, and of a rise behind it about as much as has fallen."""
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__)
    fall = max(smoothed[: lowest + 1]) - smoothed[lowest]
    rise = min(max(smoothed), smoothed[lowest] + 2 * fall)
    return [*losses[: lowest + 1], *smoothed[: lowest + 1], rise, min(losses)]
