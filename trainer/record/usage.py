"""How busy processor and GPU are while a fit goes on, looked at once a second by a thread of its own."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic, process_time
from typing import Any

import torch

_INTERVAL = 1.0  # seconds
_MOST = 512  # samples that are kept; then two become one, and the next ones are taken half as often
_STAT = Path("/proc/stat")
_IDLE = slice(3, 5)  # of the numbers behind a core's name: idle, and waiting for a disk


class Usage:
    """Samples of how busy processor and GPU are.

    A thread takes them, off the step: it sleeps, and reads clocks and a file of the kernel once a second. A process
    that is forked does not have it; it ends with :meth:`stop`, or with the program.

    A sample is the mean over the time since the one before:

    - ``process``: cores that this process has kept busy, with all its threads. Workers of dataloaders are others.
    - ``machine``: cores of those that this process may run on that anybody has kept busy. On Linux.
    - ``gpu``: the share of the time, from 0 to 1, in which a kernel ran on the GPU, as NVML tells it for its last
      period. On CUDA, where the package nvidia-ml-py is installed.

    Args:
        device: of the process.
        before: what an earlier fit in the same folder has found, to go on behind it.
    """

    def __init__(self, device: torch.device, before: Any = None) -> None:
        self._interval = _INTERVAL
        self._samples = _checked(before)  # never changed, but replaced: another thread may read it at any time
        self._measures = _measures(device)
        self._zero = 0.0
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        # a copy, as one that goes to another process along with a Trainer, does not look
        return {**vars(self), "_measures": {}, "_ends": None, "_thread": None}

    def start(self) -> None:
        """Begin to look."""
        seconds = self._samples["seconds"]
        self._zero = monotonic() - (seconds[-1] if seconds else 0.0)
        for measure in self._measures.values():
            measure()  # what is counted from here on
        mine = (
            weakref.ref(self),
            self._ends,
            self._interval,
        )  # so that it ends, too, when nobody knows of this any more
        self._thread = threading.Thread(target=_look, args=mine, name="trainer-usage", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._ends.set()
            self._thread.join()
            self._thread = None

    def state_dict(self) -> dict[str, list[float]]:
        """``seconds`` since training began, validations included; by name as many values, NaN for what is missing."""
        return self._samples

    def sample(self) -> float:
        """Take a sample. Returns the seconds until the next one."""
        found = {name: measure() for name, measure in self._measures.items()}
        self._samples = _with(self._samples, {"seconds": round(monotonic() - self._zero, 1), **found})
        if len(self._samples["seconds"]) >= _MOST:
            self._interval *= 2
            self._samples = {name: _halved(name, values) for name, values in self._samples.items()}
        return self._interval


def _look(at: weakref.ref[Usage], ends: threading.Event, seconds: float) -> None:
    """What the thread does."""
    while not ends.wait(seconds) and (usage := at()) is not None:
        seconds = usage.sample()
        del usage


def _checked(written: Any) -> dict[str, list[float]]:
    """What a file says of samples; none where it says something else."""
    if not isinstance(written, Mapping):
        return {"seconds": []}
    found = {str(name): values for name, values in written.items() if isinstance(values, list)}
    if "seconds" not in found or len({len(values) for values in found.values()}) > 1:
        return {"seconds": []}
    is_fine = all(isinstance(value, int | float) for values in found.values() for value in values)
    return found if is_fine else {"seconds": []}


def _with(samples: Mapping[str, list[float]], found: Mapping[str, float]) -> dict[str, list[float]]:
    """The samples, and another one."""
    nothing = [float("nan")] * len(samples["seconds"])
    names = dict.fromkeys([*samples, *found])
    return {name: [*samples.get(name, nothing), round(found.get(name, float("nan")), 3)] for name in names}


def _halved(name: str, values: list[float]) -> list[float]:
    """One sample in the place of two: their mean, at the time of the second."""
    pairs = zip(values[::2], values[1::2], strict=False)
    return [later if name == "seconds" else round((earlier + later) / 2, 3) for earlier, later in pairs]


def _measures(device: torch.device) -> dict[str, Callable[[], float]]:
    """What can be measured here; each is the mean since it was last called, NaN where that cannot be told."""
    found: dict[str, Callable[[], float]] = {"process": _rate_of(process_time)}
    if _seconds_of_cores() is not None:
        found["machine"] = _rate_of(lambda: _seconds_of_cores() or 0.0)
    if device.type == "cuda" and (gpu := _gpu(device)) is not None:
        found["gpu"] = gpu
    return found


def _rate_of(count: Callable[[], float]) -> Callable[[], float]:
    """How much of ``count`` there was in a second, since the last call."""
    last: tuple[float, float] | None = None

    def rate() -> float:
        nonlocal last
        before, last = last, (monotonic(), count())
        if before is None or last[0] <= before[0]:
            return float("nan")
        return (last[1] - before[1]) / (last[0] - before[0])

    return rate


def _seconds_of_cores() -> float | None:
    """Seconds for which the cores of this process have been busy since the machine was started, in all."""
    try:
        names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = [line.split() for line in _STAT.read_text(encoding="ascii").splitlines() if line.startswith("cpu")]
        cores = [[int(word) for word in words[1:9]] for words in lines if words[0] in names]
    except (AttributeError, OSError, ValueError):  # not Linux
        return None
    # guests, behind the eighth, are counted as users already
    return sum(sum(core) - sum(core[_IDLE]) for core in cores) / os.sysconf("SC_CLK_TCK") if cores else None


def _gpu(device: torch.device) -> Callable[[], float] | None:
    """What NVML says; None without it, and for a part of a GPU (MIG), of which it does not know that."""
    try:
        import pynvml  # type: ignore[import-not-found]  # of the package nvidia-ml-py

        pynvml.nvmlInit()
        # by its number for good, and not by that among the ones that are visible to this process
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetUtilizationRates(handle)
    except Exception:  # no package, no driver, a simulated GPU: many kinds, and none is a reason to fail a fit
        return None

    def share() -> float:
        try:
            return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100.0
        except Exception:  # as above
            return float("nan")

    return share
