"""Measured speeds with a simulated clock."""

from itertools import count

import pytest
import torch

from tests.support import on_machine, replaced_kernels
from trainer.cli.checks import speed
from trainer.precision import cpu_fp16

CPU = torch.device("cpu")


class Machine:
    """A clock that advances with the operations by the dtype's rate, without computation."""

    def __init__(self, monkeypatch, rates):
        self.now, self.rates = 0.0, rates

        def mm(a, b):
            return self.work(a.dtype, 2.0 * len(a) ** 3)

        def conv2d(images, weight, padding):
            return self.work(images.dtype, 2.0 * len(images) * images[0, 0].numel() * weight.numel())

        monkeypatch.setattr(torch, "mm", mm)
        monkeypatch.setattr(speed.F, "conv2d", conv2d)

    def work(self, dtype, operations):
        if self.rates[dtype] == 0:
            raise RuntimeError("not implemented for this dtype")
        self.now += operations / self.rates[dtype]

    def clock(self):
        return self.now


def test_rates_of_a_cpu_with_float16_instructions(monkeypatch):
    on_machine(monkeypatch, {"convolution backward": 20.0})
    machine = Machine(monkeypatch, {torch.float32: 1e11, torch.float16: 4e11, torch.bfloat16: 2e9})
    found = speed.measure(CPU, 2.0, machine.clock)
    assert list(found) == ["float32", "float16", "bfloat16"]
    for operation in ("matrix products", "convolutions"):
        assert found["float32"][operation] == pytest.approx(1e11)
        assert found["bfloat16"][operation] == pytest.approx(2e9)
        assert found["float16"][operation] == pytest.approx(4e11)
    assert 1.9 < machine.now < 3.0


def test_unsupported_operation_has_no_rate(monkeypatch):
    on_machine(monkeypatch, {})
    machine = Machine(monkeypatch, {torch.float32: 1e11, torch.float16: 0.0, torch.bfloat16: 1e11})
    found = speed.measure(CPU, 1.0, machine.clock)
    assert found["float16"] == {}
    assert found["bfloat16"]["matrix products"] == pytest.approx(1e11)


def test_if_torchs_float16_is_slow_the_trainers_kernels_are_measured(monkeypatch):
    on_machine(monkeypatch, {"matrix product": 20.0, "attention": 4.0})
    used, original = [], cpu_fp16.fast_fp16_kernels
    monkeypatch.setattr(cpu_fp16, "fast_fp16_kernels", lambda families: used.append(families) or original(families))
    ticks = count()
    found = speed.measure(CPU, 0.01, lambda: next(ticks) * 1e-3)  # every read of the clock takes a millisecond
    assert list(found) == ["float32", "float16", "bfloat16"]
    assert all(len(row) == 2 for row in found.values())
    assert (used, replaced_kernels()) == ([(), ("matrix product", "attention"), ()], [])
