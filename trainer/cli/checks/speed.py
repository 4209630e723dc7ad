"""Measure the speed of a device in each dtype, in about two seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
import torch.nn.functional as F

from trainer.precision import cpu_fp16
from trainer.precision.devices import synchronized_time

Call = Callable[[], object]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


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
