"""Suggestions for curves: known answers, noise, and curves without a suggestion."""

import math
import random

import pytest

from trainer.cli.tune import suggest

RATES = [1e-6 * 10 ** (7 * step / 99) for step in range(100)]


def sigmoid(steepest, noise=0.0, seed=0):
    """Falls from 2.3 to 0.3, steepest at ``steepest``, and rises from a hundred times that on."""
    draw = random.Random(seed)
    curve = []
    for rate in RATES:
        x = math.log10(rate / steepest)
        curve.append((rate, 2.3 - 2 / (1 + math.exp(-3 * x)) + math.exp(4 * (x - 2)) + draw.gauss(0, noise)))
    return curve


@pytest.mark.parametrize("steepest", [1e-4, 1e-2])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_suggestion_is_at_the_steepest_descent(steepest, noise):
    tolerance = 1.2 if noise == 0 else 3.0
    rate, _ = suggest(sigmoid(steepest, noise))
    assert steepest / tolerance < rate < steepest * tolerance
    assert rate in RATES


def test_slope_is_over_the_logarithm_of_the_rate():
    """Over the rate itself both curves would be steepest at the first."""
    square = [(rate, (1 - math.log10(rate)) ** 2) for rate in RATES]  # falls fastest at the left
    root = [(rate, math.sqrt(max(0.0, 1 - math.log10(rate)))) for rate in RATES]  # and this at the right
    assert suggest(square)[0] < 1e-5
    assert suggest(root)[0] > 1.0


def test_points_after_the_minimum_are_ignored():
    curve = sigmoid(1e-3)[:60]
    tail = [(rate, 9.0 if step < 20 else 1.0) for step, rate in enumerate(RATES[60:])]  # a cliff downwards
    assert suggest(curve + tail) == suggest(curve)


def test_noise_rarely_leads_to_a_suggestion():
    found = 0
    for seed in range(200):
        draw = random.Random(seed)
        found += suggest([(rate, 2.3 + draw.gauss(0, 0.1)) for rate in RATES])[0] is not None
    assert found <= 4


def test_curves_without_a_decrease():
    draw = random.Random(0)
    rising = [(rate, 2.3 + step / 20 + draw.gauss(0, 0.1)) for step, rate in enumerate(RATES)]
    for curve in (rising, [(rate, 1.0) for rate in RATES]):
        rate, reason = suggest(curve)
        assert rate is None
        assert "does not decrease clearly" in reason


@pytest.mark.parametrize("points", [0, 7])
def test_too_few(points):
    rate, reason = suggest(sigmoid(1e-3)[:points])
    assert rate is None
    assert f"{points} points: use more" in reason
