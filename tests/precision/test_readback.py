import pytest
import torch

from trainer.precision.readback import Readback


def test_numbers_are_those_of_the_start():
    readback = Readback("cpu")
    assert readback.wait() == []
    readback.start([torch.tensor([1.5]), torch.tensor(2, dtype=torch.int64)])
    assert readback.wait() == [1.5, 2.0]
    readback.start([torch.tensor(2.5)])
    assert readback.wait() == readback.wait() == [2.5]


def test_only_values_of_a_cpu_arrive_immediately():
    assert Readback("cpu").arrives_at_once
    assert not Readback("cuda").arrives_at_once


@pytest.mark.gpu
def test_readback_does_not_synchronize():
    number, readback = torch.ones(1, device="cuda"), Readback("cuda")
    readback.start([number, number])  # makes its buffer
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for numbers in ([number * 3, number.sum() * 4], [number * 5]):
            readback.start(numbers)
            assert readback.wait() == [float(i) for i in ([3, 4] if len(numbers) == 2 else [5])]
    finally:
        torch.cuda.set_sync_debug_mode("default")
