"""A curve with a limited number of points."""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Series:
    """A curve that drops every second point when it would get more than ``max_points``.

    Args:
        max_points: maximum number of points.

    Attributes:
        steps: x-values, in optimizer steps, ascending.
        max_points: as given.
        stride: the caller must append only every ``stride``-th point. It doubles when points are dropped.
    """

    def __init__(self, max_points: int) -> None:
        self.steps: list[int] = []
        self.stride = 1
        self.max_points = max_points
        self._floats: list[float] = []  # y-values
        self._tensors: list[Tensor] = []  # the next y-values, 0-dim and on their device

    def __len__(self) -> int:
        return len(self.steps)

    def append(self, step: int, value: float | Tensor) -> None:
        """Add a point. A 0-dim tensor stays on its device until `read`."""
        if len(self.steps) >= self.max_points:
            self.read()  # a host-device synchronization, once in `max_points / 2` points
            del self.steps[1::2], self._floats[1::2]
            self.stride *= 2
        self.steps.append(step)
        if isinstance(value, Tensor):
            self._tensors.append(value)
        else:
            self.read()
            self._floats.append(value)

    def read(self) -> list[float]:
        """Return the y-values. A host-device synchronization if any are on the device."""
        if self._tensors:
            self._floats += torch.stack(self._tensors).float().tolist()
            self._tensors.clear()
        return self._floats

    def truncate(self, step: int) -> None:
        """Drop the points after `step`."""
        keep = bisect_right(self.steps, step)
        del self.steps[keep:], self.read()[keep:]

    def state_dict(self) -> dict[str, Any]:
        """Return the points as lists of numbers."""
        return {"steps": list(self.steps), "values": list(self.read()), "stride": self.stride}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the points by those of a checkpoint."""
        self.steps = list(state_dict["steps"])
        self._floats = list(state_dict["values"])
        self._tensors.clear()
        self.stride = state_dict["stride"]
