"""Draw charts as SVG with matplotlib, with colors from the page's style sheet for its light and dark mode.

matplotlib draws with placeholder colors, which are replaced by ``var(--name)`` of the style sheet. The values for the
tooltips are added as data, downsampled like the lines.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.callbacks.plotting import without_spikes
from trainer.cli.report.charts import Chart, Line
from trainer.record.curve import Curve, thin

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.axes import Axes

PALETTE = 8
"""Number of line colors in the style sheet: --s0 to --s7."""

_WIDTH, _HEIGHT = 384, 208  # in CSS pixels, the units of the drawing
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 32  # margins around the axes
_BOX = [_LEFT, _TOP, _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM]
_MOST_ROWS, _MOST_COLUMNS = 100, 80  # of a heat map
_FAINTEST = 1e-6  # lower end of the colors of a heat map, as a share of the largest value
_INK, _GRID, _BAD, _PALE = "#010101", "#020202", "#030303", "#040404"
_NAMES = {_INK: "axis", _GRID: "grid", _BAD: "bad", _PALE: "pale"}
_POINTS = 400  # largest number of points of a line; more cannot be distinguished at this width
_ALL_POINTS = 3600  # largest number of points of all lines of a chart
_MIN_CURVE_POINTS = 48
_DECADES = 100.0
_SUPERSCRIPT = str.maketrans("-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")


@dataclass(frozen=True)
class DrawnChart:
    """A drawn chart.

    Args:
        chart: its content.
        legend: label, index of the color and last value of each line in the legend.
        svg: the picture.
        data: values for the tooltips.
        remark: a remark, for example about values that are not finite, or "".
        ramp: for a heat map, the values at both ends of its color scale; otherwise empty.
    """

    chart: Chart
    legend: Sequence[tuple[str, int, str]]
    svg: str
    data: dict[str, Any]
    remark: str
    ramp: tuple[str, str] | tuple[()] = ()


def draw(chart: Chart, last_step: float = 0) -> DrawnChart:
    """Draw a chart.

    Args:
        chart: its content.
        last_step: lower limit for the end of the x-axis, so that all charts of a page have the same axis.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    with _axes(chart) as (axes, written):
        axes.tick_params(colors=_INK, labelsize=12, length=0, pad=5)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=2))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: _short(step)))
        if chart.is_map:
            data, shown, remark, ramp = _draw_map(axes, chart, last_step)
        else:
            data, shown, remark, ramp = _draw(axes, chart, last_step)
        data = {"box": _BOX, "x": list(axes.get_xlim()), **data}
    broken = [step for line in chart.lines for step, value in _points(line.curve) if not math.isfinite(value)]
    if broken:
        marks = "red" if chart.is_map else "red marks"
        count = f"{len(broken):,} values are not finite, the first at step {min(broken):,.0f} ({marks})."
        remark = f"{count} {remark}".strip()
    legend = [(line.label, line.color, format_number(line.curve.last)) for line in shown]
    return DrawnChart(chart, legend, _in_page(written.getvalue(), chart), data, remark, ramp)


@contextmanager
def _axes(chart: Chart) -> Iterator[tuple[Axes, io.StringIO]]:
    """Yield axes to draw in, and a file that contains the picture as SVG after the context exits."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    written = io.StringIO()
    left, top, width, height = _BOX
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.title, "font.size": 12}):
        figure = Figure(figsize=(_WIDTH / 72, _HEIGHT / 72), dpi=72)
        FigureCanvasSVG(figure)
        bottom = _HEIGHT - top - height
        yield figure.add_axes((left / _WIDTH, bottom / _HEIGHT, width / _WIDTH, height / _HEIGHT)), written
        no_metadata = {"Creator": None, "Date": None, "Format": None, "Type": None}
        figure.savefig(written, format="svg", transparent=True, metadata=no_metadata)


_Ramp = tuple[str, str] | tuple[()]


def _draw_map(axes: Axes, chart: Chart, last_step: float) -> tuple[dict[str, Any], Sequence[Line], str, _Ramp]:
    """Draw a row for each line with a logarithmic color scale; values that are not finite are red."""
    import numpy as np
    from matplotlib import colormaps

    lines = sorted(chart.lines, key=lambda line: -max(line.curve.finite, default=0.0))[:_MOST_ROWS]
    lines = [line for line in chart.lines if line in lines]
    steps = sorted({step for line in lines for step in line.curve.steps})
    columns = min(len(steps), _MOST_COLUMNS)
    width = (steps[-1] - steps[0]) / max(1, columns - 1) or 1
    start = steps[0] - width / 2
    values = np.full((len(lines), columns), np.nan)
    broken = np.zeros_like(values, dtype=bool)
    for row, line in enumerate(lines):
        for step, value in _points(line.curve):
            column = min(columns - 1, int((step - start) / width))
            if not math.isfinite(value):
                broken[row, column] = True
            elif not value <= values[row, column]:  # the largest of a column, so that no peak is lost
                values[row, column] = value
    known = values[np.isfinite(values) & (values > 0)]
    low, high = (float(known.min()), float(known.max())) if known.size else (1.0, 1.0)
    low = max(low, high * _FAINTEST)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = (np.log(np.clip(values, low, None)) - math.log(low)) / (math.log(high / low) or 1.0)
    pixels = colormaps["viridis"](np.clip(np.nan_to_num(shares), 0.0, 1.0))
    pixels[np.isnan(values)] = 0.0  # transparent
    pixels[broken] = (0.86, 0.2, 0.12, 1.0)
    axes.spines[:].set_visible(False)
    axes.imshow(pixels, aspect="auto", interpolation="none", extent=(start, start + columns * width, len(lines), 0))
    axes.set_xlim(min(start, -0.015 * last_step), max(start + columns * width, 1.015 * last_step))
    axes.set_yticks([0.5, len(lines) - 0.5] if len(lines) > 1 else [0.5])
    axes.set_yticklabels(["first", "last"] if len(lines) > 1 else ["all"])
    cells = [zip(*row, strict=True) for row in zip(values.tolist(), broken.tolist(), strict=True)]
    data = {
        "names": [line.label for line in lines],
        "steps": [round(start + (column + 0.5) * width) for column in range(columns)],
        "from": start,
        "width": width,
        "values": [
            ["not finite" if bad else None if math.isnan(v) else float(f"{v:.3g}") for v, bad in row] for row in cells
        ],
    }
    note = f"Shows the {len(lines)} of {len(chart.lines)} layers with the largest values."
    largest = sorted(lines, key=lambda line: -(line.curve.finite or [0.0])[-1])[:3]
    return (
        {"map": data},
        largest,
        note if len(lines) < len(chart.lines) else "",
        (format_number(low), format_number(high)),
    )


def format_number(value: float | None) -> str:
    """Return a number as text, with four digits or all digits of a whole number; "-" for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    whole = value == int(value) and abs(value) < 1e9
    return f"{value:,.0f}" if whole else f"{value:,.4g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.3g}"


def _draw(axes: Axes, chart: Chart, last_step: float) -> tuple[dict[str, Any], Sequence[Line], str, _Ramp]:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    most = max(_MIN_CURVE_POINTS, min(_POINTS, _ALL_POINTS // max(1, len(chart.lines))))
    lines = [(line, thin(line.curve, most)) for line in chart.lines]
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.grid(axis="y", color=_GRID, linewidth=1)
    axes.set_axisbelow(True)
    for line, curve in lines:
        color = _PALE if line.color < 0 else f"#0a0b{line.color % PALETTE:02x}"
        values = [value if math.isfinite(value) else math.nan for value in curve.values]
        lonely = 0 < len(values) <= 12
        axes.plot(
            curve.steps, values, color=color, solid_joinstyle="round", solid_capstyle="round",
            linewidth=1.0 if line.faint else 1.2 if line.color < 0 else 1.8,
            alpha=0.35 if line.faint else None,
            drawstyle="steps-post" if line.steps else "default",
            marker="o" if lonely and not line.steps and not line.faint else None,
            markersize=3.4,
        )  # fmt: skip
    # pale lines do not affect the axes: if one of them diverges, it would flatten the others
    relevant = [curve for line, curve in lines if line.color >= 0] or [curve for _, curve in lines]
    scale = _scale(chart, relevant)
    _limit(axes, chart, scale, relevant)
    steps = [step for _, curve in lines for step in ((curve.steps[0], curve.steps[-1]) if curve else ())]
    end = max([*steps, last_step, 1])
    axes.set_xlim(-0.015 * end, 1.015 * end)
    if scale == "linear":
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, min_n_ticks=3))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    else:
        base = 2 if scale == "log2" else 10
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(base, numticks=6))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _power(value, base)))
        if base == 10 and sum(1 for tick in axes.get_yticks() if axes.get_ylim()[0] <= tick <= axes.get_ylim()[1]) < 2:
            axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5), numticks=8))
    if chart.crosses:
        axes.plot(
            chart.crosses.steps, chart.crosses.values, "x", color=_BAD, markersize=6, markeredgewidth=1.6, zorder=3
        )
    if not any(curve.finite for _, curve in lines):
        axes.set_yticks([])  # there is no value to read
    _mark_broken(axes, [curve for _, curve in lines])
    named = [(line, curve) for line, curve in lines if not line.faint]
    data = {
        "y": list(axes.get_ylim()),
        "log": scale != "linear",
        "lines": [
            {
                "name": line.label,
                "color": line.color,
                "x": [int(step) for step in curve.steps],
                "y": [_rounded(value) for value in curve.values],
                **({"steps": True} if line.steps else {}),
            }
            for line, curve in named
        ],
    }
    return data, [line for line, _ in named], "", ()


def _scale(chart: Chart, curves: Iterable[Curve]) -> str:
    """Return the scale of the y-axis: ``linear``, ``log`` or ``log2``."""
    values = [value for curve in curves for value in curve.finite]
    if not values or min(values) <= 0 or chart.scale == "linear":
        return "linear"
    if chart.scale == "log2":
        return "log2"
    shown = without_spikes(values)
    return "log" if max(shown) > _DECADES * min(shown) else "linear"


def _limit(axes: Axes, chart: Chart, scale: str, curves: Sequence[Curve]) -> None:
    """Set the limits of the y-axis to the range of the values without a few spikes that would flatten the lines."""
    shown = [value for curve in curves for value in without_spikes(curve.values)]
    if not shown:
        return
    low, high = min(shown), max(shown)
    if scale == "log2":
        axes.set_yscale("log", base=2)
        axes.set_ylim(low / 2, high * 2)
    elif scale == "log":
        axes.set_yscale("log")
        axes.set_ylim(low / 1.3, high * 1.3)
    else:
        if chart.scale == "linear" and low >= 0:  # axes of rates, shares and counts start at zero
            axes.set_ylim(0, 1.08 * high or 1)
        else:
            margin = 0.06 * (high - low) or 0.06 * abs(high) or 0.5
            axes.set_ylim(low - margin, high + margin)


def _mark_broken(axes: Axes, curves: Iterable[Curve]) -> None:
    """Draw marks on the lower edge at values that are not finite."""
    steps = sorted({step for curve in curves for step, value in _points(curve) if not math.isfinite(value)})
    if steps:
        axes.plot(
            steps, [0.02] * len(steps), "|", color=_BAD, markersize=9, markeredgewidth=1.4, clip_on=False,
            transform=axes.get_xaxis_transform(),
        )  # fmt: skip


def _points(curve: Curve) -> Iterable[tuple[float, float]]:
    return zip(curve.steps, curve.values, strict=True)


def _in_page(svg: str, chart: Chart) -> str:
    """Return the SVG for the page: with colors of the style sheet and without fonts, unused ids and file attributes."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    for color, name in _NAMES.items():
        svg = svg.replace(color, f"var(--{name})")
    svg = re.sub(r"#0a0b([0-9a-f]{2})", lambda found: f"var(--s{int(found[1], 16)})", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r"font: (\d+)px [^;\"]*", r"font-size: \1px", svg)
    used = set(re.findall(r"(?:#|url\(#)([\w-]+)", svg))
    svg = re.sub(r' id="([\w-]+)"', lambda found: found[0] if found[1] in used else "", svg)
    svg = (
        re.sub(r' (?:xmlns(?::xlink)?|version|width|height)="[^"]*"', "", svg.partition(">")[0])
        + ">"
        + svg.partition(">")[2]
    )
    svg = svg.replace("xlink:href", "href").replace("stroke-dasharray: none; ", "")
    return re.sub(r"\s*\n\s*", "\n", svg).strip()


def _rounded(value: float) -> float | None:
    """Round to five digits, except whole numbers such as a loss scale. Return None if the value is not finite."""
    if not math.isfinite(value):
        return None
    return value if value == int(value) and abs(value) < 2**53 else float(f"{value:.5g}")


def _short(step: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(step) >= 10 * size or (size == 1e6 and abs(step) >= size):
            return f"{step / size:g}{letter}"
    return f"{step:,.6g}"


def _tick(value: float) -> str:
    if value and not 1e-4 <= abs(value) < 1e6:
        digits, _, power = f"{value:.2g}".partition("e")
        return f"{digits}e{int(power)}" if power else digits
    return f"{value:,.10g}" if abs(value) >= 1 else f"{value:.6g}"


def _power(value: float, base: int) -> str:
    power = math.log(value, base)
    if base == 10 and 1e-3 <= value <= 1e4:
        return f"{value:,.6g}"
    if abs(power - round(power)) > 1e-6:
        return f"{value:.2g}"
    return f"{base}{str(round(power)).translate(_SUPERSCRIPT)}"
