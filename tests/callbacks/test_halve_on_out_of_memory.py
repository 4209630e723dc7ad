"""The number of samples in a batch. How parts are run is tested in ``tests/loops/test_splitting.py``."""

from __future__ import annotations

import pytest
import torch

from trainer.callbacks import HalveOnOutOfMemory
from trainer.data.samples import part_of

X = torch.arange(10.0).view(5, 2)
Y = torch.arange(5)


def test_the_number_of_samples() -> None:
    measure = HalveOnOutOfMemory().measure
    assert measure({"x": X, "y": [Y, torch.tensor(1.0)]}) == 5
    with pytest.raises(ValueError, match=r"tensors of the lengths \[3, 5\]"):
        measure([X, torch.ones(3)])
    with pytest.raises(ValueError, match=r"\(list\) has no tensors"):
        measure(["a", 1])
    assert HalveOnOutOfMemory(split=part_of).measure([X, torch.ones(3)]) == 5
