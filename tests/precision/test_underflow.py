"""Counts of float16 underflow. See also ``tests/callbacks/test_scale_monitor.py``."""

import pytest
import torch

from tests.support import OnMPS
from trainer.precision import underflow
from trainer.precision.underflow import SMALLEST_NORMAL, Underflow, UnderflowProbe, joined


def test_on_mps_nothing_is_counted_in_double_precision():
    values = torch.tensor([0.0, 1.0, SMALLEST_NORMAL, SMALLEST_NORMAL / 2, -SMALLEST_NORMAL / 4])
    found = []
    for gradient in (values, values.as_subclass(OnMPS)):
        probe = UnderflowProbe("cpu")
        probe.start([("weight", 5, gradient)])
        found.append(probe.finish())
    assert found[0] == found[1] == [Underflow("", 0.2, 0.5), Underflow("weight", 0.2, 0.5)]


@pytest.mark.parametrize("shape", [(1, 60), (60,), (7, 20), (20, 3, 1, 1)])
def test_large_gradients_are_counted_in_parts(monkeypatch, shape):
    values = torch.randn(shape).mul_(1e-4)
    values[0] = 0.0
    found = []
    for part in (2**22, 8):
        monkeypatch.setattr(underflow, "_PART", part)
        probe = UnderflowProbe("cpu")
        probe.start([("w", values.numel(), values)])
        found.append(probe.finish())
    assert found[0] == found[1]
    assert 0.0 < found[0][0].zeros <= 1.0


def test_small_gradients_are_counted_together_with_the_same_result(monkeypatch):
    monkeypatch.setattr(underflow, "_SMALL", 6)
    values = torch.tensor([0.0, 1.0, SMALLEST_NORMAL / 2, 0.0])
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([1e-6, 1e-6]), (5,), check_invariants=True)
    gradients = [values, values.view(2, 2), values.half(), values.repeat(2), sparse]
    sized = [(gradient.numel(), gradient) for gradient in gradients]
    few = joined(sized)
    assert [(name, size, gradient.numel()) for name, size, gradient in few] == [("", 8, 8), ("", 5, 5), ("", 12, 12)]
    totals = []
    for counted in (few, [("", *each) for each in sized]):
        probe = UnderflowProbe("cpu")
        probe.start(counted)
        totals.append(probe.finish()[0])
    assert totals[0] == totals[1] == Underflow("", 14 / 25, 6 / 11)
