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


def sent_beside():
    """Return a tensor copied by another stream without a wait, and that stream."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        return torch.ones(3).to("cuda", non_blocking=True), side


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
