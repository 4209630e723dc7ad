"""Operations on unsharded gradients. Sharded ones are in tests/distributed/test_engines.py."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support import Regression, fit_and_watch, make_batches
from trainer.loop.gradients import Gradients, each_norm, zero_loss
from trainer.precision.scaler import LossScaler

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def gradients():
    return Gradients(LossScaler("cpu", enabled=False))


def parameters_with(*values):
    parameters = []
    for value in values:
        p = nn.Parameter(torch.zeros(len(value) if value is not None else 2))
        p.grad = None if value is None else torch.tensor(value)
        parameters.append(p)
    return parameters


def sgd(*groups):
    return torch.optim.SGD([{"params": group} for group in groups], lr=0.1)


def test_only_the_engine_accesses_gradients():
    """Except the loss scaler, because torch's ``GradScaler`` takes an optimizer."""
    homes = {
        "trainer/loop/gradients.py",
        "trainer/distributed/sharding/state_dicts.py",  # FSDP's own, of an open window
        "trainer/precision/scaler.py",
        "trainer/diagnosis/remedies.py",  # steps with another learning rate, on weights that are restored
        "trainer/diagnosis/replay.py",  # of weights that have 32 instead of 16 bits during a replay
        "trainer/cli/checks/fake_step.py",  # a step with tensors that have no memory
    }
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "trainer").rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"(?<!autograd)(?<!``)\.grad\b", line)
    }
    assert found == homes


def test_optimizer_that_clears_its_gradients_itself(gradients):
    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            calls.append(self)

    calls = []
    own, patched = Own(parameters_with([1.0]), lr=0.1), torch.optim.Adam(parameters_with([1.0]))
    patched.zero_grad = lambda: calls.append(patched)
    for optimizer in (own, patched):
        gradients.clear(optimizer)
    assert calls == [own, patched]


def test_clipping_may_be_mocked(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda *args: calls.append(args) or "no norm")
    fit_and_watch(tmp_path, Regression(), make_batches(2), gradient_clip_val=1.0)
    assert len(calls) == 2


@pytest.mark.parametrize("measure", [True, False])
def test_clip_by_value(gradients, measure):
    one, none = parameters_with([3.0, -4.0], None)
    norm = gradients.clip_(sgd([one, none]), 0.5, "value", measure=measure)
    assert (norm is None) is not measure
    assert not measure or norm.item() == 5.0
    assert torch.equal(one.grad, torch.tensor([0.5, -0.5]))


@pytest.mark.parametrize("others", [(), ([1.0],)])
@pytest.mark.parametrize("sparse", [True, False])
def test_clip_by_value_of_sparse_and_complex_gradients(gradients, sparse, others):
    """Equal elements of a sparse gradient are summed first."""
    table, expected = nn.Embedding(4, 1, sparse=sparse), [0.0, 0.5, 0.0, -0.25]
    (table(torch.tensor([1, 1, 3])) * torch.tensor([[0.4], [0.4], [-0.25]])).sum().backward()
    wave = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    wave.grad = torch.tensor([3 - 0.1j, 0.2j])
    gradients.clip_(sgd([*table.parameters(), *parameters_with(*others)]), 0.5, "value")
    gradients.clip_(sgd([wave]), 0.5, "value")
    assert table.weight.grad.to_dense().flatten().tolist() == expected
    assert wave.grad.tolist() == pytest.approx([0.5 - 0.1j, 0.2j])


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_without_gradients(gradients, algorithm):
    assert gradients.clip_(sgd(parameters_with(None)), 1.0, algorithm) is None
    assert gradients.norm(sgd(parameters_with(None))) is None


def test_norm_of_sparse_gradients(gradients):
    table = nn.Embedding(4, 1, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    assert gradients.norm(torch.optim.SGD(table.parameters(), lr=0.1)).item() == pytest.approx(5**0.5)  # 2 and 1


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_norm_of_float16_gradients_may_exceed_float16(gradients, algorithm):
    """A norm of inf would clip finite gradients to zero."""
    half, wide = (nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float16, torch.float32))
    half.grad, wide.grad = torch.tensor([6e4, 6e4]).half(), torch.tensor([8e4, 0.0])
    expected = torch.cat([half.grad.float(), wide.grad]).norm()
    norm = gradients.clip_(sgd([half], [wide]), 1e3, algorithm)
    assert norm.dtype is torch.float32
    torch.testing.assert_close(norm, expected)
    scale = 1e3 / expected if algorithm == "norm" else 1 / 60
    torch.testing.assert_close(half.grad.float(), scale * torch.tensor([6e4, 6e4]), rtol=1e-3, atol=0)


def test_gradients_set_aside_are_restored(gradients):
    one, none = parameters_with([1.0], None)
    before = one.grad
    with gradients.set_aside([one, none]):
        assert one.grad is None
        one.grad, none.grad = torch.ones(1), torch.ones(2)
    assert one.grad is before
    assert none.grad is None


def test_gradient_from_a_file_is_laid_out_like_its_parameter(gradients):
    weight = nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
    gradient = torch.randn(2, 3, 4, 4)
    gradients.load_state_dict([("weight", weight)], {"weight": gradient})
    assert weight.grad.stride() == weight.stride() != gradient.stride()
    assert torch.equal(weight.grad, gradient)


def test_zero_loss_has_exact_zeros_for_every_trainable_parameter():
    one, frozen, other = parameters_with(None, None, None)
    frozen.requires_grad_(False)
    with torch.no_grad():
        other.fill_(float("inf"))
    loss = zero_loss([one, frozen, other])
    assert loss == 0
    loss.backward()
    assert torch.equal(one.grad, torch.zeros(2))
    assert torch.equal(other.grad, torch.zeros(2))
    assert frozen.grad is None


def test_norms_of_each_in_other_dtypes_and_of_sparse_gradients():
    wide, half = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.full((4,), 300.0, dtype=torch.float16)
    table = nn.Embedding(5, 1, sparse=True)
    (table(torch.tensor([1, 1])) * torch.tensor([[1.0], [2.0]])).sum().backward()  # twice the same row: 1 + 2
    found = each_norm([wide, half, table.weight.grad, torch.tensor([2.0]), torch.empty(0)])
    assert [norm.item() for norm in found] == [5.0, 600.0, 3.0, 2.0, 0.0]  # 600 squared overflows in float16
    assert [norm.dtype for norm in found] == [torch.float64, *[torch.float32] * 4]
