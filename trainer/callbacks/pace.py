"""How fast a training goes, and how much memory it takes, over its steps."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch

from trainer.callbacks.series import Series
from trainer.data.samples import batch_size

_SECONDS_BETWEEN_READINGS = 1.0  # of the memory


class Pace:
    """Time and memory over the optimizer steps, at no more than `max_points` of them.

    Reads the host's clock, which on a GPU is ahead of the device: by no more than the work that is queued there, so
    over many steps the rates are right. Validations do not count. Nothing here waits for a device.

    Args:
        max_points: The most points kept of each curve.

    Attributes:
        seconds: Time of training, in seconds, at the end of a batch; that before a resume included.
        memory: In bytes, at most once a second: on CUDA what torch has reserved on the device, else the physical memory
            of the process (on macOS the most it has ever held). Empty on Windows without CUDA.
        on_gpu: Whether `memory` is that of a GPU.
        samples_per_step: Training samples of an optimizer step over all ranks, by the fit's first batch; None where
            that cannot be told.
    """

    def __init__(self, max_points: int) -> None:
        self.seconds = Series(max_points)
        self.memory = Series(max_points)
        self.on_gpu = False
        self.samples_per_step: int | None = None
        self._clock = time.perf_counter
        self._zero = 0.0  # what the clock showed, or would have shown, when training began
        self._paused: float | None = None
        self._next_reading = 0.0
        self._read: Callable[[], int] | None = None

    @property
    def stride(self) -> int:
        """How many batches there are for one that is to be noted: a power of two."""
        return self.seconds.stride

    def start(self, trainer: "pl.Trainer") -> None:
        """Lets the clock go on from the points that there are up to this step."""
        for series in (self.seconds, self.memory):
            series.truncate(trainer.global_step)
        before = self.seconds.read()
        self._zero = self._clock() - (before[-1] if before else 0.0)
        self._paused = None
        self._next_reading = 0.0
        self.samples_per_step = None
        device = trainer.strategy.root_device
        self.on_gpu = device.type == "cuda"
        self._read = _reader(device)

    def pause(self) -> None:
        """Stops the clock."""
        self._paused = self._clock()

    def go_on(self) -> None:
        """Lets the clock go on."""
        if self._paused is not None:
            self._zero += self._clock() - self._paused
            self._paused = None

    def note(self, trainer: "pl.Trainer", batch: object) -> None:
        """Notes the time and, where it is due, the memory, at the end of a batch."""
        now = self._clock() - self._zero
        self.seconds.append(trainer.global_step, now)
        if self.samples_per_step is None:
            self.samples_per_step = batch_size(batch) * trainer.accumulate_grad_batches * trainer.world_size or None
        if self._read is not None and now >= self._next_reading:
            self.memory.append(trainer.global_step, self._read())
            self._next_reading = now + _SECONDS_BETWEEN_READINGS

    def state_dict(self) -> dict[str, Any]:
        """The points, as lists of numbers."""
        return {
            "seconds": self.seconds.state_dict(),
            "memory": self.memory.state_dict(),
            "on_gpu": self.on_gpu,
            "samples_per_step": self.samples_per_step,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes up the points that `state_dict` returned."""
        self.seconds.load_state_dict(state_dict["seconds"])
        self.memory.load_state_dict(state_dict["memory"])


def _reader(device: torch.device) -> Callable[[], int] | None:
    """What tells the memory that is taken now, in bytes."""
    if device.type == "cuda":
        return partial(torch.cuda.memory_reserved, device)
    if os.path.exists("/proc/self/statm"):
        return _resident
    if sys.platform == "win32":
        return None
    return _most_resident


def _resident() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _most_resident() -> int:
    import resource  # not there on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, which alone comes here
