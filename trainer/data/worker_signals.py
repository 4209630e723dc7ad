"""Worker processes of dataloaders that do not end by the signals that ask the run to end.

A Ctrl-C is sent to everything that the terminal runs, a cluster's SIGTERM to every process of the job. The run finishes
its step first, and needs its workers for that.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

_SECONDS = 120
"""How long a worker outlives a SIGTERM: a step and a save take less time, and a cluster allows less."""


class Outliving:
    """A ``worker_init_fn`` around a dataloader's own one: the workers outlive the signals, and end with the run.

    Args:
        init: the dataloader's own; None for none.
    """

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self.init = init

    def __call__(self, worker: int) -> None:
        """The worker starts."""
        for name in ("SIGINT", "SIGUSR1", "SIGUSR2"):
            if (number := getattr(signal, name, None)) is not None:
                signal.signal(number, _do_nothing)  # SIG_IGN would be inherited by what the worker starts
        signal.signal(signal.SIGTERM, _do_nothing_once)
        if self.init is not None:
            self.init(worker)


def outlive_signals(loader: Any) -> None:
    """Let the workers that ``loader`` starts outlive the signals that are meant for the run."""
    if getattr(loader, "num_workers", 0) and not isinstance(loader.worker_init_fn, Outliving):
        loader.worker_init_fn = Outliving(loader.worker_init_fn)


def _do_nothing(number: int, frame: Any) -> None:
    pass


def _do_nothing_once(number: int, frame: Any) -> None:
    """The next SIGTERM ends the worker; or an alarm, if the process that started it waits and sends none."""
    signal.signal(number, signal.SIG_DFL)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_SECONDS)
