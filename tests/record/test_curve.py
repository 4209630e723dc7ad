"""Curves of ``metrics.csv``, and thinning them out."""

import math
import random

from trainer.cli.report.svg_charts import format_number
from trainer.record.curve import Curve, read_rows, thin


def test_thinning_keeps_ends_and_extremes():
    values = [random.Random(0).random() for _ in range(10_000)]
    values[1234], values[8765] = 50.0, -50.0
    thinned = thin(Curve([*range(10_000)], values), 100)
    assert len(thinned) <= 100
    assert list(thinned.steps) == sorted(set(thinned.steps))
    assert {0, 9999, 1234, 8765} <= set(thinned.steps)
    assert [values[int(step)] for step in thinned.steps] == list(thinned.values)


def test_thinning_keeps_one_that_is_not_finite():
    values = [0.0] * 1000
    values[500:504] = [math.nan, math.inf, -math.inf, math.nan]
    assert any(not math.isfinite(value) for value in thin(Curve([*range(1000)], values), 50).values)
    few = Curve([1, 2, 3], [3.0, math.nan, 1.0])
    assert thin(few, 3) is few


def test_rows_of_repeated_steps_and_incomplete_rows(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text("epoch,step,a\n0,1,1.0\n0,2,2.0\n0,3,3.0\n0,2,20.0\n0,3,30.0\n0,4,many\n0,5\n0,6,4")
    assert read_rows(file) == {"a": Curve([1.0, 2.0, 3.0], [1.0, 20.0, 30.0])}


def test_numbers_as_text():
    numbers = (65536.0, 0.94444, 1e-5, math.nan, None, 1.5e30)
    assert [format_number(number) for number in numbers] == ["65,536", "0.9444", "1e-05", "nan", "-", "1.5e+30"]
