"""Draw charts as SVG, with colors from the page's style sheet for its light and dark mode.

matplotlib draws with the colors of the light mode, which are replaced by ``var(--name)`` of the style sheet. The values
for the tooltips are added as data, downsampled like the lines.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.common.terminal import format_number
from trainer.record.charts import Chart, Line
from trainer.record.drawing import BAD, GRID, INK, PALE, PALETTE, plot

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT = 384, 208  # in CSS pixels, the units of the drawing
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 32  # margins around the axes
_BOX = [_LEFT, _TOP, _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM]
_MOST_ROWS, _MOST_COLUMNS = 100, 80  # of a heat map
_FAINTEST = 1e-6  # lower end of the colors of a heat map, as a share of the largest value
_VARIABLES = {INK: "axis", GRID: "grid", BAD: "bad", PALE: "pale"} | {c: f"s{i}" for i, c in enumerate(PALETTE)}
"""Variables of the style sheet by color."""


class DrawnChart(NamedTuple):
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
    ramp: Sequence[str] = ()


def draw(chart: Chart, last_step: float = 0) -> DrawnChart:
    """Draw a chart.

    Args:
        chart: its content.
        last_step: lower limit for the end of the x-axis, so that all charts of a page have the same axis.
    """
    remarks = []
    broken = [step for line in chart.lines for step, value in line.curve.points if not math.isfinite(value)]
    if broken:
        marks = "red" if chart.is_map else "red marks"
        remarks.append(f"{len(broken):,} values are not finite, the first at step {min(broken):,.0f} ({marks}).")
    ramp: Sequence[str] = ()
    with _axes(chart) as (axes, written):
        if chart.is_map:
            lines, data, ramp = _draw_map(axes, chart, last_step)
            if len(lines) < len(chart.lines):
                remarks.append(f"Shows the {len(lines)} of {len(chart.lines)} layers with the largest values.")
            shown = sorted(lines, key=lambda line: -(line.curve.finite or [0.0])[-1])[:3]
        else:
            named = [(line, curve) for line, curve in plot(axes, chart, last_step) if not line.faint]
            shown = [line for line, _ in named]
            points = []
            for line, curve in named:
                x, y = [int(step) for step in curve.steps], [_rounded(value) for value in curve.values]
                points.append({"name": line.label, "color": line.color, "x": x, "y": y, "steps": line.steps})
            data = {"y": list(axes.get_ylim()), "log": axes.get_yscale() == "log", "lines": points}
        data |= {"box": _BOX, "x": list(axes.get_xlim())}
    legend = [(line.label, line.color, format_number(line.curve.last)) for line in shown]
    return DrawnChart(chart, legend, _in_page(written.getvalue()), data, " ".join(remarks), ramp)


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


def _draw_map(axes: Axes, chart: Chart, last_step: float) -> tuple[list[Line], dict[str, Any], Sequence[str]]:
    """Draw a row for each line with a logarithmic color scale. Values that are not finite are red.

    Returns:
        The lines that are drawn, the values for the tooltips, and the ends of the color scale.
    """
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    lines = sorted(chart.lines, key=lambda line: -max(line.curve.finite, default=0.0))[:_MOST_ROWS]
    lines = [line for line in chart.lines if line in lines]
    steps = sorted({step for line in lines for step in line.curve.steps})
    columns = min(len(steps), _MOST_COLUMNS)
    width = (steps[-1] - steps[0]) / max(1, columns - 1) or 1
    start = steps[0] - width / 2
    values = np.full((len(lines), columns), np.nan)
    for row, line in enumerate(lines):
        for step, value in line.curve.points:
            column = min(columns - 1, int((step - start) / width))
            # The largest of a column, so that no peak is lost.
            values[row, column] = np.fmax(values[row, column], value if math.isfinite(value) else math.inf)
    known = values[np.isfinite(values) & (values > 0)]
    high = float(known.max(initial=1e-300))
    low = max(float(known.min(initial=high)), high * _FAINTEST)
    colored = np.where(np.isinf(values), 1000 * high, np.maximum(values, low))  # above the color scale
    colors = colormaps["viridis"].with_extremes(over=BAD)
    end, count = start + columns * width, len(lines)
    scale = LogNorm(low, max(high, 1.001 * low))
    axes.imshow(colored, colors, scale, aspect="auto", interpolation="none", extent=(start, end, count, 0))
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=INK, length=0, pad=5)
    axes.set_xlim(min(start, -0.015 * last_step), max(end, 1.015 * last_step))
    axes.set_yticks([0.5, count - 0.5], ["first", "last"])
    texts = {math.inf: "not finite"}
    centers = [round(start + (column + 0.5) * width) for column in range(columns)]
    cells = [[None if math.isnan(v) else texts.get(v, float(f"{v:.3g}")) for v in row] for row in values.tolist()]
    names = [line.label for line in lines]
    data = {"names": names, "steps": centers, "from": start, "width": width, "values": cells}
    return lines, {"map": data}, (format_number(low), format_number(high))


def _in_page(svg: str) -> str:
    """Return the SVG for the page: with colors of the style sheet and without fonts, unused ids and file attributes."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    for color, name in _VARIABLES.items():
        svg = svg.replace(color, f"var(--{name})")
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r"font: (\d+)px [^;\"]*", r"font-size: \1px", svg)
    used = set(re.findall(r"(?:#|url\(#)([\w-]+)", svg))
    svg = re.sub(r' id="([\w-]+)"', lambda match: match[0] if match[1] in used else "", svg)
    opening, _, rest = svg.partition(">")
    opening = re.sub(r' (?:xmlns(?::xlink)?|version|width|height)="[^"]*"', "", opening)
    return f"{opening}>{rest}".replace("xlink:href", "href").strip()


def _rounded(value: float) -> float | None:
    """Round to five digits, except whole numbers such as a loss scale. Return None if the value is not finite."""
    if not math.isfinite(value):
        return None
    return value if value == int(value) and abs(value) < 2**53 else float(f"{value:.5g}")
