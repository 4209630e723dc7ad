import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from trainer.common.session import Session
from trainer.precision.compilation import CompiledForward
from trainer.record.flops import PEAKS, FlopCounter, is_compiled, peak_flops


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", False, 989.4),
        ("NVIDIA H100 80GB HBM3", "32-true", True, 494.7),
        ("NVIDIA H100 80GB HBM3", "32-true", False, 66.9),
        ("NVIDIA H100 80GB HBM3", "64-true", True, None),
        ("Tesla T4", "32-true", True, 8.1),  # which has no TensorFloat-32
        ("Tesla T4", "bf16-mixed", True, None),
        ("AMD Instinct MI300X", "bf16-mixed", False, 1307.4),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16-mixed", True, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16-mixed", True, None),
        ("Simulated H100", "bf16-mixed", True, None),
    ],
)
def test_peaks_are_those_of_dense_products(name, precision, tf32, teraflops):
    assert peak_flops(name, precision, tf32) == (teraflops and teraflops * 1e12)


def test_peaks_are_ordered_by_dtype():
    for name, peak in PEAKS.items():
        assert peak.float32 <= (peak.tf32 or peak.float32) <= peak.float16, name
        assert peak.bfloat16 in (None, peak.float16), name


def test_forward_and_backward_pass_are_counted():
    net, x = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)), torch.ones(4, 6)
    with FlopCounter() as counter:
        net(x).sum().backward()
    first, second = 2 * 4 * 6 * 16, 2 * 4 * 16 * 3
    assert counter.total == 2 * first + 3 * second  # the input wants no gradient
    assert counter.convolutions == 0


def test_convolutions_are_distinguished():
    net, x = nn.Conv2d(3, 8, 3, bias=False), torch.ones(2, 3, 6, 6)
    with FlopCounter() as counter:
        y = net(x)
        y.flatten(1) @ torch.ones(8 * 16, 5)
    convolution = 2 * 2 * 8 * 16 * 3 * 9
    assert (counter.total, counter.convolutions) == (convolution + 2 * 2 * 8 * 16 * 5, convolution)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_does_not_count(reentrant):
    net, x = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16)), torch.ones(4, 6, requires_grad=True)
    with FlopCounter() as plain:
        net(x).sum().backward()
    with FlopCounter() as again:
        checkpoint(net, x, use_reentrant=reentrant).sum().backward()
    assert again.total == plain.total > 0


def test_second_derivatives_count():
    weight, x = torch.ones(6, 3, requires_grad=True), torch.ones(4, 6, requires_grad=True)
    with FlopCounter() as counter:
        (gradient,) = torch.autograd.grad(F.softplus(x @ weight).sum(), x, create_graph=True)
        gradient.square().sum().backward()
    assert counter.total > 3 * 2 * 4 * 6 * 3


def test_flex_attention_has_no_formula_and_runs():
    query = torch.randn(1, 1, 128, 16)
    with FlopCounter() as counter:
        query @ query.transpose(-1, -2)
        assert counter.is_whole
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning about slow uncompiled calls
            flex_attention(query, query, query)
    assert not counter.is_whole
    assert counter.total == 2 * 128 * 128 * 16


def test_function_within_may_be_compiled():
    x = torch.ones(4, 6)
    with FlopCounter():
        double = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)
        assert torch.equal(double(x), x * 2)


def test_compiled_modules_are_counted():
    net = nn.Sequential(nn.Linear(2, 2))
    assert not is_compiled(net)
    net[0].compile()
    assert is_compiled(net)
    assert is_compiled(nn.Sequential(torch.compile(nn.Linear(2, 2))))
    whole = nn.Linear(2, 2)
    with Session() as session:
        session.replace(whole, "forward", CompiledForward(whole, {"backend": "eager"}, reuses_memory=False))
        assert is_compiled(whole)
    assert not is_compiled(whole)
