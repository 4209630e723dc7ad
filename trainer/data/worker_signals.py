"""Keep dataloader workers alive when a signal asks the run to stop.

A terminal sends Ctrl-C to all its processes, and a cluster sends SIGTERM to every process of the job. The run finishes
its step first, and needs its workers for that.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

_SECONDS = 120
"""Time that a worker survives SIGTERM: a step and a save take less, and clusters allow less."""


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


def outlive_signals(loader: Any) -> None:
    """Let the workers of ``loader`` survive the signals that ask the run to stop."""
    if getattr(loader, "num_workers", 0) and not isinstance(loader.worker_init_fn, SurviveSignals):
        loader.worker_init_fn = SurviveSignals(loader.worker_init_fn)


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
        signal.alarm(_SECONDS)
