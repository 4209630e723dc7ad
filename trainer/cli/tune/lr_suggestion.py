"""What the losses of a learning-rate range test (`trainer.cli.tune.lr_range`) suggest. Imports no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_CLEAR = 5  # times the standard deviation of a mean: a fall of less may be chance, among so many means
_MEDIAN_OF_NORMAL = 0.6745  # of the absolute value of a standard normal variable


@dataclass(frozen=True)
class Suggestion:
    """What a curve suggests.

    Args:
        lr: the learning rate; None for none.
        why: the rule, or why there is none.
        smoothed: the losses as a centred moving mean, one for each point.
        lowest: the rate at which these were lowest; None without points.
    """

    lr: float | None
    why: str
    smoothed: list[float]
    lowest: float | None


def suggest(points: Sequence[tuple[float, float]]) -> Suggestion:
    """The learning rate at which the loss falls fastest, over the logarithm of the rate.

    The slope at a point is that of the straight line (least squares) through it and its neighbours, an eighth of the
    curve in all; points after the lowest loss do not count. fastai's ``lr_find`` offers the same rule ("steep"); beyond
    it the loss still falls, but near its lowest point training is about to diverge.

    Args:
        points: pairs of a rate and a loss; rates grow by the same factor from one to the next.
    """
    losses, logs = [loss for _, loss in points], [math.log(rate) for rate, _ in points]
    reach = max(2, len(points) // 16)
    smoothed = [statistics.fmean(losses[max(0, i - reach) : i + reach + 1]) for i in range(len(losses))]
    if len(points) < 4 * reach:
        why = f"the curve has {len(points)} points, which is too few: use more tune.steps, or a smaller tune.min_lr"
        return Suggestion(None, why, smoothed, None)
    inner = range(reach, len(points) - reach)  # the means of as many points as any
    lowest = min(inner, key=smoothed.__getitem__)
    rate = points[lowest][0]
    # The spread of the loss from one point to the next, as a standard deviation, where nothing diverges yet; a mean has
    # less, by the root of their number.
    calm = losses[: max(lowest + 1, len(losses) // 2)]
    spread = statistics.median(abs(b - a) for a, b in pairwise(calm)) / (math.sqrt(2) * _MEDIAN_OF_NORMAL)
    if smoothed[reach] - smoothed[lowest] <= _CLEAR * spread / math.sqrt(2 * reach + 1):
        why = (
            "the loss does not fall clearly: use other tune.min_lr and tune.max_lr, larger batches, or more tune.steps"
        )
        return Suggestion(None, why, smoothed, rate)
    slopes = {
        i: statistics.linear_regression(logs[i - reach : i + reach + 1], losses[i - reach : i + reach + 1]).slope
        for i in range(reach, lowest + 1)
    }
    return Suggestion(points[min(slopes, key=slopes.__getitem__)][0], "where the loss falls fastest", smoothed, rate)
