import math

import pytest
from matplotlib.figure import Figure

from trainer.record.charts import Chart, Line
from trainer.record.curve import Curve, smooth
from trainer.record.drawing import PALETTE, plot, without_spikes


def test_curve_is_smoothed_over_a_fortieth_of_it():
    assert smooth([1.0, 5.0, 3.0]) == [1.0, 5.0, 3.0]
    values = [float(i % 2) for i in range(80)]  # a window of three
    assert smooth(values)[1:-1] == pytest.approx([(1 + i % 2 * -1 + 1) / 3 for i in range(1, 79)])
    assert smooth([math.nan, 2.0])[1] == 2.0
    assert math.isnan(smooth([math.nan, 2.0])[0])
    assert smooth([0.0, math.inf, *[4.0] * 78])[:3] == pytest.approx([0.0, 2.0, 4.0])


def test_largest_half_percent_is_left_out():
    assert without_spikes([math.inf, *map(float, range(400)), math.nan]) == list(range(398))
    assert without_spikes([3.0, 1.0]) == [1.0, 3.0]
    assert without_spikes([math.nan]) == []


@pytest.mark.parametrize(
    ("values", "wanted", "scale", "limits"),
    [
        ([1.0, 3.0, math.nan], "auto", "linear", (0.88, 3.12)),
        ([-1.0, 1000.0], "auto", "linear", (-61.06, 1060.06)),
        ([1.0, 101.0], "auto", "log", (0.5, 202.0)),
        ([1.0, 101.0], "linear", "linear", (0.0, 107.0)),
        ([1.0, 2.0], "log2", "log", (0.5, 4.0)),
    ],
)
def test_axis(values, wanted, scale, limits):
    axes = Figure().subplots()
    plot(axes, Chart("a", [Line("b", Curve([*range(len(values))], values))], wanted))
    assert axes.get_yscale() == scale
    assert axes.get_ylim() == pytest.approx(limits, abs=0.01)


def test_colors_of_lines_are_no_greys():
    """Lines of other runs are grey."""
    for color in PALETTE:
        channels = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
        assert max(channels) - min(channels) > 60, color
