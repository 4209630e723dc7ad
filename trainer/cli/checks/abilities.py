"""The support of precisions on a device: native, emulated or unsupported, with the reason."""

from __future__ import annotations

import warnings
from typing import Literal, NamedTuple

import torch

from trainer.errors import PrecisionError
from trainer.precision import cpu_fp16
from trainer.precision.devices import CPU_BFLOAT16, cpu_instructions, native_bfloat16, tensor_cores
from trainer.precision.float8 import Float8Precision
from trainer.precision.registry import PLUGINS, resolve_precision

PRECISIONS = tuple(sorted(PLUGINS.keys() - {"auto"}))
"""All precisions except ``auto``."""

_CPU_FLOAT16 = ("avx512_fp16", "amx_fp16", "sve", "fp16")


class PrecisionSupport(NamedTuple):
    """The support of a precision on a device.

    Args:
        precision: canonical name.
        how: ``native`` if the hardware computes in it, ``emulated`` if its numbers are computed with another type,
            ``unsupported`` if the Trainer rejects it, ``unknown`` if torch does not report it.
        why: the reason, as one line.
    """

    precision: str
    how: Literal["native", "emulated", "unsupported", "unknown"]
    why: str


def precision_support(precision: str, device: torch.device) -> PrecisionSupport:
    """Return the support of ``precision`` on ``device``, from the check of its plugin."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the table reports emulation and small gradients
            plugin = resolve_precision(precision)
            plugin.check(device)
    except PrecisionError as error:
        return PrecisionSupport(precision, "unsupported", str(error).partition(". Use")[0].partition(", expected")[0])
    if plugin.dtype is torch.float64:
        slow = "consumer GPUs are 32 to 64 times slower than in float32" if device.type == "cuda" else ""
        return PrecisionSupport(precision, "native", slow or "at most half as fast as float32, for reference results")
    if not plugin.is_half:
        return PrecisionSupport(precision, "native", _about_float32(device))
    if isinstance(plugin, Float8Precision):
        if device.type == "cpu":
            return PrecisionSupport(
                precision, "emulated", "same values as on a GPU, but slow: to test a model for a GPU"
            )
        return PrecisionSupport(
            precision, "native", "Tensor Cores, for Linear layers; faster for large ones if compiled"
        )
    if plugin.dtype is torch.bfloat16:
        return PrecisionSupport(precision, *_bfloat16(device))
    support, reason = _float16(device)
    return PrecisionSupport(
        precision, support, reason if plugin.scales_loss else f"{reason}; small gradients underflow"
    )


def instructions() -> list[str]:
    """Return the CPU's 16-bit instructions by torch's names; empty if it has none or torch does not report them."""
    return cpu_instructions((*CPU_BFLOAT16, *_CPU_FLOAT16)) or []


def _about_float32(device: torch.device) -> str:
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return "the reference"
    return "the reference; torch.set_float32_matmul_precision('high') enables TF32 for matrix products"


def _float16(device: torch.device) -> tuple[Literal["native", "emulated", "unknown"], str]:
    if device.type == "cpu":
        if cpu_fp16.native_fp16():
            return "native", "this CPU has float16 instructions that torch uses"
        return "emulated", "no float16 instructions: numbers are rounded to float16 and multiplied in float32"
    if tensor_cores(device):
        return "native", "Tensor Cores"
    if device.type == "cuda" and not torch.version.hip:
        return "native", "no Tensor Cores: saves memory, but hardly any time"
    return "native", "according to torch"


def _bfloat16(device: torch.device) -> tuple[Literal["native", "emulated", "unknown"], str]:
    if native_bfloat16(device):
        if device.type == "cpu":
            return "native", "this CPU has bfloat16 instructions that torch uses"
        return "native", "bfloat16 units" if device.type == "cuda" else "according to torch"
    if device.type == "mps":
        return "unknown", "torch does not report whether this chip has bfloat16 units"
    if device.type == "cuda":
        return "emulated", "no bfloat16 units: slow, use 16-mixed"
    return "emulated", "no bfloat16 instructions that torch uses: slower than float32"
