"""The support of precisions on a device: native, emulated or unsupported, with the reason."""

from __future__ import annotations

import warnings

import torch

from trainer.errors import PrecisionError
from trainer.precision import cpu_fp16
from trainer.precision.devices import CPU_BFLOAT16, cpu_instructions, native_bfloat16, tensor_cores
from trainer.precision.float8 import Float8Precision
from trainer.precision.registry import PLUGINS, resolve_precision

PRECISIONS = tuple(sorted(PLUGINS.keys() - {"auto"}))
"""All precisions except ``auto``."""

_CPU_FLOAT16 = ("avx512_fp16", "amx_fp16", "sve", "fp16")


def precision_support(precision: str, device: torch.device) -> str:
    """Return the support of ``precision`` on ``device`` and the reason, from the check of its plugin.

    The first word is ``native`` if the hardware computes in it, ``emulated`` if its numbers are computed with another
    type, ``unsupported`` if the Trainer rejects it, ``unknown`` if torch does not report it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the table reports emulation and small gradients
            plugin = resolve_precision(precision)
            plugin.check(device)
    except PrecisionError as error:
        return f"unsupported: {str(error).partition('. Use')[0].partition(', expected')[0]}"
    is_cpu, how = device.type == "cpu", "native"
    if not plugin.is_half:
        why = "slow, for reference results" if plugin.dtype is torch.float64 else "the reference"
    elif isinstance(plugin, Float8Precision):
        how = "emulated" if is_cpu else "native"
        why = "Linear layers; on a CPU the same values, but slow; on a GPU measure it, compiled: an H200 was slower"
    elif plugin.dtype is torch.bfloat16 and not native_bfloat16(device):
        how = "unknown" if device.type == "mps" else "emulated"  # torch does not report the units of an MPS device
        why = "torch reports no bfloat16 instructions or units: probably slower than float32"
    elif plugin.dtype is torch.float16 and is_cpu and (slow := cpu_fp16.slow_families()):
        share = f"{len(slow)} of {len(cpu_fp16.FAMILIES)} kinds of operations"
        how, why = "emulated", f"torch's kernels are slow for {share}: rounded to float16 and multiplied in float32"
    elif device.type == "cuda" and not torch.version.hip and not tensor_cores(device):
        why = "no Tensor Cores: saves memory, but hardly any time"
    else:
        why = "instructions or units that torch uses"
    risk = "; small gradients underflow" if plugin.dtype is torch.float16 and not plugin.scales_loss else ""
    return f"{how}: {why}{risk}"


def instructions() -> list[str]:
    """Return the CPU's 16-bit instructions by torch's names; empty if it has none or torch does not report them."""
    return cpu_instructions((*CPU_BFLOAT16, *_CPU_FLOAT16)) or []
