"""Supported precisions of devices of all kinds, and their measured speeds with a simulated clock."""

from itertools import count

import pytest
import torch

from tests.support import on_machine, replaced_kernels
from trainer.cli.checks import precisions
from trainer.cli.checks.precisions import PRECISIONS, instructions, precision_support
from trainer.precision import cpu_fp16, devices

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")


class Machine:
    """A clock that advances with the operations by the dtype's rate, without computation."""

    def __init__(self, monkeypatch, rates):
        self.now, self.rates = 0.0, rates

        def mm(a, b):
            return self.work(a.dtype, 2.0 * len(a) ** 3)

        def conv2d(images, weight, padding):
            return self.work(images.dtype, 2.0 * len(images) * images[0, 0].numel() * weight.numel())

        monkeypatch.setattr(torch, "mm", mm)
        monkeypatch.setattr(precisions.F, "conv2d", conv2d)

    def work(self, dtype, operations):
        if self.rates[dtype] == 0:
            raise RuntimeError("not implemented for this dtype")
        self.now += operations / self.rates[dtype]

    def clock(self):
        return self.now


def test_rates_of_a_cpu_with_float16_instructions(monkeypatch):
    on_machine(monkeypatch, {"convolution backward": 20.0})
    machine = Machine(monkeypatch, {torch.float32: 1e11, torch.float16: 4e11, torch.bfloat16: 2e9})
    found = precisions.measure(CPU, 2.0, machine.clock)
    assert list(found) == ["float32", "float16", "bfloat16"]
    for operation in ("matrix products", "convolutions"):
        assert found["float32"][operation] == pytest.approx(1e11)
        assert found["bfloat16"][operation] == pytest.approx(2e9)
        assert found["float16"][operation] == pytest.approx(4e11)
    assert 1.9 < machine.now < 3.0


def test_unsupported_operation_has_no_rate(monkeypatch):
    on_machine(monkeypatch, {})
    machine = Machine(monkeypatch, {torch.float32: 1e11, torch.float16: 0.0, torch.bfloat16: 1e11})
    found = precisions.measure(CPU, 1.0, machine.clock)
    assert found["float16"] == {}
    assert found["bfloat16"]["matrix products"] == pytest.approx(1e11)


def test_if_torchs_float16_is_slow_the_trainers_kernels_are_measured(monkeypatch):
    on_machine(monkeypatch, {"matrix product": 20.0, "attention": 4.0})
    used, original = [], cpu_fp16.fast_fp16_kernels
    monkeypatch.setattr(cpu_fp16, "fast_fp16_kernels", lambda families: used.append(families) or original(families))
    ticks = count()
    found = precisions.measure(CPU, 0.01, lambda: next(ticks) * 1e-3)  # every read of the clock takes a millisecond
    assert list(found) == ["float32", "float16", "bfloat16"]
    assert all(len(row) == 2 for row in found.values())
    assert (used, replaced_kernels()) == ([(), ("matrix product", "attention"), ()], [])


# --- supported precisions


@pytest.fixture
def gpu(monkeypatch):
    def make(name, capability):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.version, "hip", None)

    return make


def words(device):
    pytest.importorskip("torchao", reason="needs torchao")
    return {precision: precision_support(precision, device).partition(": ")[0] for precision in PRECISIONS}


def test_gpus(gpu):
    """Which of them have the units is in tests/precision/test_devices.py."""
    gpu("NVIDIA H200", (9, 0))
    assert set(words(CUDA).values()) == {"native"}
    assert (
        precision_support("16-true", CUDA) == "native: instructions or units that torch uses; small gradients underflow"
    )
    gpu("NVIDIA GeForce GTX 1660", (7, 5))
    emulated = {"bf16-mixed": "emulated", "bf16-true": "emulated", "fp8-mixed": "unsupported"}
    assert words(CUDA) == dict.fromkeys(PRECISIONS, "native") | emulated
    assert precision_support("16-mixed", CUDA) == "native: no Tensor Cores: saves memory, but hardly any time"


def test_mps_has_no_loss_scaling_and_no_float64():
    unsupported = dict.fromkeys(("16-mixed", "fp8-mixed", "64-true"), "unsupported")
    unknown = dict.fromkeys(("bf16-mixed", "bf16-true"), "unknown")
    assert words(MPS) == {"32-true": "native", "16-true": "native", **unsupported, **unknown}
    assert (
        precision_support("64-true", MPS)
        == "unsupported: Got precision='64-true' on an MPS device, which has no float64"
    )
    assert "GradScaler does not support" in precision_support("16-mixed", MPS)


@pytest.mark.parametrize("float16", [True, False])
@pytest.mark.parametrize("bfloat16", [True, False])
def test_cpus(monkeypatch, float16, bfloat16):
    on_machine(monkeypatch, {} if float16 else {"recurrent": float("inf")})
    monkeypatch.setattr(devices, "_cpu_has_bfloat16", lambda: bfloat16)
    found = words(CPU)
    assert (found["16-mixed"], found["16-true"]) == (("native",) * 2 if float16 else ("emulated",) * 2)
    assert (found["bf16-mixed"], found["bf16-true"]) == (("native",) * 2 if bfloat16 else ("emulated",) * 2)
    assert found["32-true"] == found["64-true"] == "native"
    assert found["fp8-mixed"] == "emulated"
    reason = precision_support("16-mixed", CPU)
    assert (
        "slow for 1 of 7 kinds of operations: rounded to float16 and multiplied in float32" in reason
    ) is not float16


def test_instructions(monkeypatch):
    known = {"amx_bf16": True, "amx_fp16": False, "avx512_f": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    assert instructions() == ["amx_bf16"]
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert instructions() == []
