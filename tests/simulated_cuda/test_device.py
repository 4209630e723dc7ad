from __future__ import annotations

import pytest
import torch


def test_wait_has_the_line_that_caused_it(cuda):
    with cuda.watch() as seen:
        torch.ones(3, device="cuda").sum().item()  # this one
    assert [wait.what for wait in seen.waits] == ["local_scalar_dense"]
    assert seen.waits[0].where.startswith("tests/simulated_cuda/test_device.py:")
    assert seen.waits[0].where.endswith("# this one")
    assert seen.kernels == ["ones", "sum"]


def test_errors_of_cuda_are_raised(cuda):
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(3, device="cuda") + torch.ones(3)
    assert (torch.ones(3, device="cuda") + torch.tensor(1.0)).tolist() == [2.0] * 3


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


@pytest.mark.parametrize("owner", ["a view", "a graph"])
def test_memory_in_use_is_not_reused_by_another_copy(cuda, owner):
    copy, side = sent_beside()
    torch.cuda.current_stream().wait_stream(side)
    weight = torch.ones(3, device="cuda").requires_grad_()
    product, held = (copy * weight).sum(), copy[:1]
    kept = {"a view": held, "a graph": product}[owner]
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
