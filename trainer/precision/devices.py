"""The dtypes that a device computes natively, as far as torch reports them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable

import torch
from torch import nn

from trainer.common import machine
from trainer.errors import PrecisionError, expect, warn
from trainer.precision.cpu_fp16 import Float16Kernels

CPU_BFLOAT16 = ("avx512_bf16", "amx_bf16", "sve_bf16", "bf16")
"""Names of instructions in ``torch.cpu.get_capabilities()``; the last two are ARM's."""

# Chips of compute capability 7.5 without Tensor Cores, TU116 and TU117, by their product names: GeForce GTX 1630 to
# 1660, GeForce MX450 and MX550, (Quadro) T400 to T2000, CMP 30HX. NVIDIA's Turing cards with Tensor Cores are called
# RTX, T4, T10, T40, or CMP 40HX and 50HX.
_TURING_WITHOUT_TENSOR_CORES = re.compile(
    r"\bGTX 16\d\d|\bMX[45]50\b|\bT([4-6][05]0|1000|1200|2000)\b|\bCMP 30HX", re.IGNORECASE
)


def synchronized_time(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the time after ``device`` has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # host-device synchronization, required to measure the time
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)  # host-device synchronization
    return clock()


def peak_memory(device: torch.device) -> int:
    """Return the peak in bytes: of the tensors on a CUDA device, otherwise of the process; 0 if it is unknown."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else machine.peak_memory()


def native_bfloat16(device: torch.device) -> bool:
    """Return whether ``device`` computes in bfloat16 natively instead of by emulation.

    CUDA: compute capability 8.0 (Ampere) and above. ROCm: True. XPU: as torch reports. CPU: if it has bfloat16
    instructions (AMX-BF16, AVX512-BF16, ARM's BF16) and torch was built with oneDNN, which uses them. MPS: False,
    because torch does not report it.
    """
    if device.type == "cuda":
        # torch.cuda.is_bf16_supported, but for this device instead of the current one
        return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "xpu":
        return bool(torch.xpu.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and _cpu_has_bfloat16()  # type: ignore[no-untyped-call]


def tensor_cores(device: torch.device) -> bool:
    """Return whether ``device`` is an NVIDIA GPU with Tensor Cores for float16.

    Compute capability 7.0 (Volta), 7.2 (Xavier) and above have them, except some cards of 7.5 (Turing): the GTX 16
    series and related ones, which can be recognized only by their names.
    """
    if device.type != "cuda" or torch.version.hip:
        return False
    capability = torch.cuda.get_device_capability(device)
    if capability == (7, 5):
        return _TURING_WITHOUT_TENSOR_CORES.search(torch.cuda.get_device_name(device)) is None
    return capability >= (7, 0)


def scales_losses(device: torch.device) -> bool:
    """Return whether torch's ``GradScaler`` works on ``device``. On MPS, some versions of torch lack its kernels."""
    return device.type != "mps" or torch._C._dispatch_has_kernel_for_dispatch_key("aten::_amp_update_scale_", "MPS")


def warn_of_emulation(name: str, device: torch.device) -> None:
    """Warn if ``device`` is a GPU that can compute in bfloat16 but has no units for it.

    Args:
        name: name of the requested bfloat16 precision.
        device: the device.
    """
    if device.type == "cuda" and not native_bfloat16(device):
        warn(
            f"{torch.cuda.get_device_name(device)} has no bfloat16 units: precision={name!r} is emulated"
            " and slow there. Use precision='16-mixed'."
        )


def check_kernels(choice: str) -> None:
    """Raise a PrecisionError unless ``choice`` is one of those of :func:`float16_kernels`."""
    known = "'auto', 'fast' or 'native'"
    expect(choice in ("auto", "fast", "native"), known, PrecisionError, cpu_kernels=choice)


def float16_kernels(choice: str, dtype: torch.dtype, module: nn.Module, device: torch.device) -> Float16Kernels:
    """Return the kernels to compute ``module`` in ``dtype`` on ``device``: ours, or torch's own.

    Args:
        choice: ``"fast"``, ``"native"`` or ``"auto"``, as in :class:`~trainer.precision.cpu_fp16.Float16Kernels`. Has
            an effect only for float16 on a CPU.
        dtype: dtype of the products.
        module: the module to run.
        device: the device.
    """
    return Float16Kernels(choice if device.type == "cpu" and dtype is torch.float16 else "native", module)


def cpu_instructions(names: Iterable[str]) -> list[str] | None:
    """Return those of ``names`` that the CPU has, or None if torch does not report them (2.10)."""
    query = getattr(torch.cpu, "get_capabilities", None)
    return None if query is None else [name for name in names if query().get(name, False)]


def _cpu_has_bfloat16() -> bool:
    instructions = cpu_instructions(CPU_BFLOAT16)
    if instructions is not None:
        return bool(instructions)
    # x86 only. Every CPU with AMX tiles has AMX-BF16.
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
