"""Time limits for dataloader workers, and errors if they die."""

from __future__ import annotations

import re
import signal
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL, signal_handling

from trainer.errors import warn

DEAD_WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\) (?P<how>is killed by signal: [\w ]+|exited unexpectedly)"
)
"""Torch's error message for a worker that has died."""
_EXIT_TIMEOUT = 2.0
"""Seconds to wait, at most, for the exit codes of workers that have died."""


@contextmanager
def bounded(loaders: Iterable[Any], seconds: float) -> Iterator[None]:
    """Limit the time that iterators created in a ``with`` block wait for a batch from their workers.

    By default, torch waits forever. With a ``timeout``, it does not check whether the workers are alive. It then
    detects dead workers only through a signal, which threads and programs with a custom handler do not receive.

    Args:
        loaders: iterables of any kind. Those without workers, and those with a ``timeout``, stay unchanged.
        seconds: the limit; 0 for no limit.
    """
    chosen = [loader for loader in loaders if seconds and _can_be_bounded(loader)]
    for loader in chosen:
        vars(loader)["_get_iterator"] = _BoundedIterators(loader, seconds)
    try:
        yield
    finally:
        for loader in chosen:
            vars(loader).pop("_get_iterator", None)


def bounded_like(loader: Any, iterator: Any) -> Any:
    """Limit the waiting time of ``iterator`` as for the iterators that ``loader`` creates. Return it."""
    make = vars(loader).get("_get_iterator")
    return make.bound(iterator) if isinstance(make, _BoundedIterators) else iterator


def _can_be_bounded(loader: Any) -> bool:
    is_one = isinstance(loader, DataLoader) and loader.num_workers > 0 and not loader.timeout
    return is_one and hasattr(loader, "_get_iterator") and "_get_iterator" not in vars(loader)


class _BoundedIterators:
    """Replaces ``_get_iterator`` of a dataloader, which creates its iterators."""

    def __init__(self, loader: DataLoader[Any], seconds: float) -> None:
        self._loader = loader
        self._seconds = seconds

    def __call__(self) -> Any:
        return self.bound(type(self._loader)._get_iterator(self._loader))

    def bound(self, iterator: Any) -> Any:
        """Limit the waiting time of ``iterator``. Return it."""
        if hasattr(iterator, "_try_get_data") and not iterator._timeout:
            vars(iterator)["_try_get_data"] = _BoundedGet(iterator, self._seconds)
        return iterator


class _BoundedGet:
    """Replaces ``_try_get_data`` of an iterator, which torch calls until there is a batch.

    Each call checks for a batch once and, if there is no batch, whether all workers are alive. It adds about a
    microsecond to a batch.

    Args:
        iterator: of a DataLoader with workers. It is not kept alive, because its deletion ends the workers.
        seconds: time until it raises torch's error for a ``timeout``. It warns after a sixth of this time.
    """

    def __init__(self, iterator: Any, seconds: float) -> None:
        self._iterator = weakref.ref(iterator)
        self._look = type(iterator)._try_get_data
        self._seconds = seconds
        self._waits_since: float | None = None
        self._has_warned = False

    def __call__(self, timeout: float = MP_STATUS_CHECK_INTERVAL) -> Any:
        iterator = self._iterator()
        if timeout > self._seconds:
            timeout = self._seconds
        try:
            found: tuple[bool, Any] = self._look(iterator, timeout)
        except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
            if isinstance(error, RuntimeError) and not DEAD_WORKER.search(str(error)):
                raise
            if not isinstance(error, RuntimeError):  # a worker died while it sent a batch
                for worker in getattr(iterator, "_workers", ()):
                    worker.join(_EXIT_TIMEOUT / len(iterator._workers))  # type: ignore[union-attr]
            message = _signals_of(iterator)
            _kill_workers(iterator)
            if message:
                raise RuntimeError(message) from error
            raise
        if found[0]:
            self._waits_since = None
            return found
        now = time.monotonic()
        if self._waits_since is None:
            self._waits_since = now - timeout
        waited = now - self._waits_since
        if waited >= self._seconds:
            _kill_workers(iterator)
            raise RuntimeError(f"DataLoader timed out after {self._seconds:g} seconds")
        if waited >= self._seconds / 6 and not self._has_warned:
            self._has_warned = True
            warn(
                f"The workers of a DataLoader have sent nothing for {waited:.0f} seconds. The run ends after"
                f" {self._seconds:g} seconds; Trainer(dataloader_timeout=...) sets this limit.",
            )
        return found


def _kill_workers(iterator: Any) -> None:
    """Kill the workers. A worker that hangs, or waits for a lock of a dead worker, would ignore SIGTERM."""
    if getattr(iterator, "_worker_pids_set", False):
        # otherwise torch's handler of SIGCHLD raises an error here, because workers were killed
        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        iterator._worker_pids_set = False
    for worker in getattr(iterator, "_workers", ()):
        worker.kill()


def _signals_of(iterator: Any) -> str:
    """Return torch's error message for workers that a signal has killed, or ""."""
    killed = [(worker.pid, -worker.exitcode) for worker in iterator._workers if (worker.exitcode or 0) < 0]
    if not killed:
        return ""
    pids = ", ".join(str(pid) for pid, _ in killed)
    return f"DataLoader worker (pid(s) {pids}) is killed by signal: {signal.strsignal(killed[0][1])}."
