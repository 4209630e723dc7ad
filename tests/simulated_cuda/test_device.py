from __future__ import annotations

import pytest
import torch

from tests.simulated_cuda import device


def test_the_probe_passes(cuda):
    device.probe()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("_READS", frozenset(), "1 waits in planted case 0"),
        ("_NO_KERNEL", frozenset(), r"the kernels \[\], not \['empty_like'\]"),
    ],
)
def test_the_probe_sees_what_is_amiss(cuda, monkeypatch, name, value, message):
    monkeypatch.setattr(device, name, value)
    with pytest.raises(AssertionError, match=message):
        device.probe()


def test_a_wait_is_known_by_the_line_that_asked(cuda):
    with cuda.watch() as seen:
        torch.ones(3, device="cuda").sum().item()  # this one
    assert [wait.what for wait in seen.waits] == ["local_scalar_dense"]
    assert seen.waits[0].where.startswith("tests/simulated_cuda/test_device.py:")
    assert seen.waits[0].where.endswith("# this one")
    assert seen.kernels == ["ones", "sum"]


def test_values_are_those_of_the_cpu(cuda):
    x = torch.arange(6.0).reshape(2, 3)
    weight = x.cuda().requires_grad_()
    (weight.exp().sum(1) @ torch.tensor([1.0, 2.0]).cuda()).backward()
    torch.testing.assert_close(weight.grad.cpu(), x.exp() * torch.tensor([[1.0], [2.0]]))


def test_what_cuda_refuses_is_refused(cuda):
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(3, device="cuda") + torch.ones(3)
    assert (torch.ones(3, device="cuda") + torch.tensor(1.0)).tolist() == [2.0] * 3


def test_a_host_that_has_not_waited_is_ahead_of_long_work(cuda):
    torch.cuda._sleep(10)
    before = torch.cuda.Event()
    before.record()
    torch.cuda._sleep(10)
    after = torch.cuda.Event()
    after.record()
    assert (before.query(), after.query()) == (False, False)
    before.synchronize()
    assert (before.query(), after.query()) == (True, False)
    torch.ones(1, device="cuda").item()
    assert after.query()


def test_the_sync_debug_mode_raises(cuda):
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        torch.ones(1, device="cuda").item()
    torch.cuda.set_sync_debug_mode("default")
    torch.ones(1, device="cuda").item()
