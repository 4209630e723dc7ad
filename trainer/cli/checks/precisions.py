"""The devices of this machine: the support for each precision, and the speed of each dtype, measured in two seconds."""

from __future__ import annotations

import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from math import prod

import torch
import torch.nn.functional as F

from trainer.cli.checks import Findings
from trainer.common import machine
from trainer.common.machine import readable
from trainer.errors import PrecisionError
from trainer.precision import AutoPrecision, cpu_fp16
from trainer.precision.devices import CPU_BFLOAT16, cpu_instructions, native_bfloat16, synchronized_time, tensor_cores
from trainer.precision.float8 import Float8Precision
from trainer.precision.registry import PLUGINS, resolve_precision

Call = Callable[[], object]

PRECISIONS = tuple(sorted(PLUGINS.keys() - {"auto"}))
"""All precisions except ``auto``."""

_CPU_FLOAT16 = ("avx512_fp16", "amx_fp16", "sve", "fp16")

_HALF_DTYPES = {"16": "float16", "bf16": "bfloat16"}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def check_speed(findings: Findings) -> None:
    """List the support of each precision, measure the speed of the first device, and recommend a precision."""
    for title, device in {_name(device): device for device in findings.devices}.items():
        findings.about(f"precisions on {title}", {name: precision_support(name, device) for name in PRECISIONS})
    device, cores = findings.devices[0], machine.cores().usable
    rates = measure(device)
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else 0.0  # not on Windows
    if is_busy := device.type == "cpu" and load > cores:
        findings.remark(f"The speeds are not reliable: the load is {load:.1f} on {cores} cores. Measure again later.")
    findings.facts["verdict"] = verdict(device, {} if is_busy else rates)
    threads = torch.get_num_threads()
    on_cpu = f", {threads} thread{'s' * (threads != 1)}" if device.type == "cpu" else ""
    texts = {
        name: ", ".join(f"{rate / 1e9:,.1f} GFLOP/s in {operation}" for operation, rate in row.items())
        for name, row in rates.items()
    }
    findings.about(f"speed of {_name(device)}{on_cpu}", texts)
    if device.type == "cpu":
        ratios = {family: cpu_fp16.measured_ratio(family) for family in cpu_fp16.FAMILIES}
        entries = {}
        for name, fact in cpu_fp16.kernel_facts(cpu_fp16.slow_families(), ratios).items():
            time_text = f"torch's take {fact['ratio']:.1f}x the time" if fact["ratio"] else "no kernel of torch's"
            entries[name] = f"{fact['kernels']}: {time_text}"
        findings.about("float16 kernels", entries)


def devices() -> list[torch.device]:
    """Return the devices that a Trainer can use; the first is the choice of ``accelerator=auto``."""
    listed = [torch.device("mps")] if torch.backends.mps.is_available() else []
    listed += [torch.device("cuda", index) for index in range(torch.cuda.device_count() * torch.cuda.is_available())]
    return [*listed, torch.device("cpu")]


def verdict(device: torch.device, rates: Mapping[str, Mapping[str, float]]) -> str:
    """Return a recommendation for ``device``: the choice of ``precision=auto``, or 32 if it was slower on average.

    Args:
        device: the device.
        rates: measured speeds by dtype and operation; empty if they are not reliable.
    """
    choice, reason = AutoPrecision().choose(device)
    name = choice.name.removesuffix("-true")
    if name == "32":
        return f"Use precision=32 here: {reason}. precision=16-mixed shows problems of float16 here, too."
    measured = rates.get(_HALF_DTYPES[name.partition("-")[0]], {})
    ratios = {operation: rate / rates["float32"][operation] for operation, rate in measured.items()}
    text = " and ".join(f"{ratio:.1f}x in {operation}" for operation, ratio in ratios.items())
    if ratios and prod(ratios.values()) < 1:
        slower = f"but it was measured to be slower than float32 on average: {text}"
        return f"Use precision=32 here: precision=auto takes {name}, because {reason}, {slower}."
    return f"Use precision={name} here: {reason}{f'; measured {text} against float32' if text else ''}."


def describe(device: torch.device) -> str:
    """Return the name, the memory and the hardware support of a device."""
    memory, detail = machine.memory().total, "shares the host's memory"
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        detail = f"compute capability {'.'.join(map(str, torch.cuda.get_device_capability(device)))}"
    elif device.type == "cpu":
        detail = f"16-bit instructions: {', '.join(instructions()) or 'none that torch uses'}"
    return f"{_name(device)}, {readable(memory)}, {detail}"


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return machine.cpu_name() if device.type == "cpu" else platform.processor()


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


def measure(
    device: torch.device, seconds: float = 2.0, clock: Callable[[], float] = time.perf_counter
) -> dict[str, dict[str, float]]:
    """Measure the speed of forward products in float32, float16 and bfloat16.

    On a CPU with slow float16 kernels, the row float16 measures the Trainer's: float32 products of numbers rounded to
    float16. The rates are medians.

    Args:
        device: the device. A GPU is synchronized around every measurement.
        seconds: time for all measurements. A slow device takes longer.
        clock: returns seconds.

    Returns:
        Floating-point operations per second, by dtype and operation; without those that do not run.
    """
    slow = cpu_fp16.slow_families() if device.type == "cpu" else ()
    rates: dict[str, dict[str, float]] = {name: {} for name in _DTYPES}
    for name, row in rates.items():
        with torch.inference_mode(), cpu_fp16.fast_fp16_kernels(slow if name == "float16" else ()):
            for operation, make in (("matrix products", _matmul), ("convolutions", _convolution)):
                with suppress(RuntimeError, TypeError):  # no kernel for this dtype, or no memory
                    call, operations = make(device, _DTYPES[name])
                    row[operation] = operations / _median(call, device, seconds / (2 * len(rates)), clock)
    return rates


def _matmul(device: torch.device, dtype: torch.dtype) -> tuple[Call, float]:
    """Return a product of square matrices, and its number of floating-point operations."""
    size = 256 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return partial(torch.mm, a, b), 2.0 * size**3


def _convolution(device: torch.device, dtype: torch.dtype) -> tuple[Call, float]:
    """Return a convolution as in the middle of a ResNet, and its number of floating-point operations."""
    channels, side, batch = (64, 16, 2) if device.type == "cpu" else (256, 28, 128)
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format  # for Tensor Cores
    images, weight = (
        torch.randn(shape, device=device).to(dtype).contiguous(memory_format=layout)
        for shape in ((batch, channels, side, side), (channels, channels, 3, 3))
    )
    return partial(F.conv2d, images, weight, padding=1), 2.0 * batch * side**2 * 9 * channels**2


def _median(call: Call, device: torch.device, seconds: float, clock: Callable[[], float]) -> float:
    """Return the median time of at least three calls after a warm-up call."""
    times: list[float] = []
    ends = clock() + seconds
    while len(times) < 4 or clock() < ends:
        started = synchronized_time(device, clock)
        call()
        times.append(synchronized_time(device, clock) - started)
    return statistics.median(times[1:])
