"""Native computation of simulated devices."""

import warnings
from types import MappingProxyType

import pytest
import torch

from tests.support import on_machine, replaced_kernels
from trainer.precision import HalfPrecision, MixedPrecision
from trainer.precision.cpu_fp16 import FAMILIES
from trainer.precision.devices import float16_kernels, native_bfloat16, tensor_cores

CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")


@pytest.fixture
def gpu(monkeypatch):
    """Make ``cuda:1`` a GPU with a name and compute capability."""

    def make(name, capability, hip=None):
        monkeypatch.setattr(torch.cuda, "get_device_name", {CUDA: name}.__getitem__)  # not of the current device
        monkeypatch.setattr(torch.cuda, "get_device_capability", {CUDA: capability}.__getitem__)
        monkeypatch.setattr(torch.version, "hip", hip)
        return CUDA

    return make


GPUS = [
    # name, compute capability, bfloat16, Tensor Cores
    ("NVIDIA GeForce GTX 1080", (6, 1), False, False),
    ("Tesla V100-SXM2-32GB", (7, 0), False, True),
    ("Tesla T4", (7, 5), False, True),
    ("NVIDIA GeForce GTX 1650", (7, 5), False, False),
    ("Quadro T2000 with Max-Q Design", (7, 5), False, False),
    ("NVIDIA T400 4GB", (7, 5), False, False),
    ("NVIDIA A100-SXM4-80GB", (8, 0), True, True),
]


@pytest.mark.parametrize(("name", "capability", "bfloat16", "cores"), GPUS, ids=lambda value: str(value))
def test_nvidia(gpu, name, capability, bfloat16, cores):
    device = gpu(name, capability)
    assert (native_bfloat16(device), tensor_cores(device)) == (bfloat16, cores)


def test_amd(gpu):
    device = gpu("an AMD GPU", (7, 0), hip="6.4")  # the numbers of other GPUs than NVIDIA's mean something else
    assert native_bfloat16(device) is True
    assert tensor_cores(device) is False  # the rule about sizes is NVIDIA's


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, False),
        ({"avx512_f": True, "avx512_bf16": True, "amx_bf16": False}, True),
        ({"amx_bf16": True}, True),
        ({"neon": True, "bf16": False, "sve_bf16": False}, False),
        ({"neon": True, "bf16": True}, True),
        ({}, False),
    ],
)
def test_cpu(monkeypatch, capabilities, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: MappingProxyType(capabilities), raising=False)
    assert native_bfloat16(CPU) is expected
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert native_bfloat16(CPU) is False  # no kernel of torch's would use them
    assert tensor_cores(CPU) is False


@pytest.mark.parametrize(("amx", "avx512", "expected"), [(0, 0, False), (1, 0, True), (0, 1, True)])
def test_cpu_on_an_older_torch(monkeypatch, amx, avx512, expected):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: bool(amx))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bool(avx512))
    assert native_bfloat16(CPU) is expected


@pytest.mark.parametrize("native", [False, True])
def test_xpu(monkeypatch, native):
    monkeypatch.setattr(torch.xpu, "is_bf16_supported", lambda including_emulation: native)
    assert native_bfloat16(torch.device("xpu")) is native


def test_mps_is_unknown():
    assert (native_bfloat16(torch.device("mps")), tensor_cores(torch.device("mps"))) == (False, False)


@pytest.mark.parametrize("kind", [MixedPrecision, HalfPrecision])
def test_emulation_of_bfloat16_is_warned_of_on_gpus_only(gpu, kind):
    bfloat16 = kind("bfloat16")
    with pytest.warns(UserWarning, match=rf"Tesla T4 has no bfloat16 units: precision='{bfloat16.name}' .*'16-mixed'"):
        bfloat16.check(gpu("Tesla T4", (7, 5)))
    with warnings.catch_warnings(action="error"):
        MixedPrecision("float16").check(gpu("Tesla T4", (7, 5)))
        bfloat16.check(gpu("NVIDIA A100", (8, 0)))
        bfloat16.check(CPU)


@pytest.mark.parametrize(
    ("choice", "dtype", "device", "fast"),
    [
        ("auto", torch.float16, "cpu", ["attention"]),
        ("fast", torch.float16, "cpu", list(FAMILIES)),
        ("auto", torch.bfloat16, "cpu", []),
        ("fast", torch.bfloat16, "cpu", []),
        ("auto", torch.float16, "cuda", []),
        ("fast", torch.float16, "cuda", []),
    ],
)
def test_float16_kernels_are_measured_for_float16_on_a_cpu_only(monkeypatch, choice, dtype, device, fast):
    measured = on_machine(monkeypatch, {"attention": 5.0})
    with float16_kernels(choice, dtype, torch.nn.Linear(256, 256), torch.device(device)) as kernels:
        assert replaced_kernels() == fast
        assert (kernels.state_dict() != {}) is bool(measured) is (fast == ["attention"])
    assert replaced_kernels() == []
