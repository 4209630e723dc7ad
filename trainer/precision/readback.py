"""Copies small numbers from a device to the host without waiting for them."""

from __future__ import annotations

import torch
from torch import Tensor


class Readback:
    """Copies a few numbers to the host. :meth:`start` never waits; :meth:`wait` does, if they are not there yet.

    On CUDA the copy goes into pinned memory, with an event behind it; when they are asked for, the device has long
    passed that event, and has later work queued that keeps it busy meanwhile. Elsewhere the numbers are read when they
    are asked for.

    Args:
        device: the type of the device that the numbers are on.

    Attributes:
        arrives_at_once: whether :meth:`wait` does not wait: the numbers are on the host already.
    """

    def __init__(self, device: str) -> None:
        self.arrives_at_once = device == "cpu"
        self._numbers: list[Tensor] = []
        self._event: torch.cuda.Event | None = None
        self._pinned: Tensor | None = None

    def start(self, numbers: list[Tensor]) -> None:
        """Start to copy these: at least one tensor, each of one element, that are not written to any more."""
        self._numbers = numbers
        device = numbers[0].device
        if device.type != "cuda":
            return
        if self._pinned is None or len(self._pinned) < len(numbers):
            self._pinned = torch.empty(len(numbers), dtype=torch.float32, pin_memory=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        assert self._event is not None
        together = numbers[0].reshape(1)
        if len(numbers) > 1:
            together = torch.stack([number.to(device, torch.float32).reshape(()) for number in numbers])
        pinned = self._pinned[: len(numbers)]
        pinned.copy_(together, non_blocking=True)
        self._numbers = list(pinned)
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> list[float]:
        """The numbers of the last :meth:`start`; [] before the first."""
        if self._event is not None:
            self._event.synchronize()  # the one host-device synchronisation; see above why it is short
        return [float(number) for number in self._numbers]
