"""Replaced kernels of torch."""

import pytest
import torch

from trainer.precision.kernels import Replaced, Replacement, own_kernel


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of the compiler
def test_backward_pass_between_two_graphs_calls_them_without_tracing():
    kernel = own_kernel("mm", "CPU")
    replacement, weight = Replacement("CPU", lambda: {"mm": Replaced(kernel, kernel)}), torch.ones(2, 2)

    def step(value):
        (value @ weight).sum().backward()
        return value.grad * 2

    torch.compiler.reset()
    with replacement.used():
        result = torch.compile(step, backend="eager")(torch.ones(3, 2, requires_grad=True))
    torch.compiler.reset()
    assert torch.equal(result, torch.full((3, 2), 4.0))
