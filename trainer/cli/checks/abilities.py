"""What a precision does on a device: native, emulated or unsupported, and why."""

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
"""Those that compute in something."""

_CPU_FLOAT16 = ("avx512_fp16", "amx_fp16", "sve", "fp16")


class Ability(NamedTuple):
    """What one precision does on one device.

    Args:
        precision: canonical name.
        how: ``native`` where the hardware computes in it, ``emulated`` where other arithmetic gives its numbers,
            ``unsupported`` where the Trainer refuses it.
        why: one line.
    """

    precision: str
    how: Literal["native", "emulated", "unsupported", "unknown"]
    why: str


def ability(precision: str, device: torch.device) -> Ability:
    """What ``precision`` would do on ``device``. The precision's own check has the word on what is refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of emulation, and of small gradients: the table says it
            plugin = resolve_precision(precision)
            plugin.check(device)
    except PrecisionError as error:
        return Ability(precision, "unsupported", str(error).partition(". Use")[0].partition(", expected")[0])
    if plugin.dtype is torch.float64:
        slow = "a GPU made for graphics is 32 to 64 times slower than in float32" if device.type == "cuda" else ""
        return Ability(precision, "native", slow or "at most half as fast as float32: for references")
    if not plugin.is_half:
        return Ability(precision, "native", _about_float32(device))
    if isinstance(plugin, Float8Precision):
        if device.type == "cpu":
            return Ability(precision, "emulated", "a rehearsal for a GPU, value by value, and slow")
        return Ability(precision, "native", "Tensor Cores, for Linear layers; for large ones, in a compiled model")
    if plugin.dtype is torch.bfloat16:
        return Ability(precision, *_bfloat16(device))
    how, why = _float16(device)
    return Ability(precision, how, why if plugin.scales_loss else f"{why}; small gradients vanish")


def instructions() -> list[str]:
    """The CPU's instructions for 16 bits, as torch names them; empty where it has none, or torch does not tell."""
    return cpu_instructions((*CPU_BFLOAT16, *_CPU_FLOAT16)) or []


def _about_float32(device: torch.device) -> str:
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return "the reference"
    return "the reference; torch.set_float32_matmul_precision('high') lets products use TF32"


def _float16(device: torch.device) -> tuple[Literal["native", "emulated", "unknown"], str]:
    if device.type == "cpu":
        if cpu_fp16.native_fp16():
            return "native", "this CPU has float16 instructions that torch uses"
        return "emulated", "no float16 instructions: products in float32 on numbers rounded to float16"
    if tensor_cores(device):
        return "native", "Tensor Cores"
    if device.type == "cuda" and not torch.version.hip:
        return "native", "no Tensor Cores: it saves memory, but hardly time"
    return "native", "as far as torch can tell"


def _bfloat16(device: torch.device) -> tuple[Literal["native", "emulated", "unknown"], str]:
    if native_bfloat16(device):
        if device.type == "cpu":
            return "native", "this CPU has bfloat16 instructions that torch uses"
        return "native", "bfloat16 units" if device.type == "cuda" else "as torch says"
    if device.type == "mps":
        return "unknown", "torch cannot tell whether this chip has bfloat16 units"
    if device.type == "cuda":
        return "emulated", "no bfloat16 units: slow, 16-mixed is the better one"
    return "emulated", "no bfloat16 instructions that torch uses: slower than float32"
