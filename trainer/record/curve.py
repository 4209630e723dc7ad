"""Curves over optimizer steps: read them from ``metrics.csv``, and reduce their points without losing peaks."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Curve:
    """A curve over the optimizer steps.

    Args:
        steps: the x-values, ascending.
        values: the y-values, one for each step; may be NaN or infinite.
    """

    steps: Sequence[float] = ()
    values: Sequence[float] = ()

    def __len__(self) -> int:
        return len(self.steps)

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """Create a curve from pairs of a step and a value."""
        listed = list(points)
        return cls([step for step, _ in listed], [value for _, value in listed])

    @property
    def points(self) -> Iterator[tuple[float, float]]:
        """Pairs of a step and a value."""
        return zip(self.steps, self.values, strict=True)

    @property
    def last(self) -> float | None:
        """The last value."""
        return self.values[-1] if self.values else None

    @property
    def finite(self) -> list[float]:
        """The values that are finite."""
        return [value for value in self.values if math.isfinite(value)]

    @classmethod
    def of(cls, written: Any) -> Curve:
        """Create a curve from a series in ``run.json``; without points if ``written`` is not a series."""
        series = written if isinstance(written, Mapping) else {}
        columns = [column if isinstance(column := series.get(name), list) else [] for name in ("steps", "values")]
        points = zip(*columns, strict=False)
        return cls.through(point for point in points if all(type(number) in (int, float) for number in point))


def read_rows(file: Path) -> dict[str, Curve]:
    """Return the columns of a ``metrics.csv`` by name, or {} if the file is missing.

    Incomplete rows and cells that are not numbers are left out. If a resumed run has repeated a step, the last value
    counts.
    """
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = text[: text.rfind("\n") + 1].splitlines()
    columns: dict[str, dict[float, float]] = {}
    with suppress(csv.Error):  # an unterminated field
        for row in csv.DictReader(line for line in lines if "\0" not in line):
            if None in row or None in row.values() or (step := _number(row.pop("step", ""))) is None:
                continue
            for name, cell in row.items():
                if (value := _number(cell)) is not None:
                    columns.setdefault(name, {})[step] = value
    left_out = ("epoch", "")
    return {name: Curve.through(sorted(points.items())) for name, points in columns.items() if name not in left_out}


def thin(curve: Curve, most: int) -> Curve:
    """Reduce a curve to about ``most`` points: both ends, and the extremes of intervals of equal length.

    A spike of one step among a hundred thousand is kept, and so is one NaN or infinite value of each interval.
    """
    count = len(curve)
    if count <= most:
        return curve
    import numpy as np

    values = np.asarray(curve.values, dtype=float)
    finite = np.isfinite(values)
    low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
    indices = {0, count - 1}
    edges = np.linspace(0, count, max(1, (most - 2) // 2) + 1).astype(int)
    for start, end in pairwise(edges.tolist()):
        indices |= {int(start + low[start:end].argmin()), int(start + high[start:end].argmax())}
        if not finite[start:end].all():
            indices.add(int(start + finite[start:end].argmin()))
    return Curve.through((curve.steps[i], curve.values[i]) for i in sorted(indices))


def smooth(values: Sequence[float]) -> list[float]:
    """Return the centered moving average over about 1/40 of the points, ignoring those that are not finite."""
    import numpy as np

    points = np.asarray(values)
    finite = np.isfinite(points)
    window = np.ones(2 * (len(values) // 80) + 1)
    counts = np.convolve(finite, window, mode="same")
    sums = np.convolve(np.where(finite, points, 0.0), window, mode="same")
    means: list[float] = np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0).tolist()
    return means


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
