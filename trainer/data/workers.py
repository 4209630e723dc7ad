"""Time limits for dataloader workers, errors if they die, and survival of signals.

A terminal sends Ctrl-C to all its processes, and a cluster sends SIGTERM to every process of the job. The run finishes
its step first, and needs its workers for that.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL, signal_handling

from trainer.common.session import Session
from trainer.errors import warn

DEAD_WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\) (?P<how>is killed by signal: [\w ]+|exited unexpectedly)"
)
"""Torch's error message for a worker that has died."""
_EXIT_TIMEOUT = 2.0
"""Seconds to wait, at most, for the exit codes of workers that have died."""
_SIGTERM_TIMEOUT = 120
"""Seconds that a worker survives SIGTERM: a step and a save take less, and clusters allow less."""


def guard_workers(session: Session, loader: Any, seconds: float) -> None:
    """Let workers survive the signals that ask the run to stop, and limit the time to wait for a batch from them.

    By default, torch waits forever. With a ``timeout``, it does not check whether the workers are alive. It then
    detects dead workers only through a signal, which threads and programs with a custom handler do not receive.

    Args:
        session: ends with the run. The methods of the loader are replaced until then.
        loader: an iterable of any kind. One without workers stays unchanged.
        seconds: the limit; 0 for no limit. It does not apply to a loader with a ``timeout``.
    """
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return
    if not isinstance(loader.worker_init_fn, SurviveSignals):
        session.replace(loader, "worker_init_fn", SurviveSignals(loader.worker_init_fn))
    if seconds and not loader.timeout and "_get_iterator" not in vars(loader):
        session.replace(loader, "_get_iterator", partial(_bounded_iterator, loader, seconds))


def bounded_like(loader: Any, iterator: Any) -> Any:
    """Limit the waiting time of ``iterator`` as for the iterators that ``loader`` creates. Return it."""
    make = vars(loader).get("_get_iterator")
    is_bounded = isinstance(make, partial) and make.func is _bounded_iterator
    return _bounded(iterator, make.args[1]) if is_bounded else iterator


def _bounded_iterator(loader: DataLoader[Any], seconds: float) -> Any:
    """Create an iterator of a dataloader, and limit its waiting time."""
    return _bounded(type(loader)._get_iterator(loader), seconds)


def _bounded(iterator: Any, seconds: float) -> Any:
    if hasattr(iterator, "_try_get_data") and not iterator._timeout:
        vars(iterator)["_try_get_data"] = _BoundedGet(iterator, seconds)
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
            result: tuple[bool, Any] = self._look(iterator, timeout)
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
        if result[0]:
            self._waits_since = None
            return result
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
                f" {self._seconds:g} seconds; Trainer(dataloader_timeout=...) sets this limit."
            )
        return result


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


class SurviveSignals:
    """A ``worker_init_fn`` that lets workers survive the signals, and end with the run.

    Args:
        init: the ``worker_init_fn`` of the dataloader, which is called, too; None if the dataloader has none.
    """

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self.init = init

    def __call__(self, worker: int) -> None:
        """Set the signal handlers at the start of the worker. End it if the run has been killed since."""
        if _is_orphan():  # torch's check of the parent process begins later, and would accept the new parent
            os._exit(1)
        for name in ("SIGINT", "SIGUSR1", "SIGUSR2"):
            if (number := getattr(signal, name, None)) is not None:
                signal.signal(number, _do_nothing)  # SIG_IGN would be inherited by subprocesses of the worker
        signal.signal(signal.SIGTERM, _do_nothing_once)
        if self.init is not None:
            self.init(worker)


def _is_orphan() -> bool:
    """Return whether the process that requested this one has ended. The parent may be another one: a fork server."""
    started_by, parent = multiprocessing.parent_process(), os.getppid()
    if started_by is None or started_by.pid == parent:
        return False
    try:
        os.kill(started_by.pid or 0, 0)
    except ProcessLookupError:
        return True
    return parent == 1  # it has ended, but its own parent has not read its exit status


def _do_nothing(number: int, frame: Any) -> None:
    pass


def _do_nothing_once(number: int, frame: Any) -> None:
    """Ignore this SIGTERM, but let the next one end the worker. Without a next one, an alarm ends it."""
    signal.signal(number, signal.SIG_DFL)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_SIGTERM_TIMEOUT)
