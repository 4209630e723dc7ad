from __future__ import annotations

import math
import subprocess
import sys

import pytest
from matplotlib.figure import Figure

from trainer.callbacks.plotting import fit_loss_axis, label_ends, smooth, without_spikes


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
    ("values", "scale", "limits"),
    [
        ([1.0, 3.0, math.nan], "linear", (0.9, 3.1)),
        ([-1.0, 1000.0], "linear", (-51.05, 1050.05)),
        ([1.0, 101.0], "log", None),
        ([math.inf], "linear", (0.0, 1.0)),
    ],
)
def test_axis_of_a_loss(values, scale, limits):
    axes = Figure().subplots()
    fit_loss_axis(axes, values)
    assert axes.get_yscale() == scale
    if limits is not None:
        assert axes.get_ylim() == pytest.approx(limits)


def test_labels_are_kept_apart():
    axes = Figure().subplots()
    axes.plot([0, 1], [0.0, 1.0])
    label_ends(axes, [(0.5, "a", "k"), (0.51, "b", "k"), (0.505, "c", "k"), (0.9, "d", "k"), (math.nan, "e", "k")])
    heights = {text.get_text(): text.xy[1] for text in axes.texts}
    assert sorted(heights, key=heights.get) == ["a", "c", "b", "d"]
    assert heights["c"] - heights["a"] > 0.095
    assert heights["b"] - heights["c"] > 0.095
    assert heights["c"] == pytest.approx(0.505, abs=0.01)


def test_plotting_imports_no_torch():
    program = "import sys, trainer.callbacks.plotting; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
