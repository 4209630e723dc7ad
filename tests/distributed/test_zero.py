"""Parts of ``ZeroModule`` that need no process group. Whole runs: tests/distributed/test_deepspeed.py."""

import pytest
import torch
from torch import nn

from trainer.distributed.zero import ZeroModule


def zero_module(module):
    zero = ZeroModule.__new__(ZeroModule)
    zero.module = module
    return zero


class Counts(nn.Module):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def get_extra_state(self):
        return self.steps

    def set_extra_state(self, state):
        self.steps = state


def test_extra_states_are_loaded():
    new = nn.Sequential(Counts(0), Counts(torch.zeros(1)))
    zero_module(new).load_module_state(nn.Sequential(Counts(3), Counts(torch.ones(2))).state_dict(), strict=True)
    assert (new[0].steps, new[1].steps.tolist()) == (3, [1, 1])


def test_buffer_of_another_shape_is_refused():
    zero = zero_module(nn.BatchNorm1d(3, affine=False))
    state = {**zero.module.state_dict(), "running_mean": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r"size mismatch for running_mean: got \(1,\), expected \(3,\)"):
        zero.load_module_state(state, strict=True)
