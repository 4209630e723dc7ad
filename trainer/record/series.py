"""Points of a curve, never too many of them."""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Series:
    """Points of a curve, thinned out to every second one whenever there are too many.

    Args:
        max_points: The most points that are kept.

    Attributes:
        steps: x-values, in optimizer steps, ascending.
        max_points: As given.
        stride: How many points there were for one that is kept: a power of two.
    """

    def __init__(self, max_points: int) -> None:
        self.steps: list[int] = []
        self.stride = 1
        self.max_points = max_points
        self._floats: list[float] = []  # y-values
        self._tensors: list[Tensor] = []  # those that follow, still unread on their device; all 0-dim

    def __len__(self) -> int:
        return len(self.steps)

    def append(self, step: int, value: float | Tensor) -> None:
        """Adds a point; a 0-dim tensor stays on its device until `read`."""
        if len(self.steps) >= self.max_points:
            self.read()  # host-device synchronisation, once in `max_points / 2` points
            del self.steps[1::2], self._floats[1::2]
            self.stride *= 2
        self.steps.append(step)
        if isinstance(value, Tensor):
            self._tensors.append(value)
        else:
            self.read()
            self._floats.append(value)

    def read(self) -> list[float]:
        """Returns the y-values. One host-device synchronisation, if any are still on the device."""
        if self._tensors:
            self._floats += torch.stack(self._tensors).float().tolist()
            self._tensors.clear()
        return self._floats

    def truncate(self, step: int) -> None:
        """Drops the points after `step`."""
        keep = bisect_right(self.steps, step)
        del self.steps[keep:], self.read()[keep:]

    def state_dict(self) -> dict[str, Any]:
        """The points, as lists of numbers."""
        return {"steps": list(self.steps), "values": list(self.read()), "stride": self.stride}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes up the points of a checkpoint in place of its own."""
        self.steps = list(state_dict["steps"])
        self._floats = list(state_dict["values"])
        self._tensors.clear()
        self.stride = state_dict["stride"]
