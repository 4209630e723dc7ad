from __future__ import annotations

import pytest
import torch

from trainer.precision.readback import Readback


def test_the_numbers_are_those_of_the_start():
    number, other = torch.tensor([1.5]), torch.tensor(2, dtype=torch.int64)
    readback = Readback("cpu")
    readback.start([number, other])
    number += 1
    assert readback.wait() == [1.5, 2.0]
    readback.start([number])
    assert readback.wait() == [2.5]


def test_before_the_first_there_are_none():
    assert Readback("cpu").wait() == []


def test_only_a_cpus_numbers_are_there_at_once():
    assert Readback("cpu").arrives_at_once
    assert not Readback("cuda").arrives_at_once


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    number, readback = torch.ones(1, device="cuda"), Readback("cuda")
    readback.start([number, number])  # makes its buffer
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        readback.start([number * 3, number * 4])
        number.zero_()
        assert readback.wait() == [3.0, 4.0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
