from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from trainer.engine.optimizer_calls import needs_closure


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize(
    ("make", "expected"),
    [(torch.optim.SGD, False), (torch.optim.AdamW, False), (torch.optim.LBFGS, True), (torch.optim.Rprop, False)],
)
def test_needs_closure(make, expected, scheduled):
    optimizer = make([nn.Parameter(torch.zeros(1))], lr=0.1)
    if scheduled:  # which wraps the optimizer's step
        lr_scheduler.StepLR(optimizer, 1)
    assert needs_closure(optimizer) is expected
