"""Copy a few numbers from a device to the host, and wait for them later.

A fused optimizer decides on the device whether it skips its step. The loop reads the outcome just before the next step,
or when it is requested, so that host and device do not synchronize.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Readback:
    """Copies a few numbers to the host. :meth:`start` never waits; :meth:`wait` waits if they have not arrived.

    On CUDA they are copied to pinned memory, followed by an event. When they are read, the device has normally passed
    that event long ago, and stays busy with later work. On other devices the numbers are read in :meth:`wait`.

    Args:
        device: device type of the numbers.

    Attributes:
        arrives_at_once: whether :meth:`wait` never waits, because the numbers are already on the host.
    """

    def __init__(self, device: str) -> None:
        self.arrives_at_once = device == "cpu"
        self._numbers: list[Tensor] = []
        self._event: torch.cuda.Event | None = None
        self._pinned: Tensor | None = None

    def start(self, numbers: list[Tensor]) -> None:
        """Start to copy numbers: at least one tensor, each with one element, that must not change afterwards."""
        self._numbers = numbers
        device = numbers[0].device
        if device.type != "cuda":
            return
        if self._pinned is None or len(self._pinned) < len(numbers):
            self._pinned = torch.empty(len(numbers), dtype=torch.float32, pin_memory=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        assert self._event is not None
        stacked = numbers[0].reshape(1)
        if len(numbers) > 1:
            stacked = torch.stack([number.to(device, torch.float32).reshape(()) for number in numbers])
        pinned = self._pinned[: len(numbers)]
        pinned.copy_(stacked, non_blocking=True)
        self._numbers = list(pinned)
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> list[float]:
        """Return the numbers of the last :meth:`start`; [] before the first."""
        if self._event is not None:
            self._event.synchronize()  # the only host-device synchronization; see above why it is short
        return [float(number) for number in self._numbers]
