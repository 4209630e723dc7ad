"""Counts of float16 underflow. See also ``tests/callbacks/test_scale_monitor.py``."""

from __future__ import annotations

import torch

from tests.support import OnMPS
from trainer.precision.underflow import SMALLEST_NORMAL, Underflow, UnderflowProbe


def test_on_mps_nothing_is_counted_in_double_precision() -> None:
    values = torch.tensor([0.0, 1.0, SMALLEST_NORMAL, SMALLEST_NORMAL / 2, -SMALLEST_NORMAL / 4])
    found = []
    for gradient in (values, values.as_subclass(OnMPS)):
        probe = UnderflowProbe("cpu")
        probe.start([("weight", 5, gradient)])
        found.append(probe.finish())
    assert found[0] == found[1] == [Underflow("", 0.2, 0.5), Underflow("weight", 0.2, 0.5)]
