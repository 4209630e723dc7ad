"""Worker processes of dataloaders: how long they are waited for, and how they died."""

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
"""What torch says of a worker that has died."""
_EXIT_TIMEOUT = 2.0
"""Seconds to wait, at most, for the exit codes of workers that have died."""


@contextmanager
def bounded(loaders: Iterable[Any], seconds: float) -> Iterator[None]:
    """Limit how long the iterators that dataloaders make in a ``with`` block wait for a batch from their workers.

    By default torch waits for ever. With its own ``timeout`` it does not check any more whether the workers live, and
    learns of dead ones from a signal only, which threads, and programs with a handler of their own, do not get.

    Args:
        loaders: of any kind; those without workers, and those whose ``timeout`` somebody has set, are left alone.
        seconds: 0 for no limit.
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
    """``iterator``, made by somebody else than ``loader``; it waits no longer than those that ``loader`` makes."""
    make = vars(loader).get("_get_iterator")
    return make.bound(iterator) if isinstance(make, _BoundedIterators) else iterator


def _can_be_bounded(loader: Any) -> bool:
    is_one = isinstance(loader, DataLoader) and loader.num_workers > 0 and not loader.timeout
    return is_one and hasattr(loader, "_get_iterator") and "_get_iterator" not in vars(loader)


class _BoundedIterators:
    """Takes the place of a dataloader's ``_get_iterator``, which makes its iterators."""

    def __init__(self, loader: DataLoader[Any], seconds: float) -> None:
        self._loader = loader
        self._seconds = seconds

    def __call__(self) -> Any:
        return self.bound(type(self._loader)._get_iterator(self._loader))

    def bound(self, iterator: Any) -> Any:
        """``iterator``, which waits for a batch no longer than this."""
        if hasattr(iterator, "_try_get_data") and not iterator._timeout:
            vars(iterator)["_try_get_data"] = _Patience(iterator, self._seconds)
        return iterator


class _Patience:
    """Takes the place of an iterator's ``_try_get_data``, which torch calls until there is a batch.

    Each call looks for a batch once and, if there is none, whether all workers live. It adds about a microsecond to a
    batch.

    Args:
        iterator: of a DataLoader with workers; not kept alive, for its end is what ends the workers.
        seconds: until it raises what torch raises after a ``timeout``. There is a warning after a sixth of them.
    """

    def __init__(self, iterator: Any, seconds: float) -> None:
        self._iterator = weakref.ref(iterator)
        self._look = type(iterator)._try_get_data
        self._seconds = seconds
        self._waits_since: float | None = None
        self._has_warned = False

    def __call__(self, timeout: float = MP_STATUS_CHECK_INTERVAL) -> Any:
        iterator, timeout = self._iterator(), min(timeout, self._seconds)
        try:
            found: tuple[bool, Any] = self._look(iterator, timeout)
        except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
            if isinstance(error, RuntimeError) and not DEAD_WORKER.search(str(error)):
                raise
            if not isinstance(error, RuntimeError):  # a worker died while its batch was on the way
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
                f"The workers of a DataLoader have sent nothing for {waited:.0f} seconds. After {self._seconds:g} the"
                " run ends: Trainer(dataloader_timeout=...).",
            )
        return found


def _kill_workers(iterator: Any) -> None:
    """Kill them: those that hang, or wait for a lock that a dead one holds, do not end when they are asked to."""
    if getattr(iterator, "_worker_pids_set", False):
        # otherwise torch's handler of SIGCHLD raises here that workers were killed
        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        iterator._worker_pids_set = False
    for worker in getattr(iterator, "_workers", ()):
        worker.kill()


def _signals_of(iterator: Any) -> str:
    """The error message for workers that a signal killed, in torch's words; "" if none was."""
    killed = [(worker.pid, -worker.exitcode) for worker in iterator._workers if (worker.exitcode or 0) < 0]
    if not killed:
        return ""
    pids = ", ".join(str(pid) for pid, _ in killed)
    return f"DataLoader worker (pid(s) {pids}) is killed by signal: {signal.strsignal(killed[0][1])}."
