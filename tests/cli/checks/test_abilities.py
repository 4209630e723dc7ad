"""Supported precisions of devices of all kinds, with simulated ones."""

from __future__ import annotations

import pytest
import torch

from trainer.cli.checks.abilities import PRECISIONS, instructions, precision_support
from trainer.precision import cpu_fp16, devices

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")


@pytest.fixture
def gpu(monkeypatch):
    def make(name: str, capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.version, "hip", None)

    return make


pytest.importorskip("torchao", reason="needs torchao")


def words(device: torch.device) -> dict[str, str]:
    return {precision: precision_support(precision, device).how for precision in PRECISIONS}


@pytest.mark.parametrize(
    ("name", "capability", "bfloat16", "about_float16"),
    [
        ("NVIDIA H200", (9, 0), "native", "instructions or units that torch uses"),
        ("Tesla V100", (7, 0), "emulated", "instructions or units that torch uses"),
        ("NVIDIA GeForce GTX 1660", (7, 5), "emulated", "no Tensor Cores: saves memory, but hardly any time"),
    ],
)
def test_gpus(gpu, name, capability, bfloat16, about_float16):
    gpu(name, capability)
    assert words(CUDA) == {
        "32-true": "native",
        "16-mixed": "native",
        "bf16-mixed": bfloat16,
        "fp8-mixed": "native" if capability >= (8, 9) else "unsupported",
        "16-true": "native",
        "bf16-true": bfloat16,
        "64-true": "native",
    }
    assert precision_support("16-mixed", CUDA).why == about_float16
    assert precision_support("16-true", CUDA).why == f"{about_float16}; small gradients underflow"


def test_mps_has_no_loss_scaling_and_no_float64():
    assert words(MPS) == {
        "32-true": "native",
        "16-mixed": "unsupported",
        "bf16-mixed": "unknown",
        "fp8-mixed": "unsupported",
        "16-true": "native",
        "bf16-true": "unknown",
        "64-true": "unsupported",
    }
    assert precision_support("64-true", MPS).why == "Got precision='64-true' on an MPS device, which has no float64"
    assert "GradScaler does not support" in precision_support("16-mixed", MPS).why


@pytest.mark.parametrize("float16", [True, False])
@pytest.mark.parametrize("bfloat16", [True, False])
def test_cpus(monkeypatch, float16, bfloat16):
    monkeypatch.setattr(cpu_fp16, "native_fp16", lambda: float16)
    monkeypatch.setattr(devices, "_cpu_has_bfloat16", lambda: bfloat16)
    found = words(CPU)
    assert (found["16-mixed"], found["16-true"]) == (("native",) * 2 if float16 else ("emulated",) * 2)
    assert (found["bf16-mixed"], found["bf16-true"]) == (("native",) * 2 if bfloat16 else ("emulated",) * 2)
    assert found["32-true"] == found["64-true"] == "native"
    assert found["fp8-mixed"] == "emulated"


def test_instructions(monkeypatch):
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: {"amx_bf16": True, "amx_fp16": False, "avx512_f": True}, raising=False
    )
    assert instructions() == ["amx_bf16"]
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert instructions() == []
