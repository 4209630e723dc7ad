from __future__ import annotations

import pytest
import torch

from tests.simulated_cuda import device


def test_probe_passes(cuda):
    device.probe()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("_READS", frozenset(), "1 waits in planted case 0"),
        ("_NO_KERNEL", frozenset(), r"the kernels \[\], not \['empty_like'\]"),
        ("_comes_after", lambda order, other: True, "'may still be used' without before the copy, not ''"),
    ],
)
def test_probe_detects_a_broken_simulation(cuda, monkeypatch, name, value, message):
    monkeypatch.setattr(device, name, value)
    with pytest.raises(AssertionError, match=message):
        device.probe()


def test_wait_has_the_line_that_caused_it(cuda):
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


def test_errors_of_cuda_are_raised(cuda):
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(3, device="cuda") + torch.ones(3)
    assert (torch.ones(3, device="cuda") + torch.tensor(1.0)).tolist() == [2.0] * 3


def test_host_that_has_not_waited_is_ahead_of_long_work(cuda):
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


def test_sync_debug_mode_raises(cuda):
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        torch.ones(1, device="cuda").item()
    torch.cuda.set_sync_debug_mode("default")
    torch.ones(1, device="cuda").item()


# --- streams ------------------------------------------------------------------------------------------------------


def sent_beside(tensor=None):
    """Return a tensor copied by another stream without a wait, and that stream."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        return (torch.ones(3) if tensor is None else tensor).to("cuda", non_blocking=True), side


def test_stream_waits_for_another_stream_without_the_host(cuda):
    for wait in (
        lambda side: torch.cuda.current_stream().wait_stream(side),
        lambda side: torch.cuda.current_stream().wait_event(side.record_event()),
        lambda side: side.record_event().wait(),
    ):
        with cuda.watch() as seen:
            copy, side = sent_beside()
            with pytest.raises(RuntimeError, match="add on stream 0 reads what is not written yet"):
                copy + 1
            wait(side)
            assert not seen.waits
        assert (copy + 1).tolist() == [2.0] * 3


def test_event_has_the_order_of_its_record(cuda):
    side = torch.cuda.Stream()
    event = side.record_event()
    with torch.cuda.stream(side):
        late = torch.ones(3, device="cuda")
    torch.cuda.current_stream().wait_event(event)
    with pytest.raises(RuntimeError, match="not written yet"):
        late + 1


def test_writing_data_read_by_another_stream_raises(cuda):
    tensor, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tensor + 1
        tensor.view(3) + 1
    tensor + 1  # to read is allowed
    with pytest.raises(RuntimeError, match="add_ on stream 0 writes to what is still used"):
        tensor.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    tensor.add_(1)


@pytest.mark.parametrize("frees", ["the tensor", "a view of it", "a graph"])
def test_memory_in_use_is_not_reused_by_another_copy(cuda, frees):
    copy, side = sent_beside()
    torch.cuda.current_stream().wait_stream(side)
    weight = torch.ones(3, device="cuda").requires_grad_()
    product, held = (copy * weight).sum(), copy[:1]
    kept = {"the tensor": copy, "a view of it": held, "a graph": product}[frees]
    del copy, held, product
    torch.cuda._sleep(1)
    with torch.cuda.stream(side):
        torch.ones(3).to("cuda", non_blocking=True)  # the memory is referenced
    del kept
    with torch.cuda.stream(side):
        with pytest.raises(RuntimeError, match="allocates memory that is free and may still be used"):
            torch.ones(3).to("cuda", non_blocking=True)
        side.wait_stream(torch.cuda.default_stream())
        torch.ones(3).to("cuda", non_blocking=True)


def test_recorded_memory_is_reused_after_a_synchronization(cuda):
    side = torch.cuda.Stream()

    def send():
        with cuda.watch() as seen, torch.cuda.stream(side):
            copy = torch.ones(3).to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        copy + 1
        copy.record_stream(torch.cuda.current_stream())
        return seen.copies[0].alive

    assert [send() for _ in range(3)] == [12, 24, 36]
    torch.cuda.synchronize()
    assert send() == 12


def test_copy_has_the_number_of_earlier_kernels(cuda):
    usual, side = torch.cuda.current_stream(), torch.cuda.Stream()
    with cuda.watch() as seen:
        torch.ones(3, device="cuda")
        before = usual.record_event()
        torch.ones(3, device="cuda")
        sent_beside()
        side.wait_event(before)
        with torch.cuda.stream(side):
            torch.ones(3).to("cuda", non_blocking=True)
        torch.ones(3).to("cuda", non_blocking=True)
    assert [(copy.stream > 0, copy.after) for copy in seen.copies] == [(True, 0), (True, 1), (False, 2)]


def test_host_waits_for_one_stream_and_not_for_the_other(cuda):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10)
    torch.cuda._sleep(10)
    assert (torch.cuda.current_stream().query(), side.query()) == (False, False)
    torch.ones(1, device="cuda").item()
    assert (torch.cuda.current_stream().query(), side.query()) == (True, False)
    torch.cuda.synchronize()
    assert side.query()


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_copies_are_recorded_with_and_without_autograd(cuda, context):
    with cuda.watch() as seen, context():
        copy = torch.ones(3).to("cuda")
        copy.half().cpu()
    assert (seen.to_device, seen.to_host) == ([12], [6])
    assert [wait.what for wait in seen.waits] == ["a copy from the host", "a copy to the host"]
    assert seen.kernels == ["_to_copy"]
