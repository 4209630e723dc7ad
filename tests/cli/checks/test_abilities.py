"""Supported precisions of devices of all kinds, with simulated ones."""

import pytest
import torch

from tests.support import on_machine
from trainer.cli.checks.abilities import PRECISIONS, instructions, precision_support
from trainer.precision import devices

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")


@pytest.fixture
def gpu(monkeypatch):
    def make(name, capability):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.version, "hip", None)

    return make


pytest.importorskip("torchao", reason="needs torchao")


def words(device):
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
