"""How fast a device multiplies, in each dtype: a measurement of about two seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from trainer.precision import cpu_fp16
from trainer.precision.devices import now

FLOAT32, FLOAT16, BFLOAT16, FLOAT16_OF_TORCH = "float32", "float16", "bfloat16", "float16 (torch's own)"
_DTYPES = {
    FLOAT32: torch.float32,
    FLOAT16: torch.float16,
    BFLOAT16: torch.bfloat16,
    FLOAT16_OF_TORCH: torch.float16,
}
_FIRST_MATRIX, _LARGEST_MATRIX = 128, 8192
_LARGEST_BATCH = 256
_ROUNDS = 3  # at least
_MEASURABLE = 0.005  # seconds; shorter calls are timed several at once, so that the clock is no part of it
_TICK = 1e-9


@dataclass
class Speed:
    """Measured rates of one kind of arithmetic, in floating-point operations per second; None: it does not run.

    Args:
        name: of the arithmetic.
        matmul: of a product of square matrices.
        convolution: of a 3x3 convolution.
        ratios: of the two to those of float32, by the same names.
    """

    name: str
    matmul: float | None = None
    convolution: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)


Call = Callable[[], object]


@dataclass
class _Cell:
    """One kind of arithmetic and one operation: what is called, and what was measured of it."""

    name: str
    operation: str
    kernels: Callable[[], AbstractContextManager[None]]
    calls: Iterator[tuple[Call, float]]
    call: Call | None = None
    operations: float = 0.0
    repeats: int = 1
    rates: list[float] = field(default_factory=list)


def measure(device: torch.device, seconds: float = 2.0, clock: Callable[[], float] = time.perf_counter) -> list[Speed]:
    """The speed of forward products in float32, float16 and bfloat16 on ``device``.

    On a CPU without float16 instructions float16 is what the Trainer does there, products in float32 on rounded
    numbers; torch's own path is one row more.

    Each operation grows until the next size would take too long, or until it has the largest size; these calls warm the
    device up. A slow kind of arithmetic is measured on smaller operations than a fast one. Then all are timed in turn,
    round by round, so that what else the machine has to do falls on all of them, and the median counts.

    Args:
        device: where; a GPU is synchronised around every measurement.
        seconds: for everything; a slow device takes somewhat longer.
        clock: seconds.
    """
    names = [FLOAT32, FLOAT16, BFLOAT16]
    if device.type == "cpu" and not cpu_fp16.native_fp16():
        names.append(FLOAT16_OF_TORCH)
    cells = [
        _Cell(
            name,
            operation,
            cpu_fp16.fast_fp16_kernels if name == FLOAT16 and FLOAT16_OF_TORCH in names else nullcontext,
            sizes(device, _DTYPES[name]),
        )
        for name in names
        for operation, sizes in (("matmul", _matmuls), ("convolution", _convolutions))
    ]
    deadline = clock() + seconds
    with torch.inference_mode():
        for cell in cells:
            with cell.kernels():
                _find_size(cell, device, seconds / (2 * _ROUNDS * len(cells)), clock)
        rounds = 0
        while rounds < _ROUNDS or clock() < deadline:
            for cell in cells:
                with cell.kernels():
                    _time(cell, device, clock)
            rounds += 1
    return _speeds(names, cells)


def _speeds(names: list[str], cells: list[_Cell]) -> list[Speed]:
    speeds = {name: Speed(name) for name in names}
    for cell in cells:
        if cell.rates:
            rate, speed = statistics.median(cell.rates), speeds[cell.name]
            setattr(speed, cell.operation, rate)
            if reference := getattr(speeds[FLOAT32], cell.operation):
                speed.ratios[cell.operation] = rate / reference
    return list(speeds.values())


def _matmuls(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Call, float]]:
    """Ever larger products, and the floating-point operations in each."""
    size = _FIRST_MATRIX
    while size <= _LARGEST_MATRIX:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        yield partial(torch.mm, a, b), 2.0 * size**3
        size *= 2


def _convolutions(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Call, float]]:
    """Convolutions as in the middle of a ResNet, of ever larger batches, and the operations in each."""
    channels, side, batch = (64, 16, 1) if device.type == "cpu" else (256, 28, 16)
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format  # what Tensor Cores want
    weight = torch.randn(channels, channels, 3, 3, device=device).to(dtype).contiguous(memory_format=layout)
    while batch <= _LARGEST_BATCH:
        images = torch.randn(batch, channels, side, side, device=device).to(dtype).contiguous(memory_format=layout)
        yield partial(F.conv2d, images, weight, padding=1), 2.0 * batch * side**2 * 9 * channels**2
        batch *= 2


def _find_size(cell: _Cell, device: torch.device, seconds: float, clock: Callable[[], float]) -> None:
    """Give ``cell`` the largest call that takes no more than ``seconds``."""
    try:
        call, operations = next(cell.calls)
        _seconds(call, device, clock)  # threads start, a library chooses its kernels
        took = _seconds(call, device, clock)
        for larger, its_operations in cell.calls:
            if took * its_operations / operations > seconds:
                break
            call, operations = larger, its_operations
            _seconds(call, device, clock)
            took = _seconds(call, device, clock)
    except (RuntimeError, TypeError):  # no kernel for this dtype, or no memory: not what this device is for
        return
    cell.call, cell.operations = call, operations
    cell.repeats = max(1, int(min(_MEASURABLE, seconds) / max(took, _TICK)))


def _time(cell: _Cell, device: torch.device, clock: Callable[[], float]) -> None:
    if cell.call is not None:
        took = _seconds(cell.call, device, clock, cell.repeats)
        cell.rates.append(cell.operations * cell.repeats / max(took, _TICK))


def _seconds(call: Call, device: torch.device, clock: Callable[[], float], repeats: int = 1) -> float:
    begun = now(device, clock)
    for _ in range(repeats):
        call()
    return now(device, clock) - begun
