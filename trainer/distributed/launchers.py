"""Lightning's process launchers: the processes end together, and signals reach all of them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing.spawn import ProcessExitedException

from trainer.common.cluster import check_addresses
from trainer.common.lightning_private import MultiProcessingLauncher, ScriptLauncher, set_num_threads_if_needed
from trainer.distributed.child_processes import children, parent_named, parent_watched

if TYPE_CHECKING:
    import lightning.pytorch as pl

ENDING_SIGNALS = [signal.SIGINT, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []), signal.SIGTERM]
"""The signals that end a run; if several arrive, the last one in this list counts."""


class WatchedLauncher(ScriptLauncher):
    """Lightning's launcher of scripts, with processes that end together."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other processes, and call ``function`` in this one."""
        environment = self.cluster_environment
        check_addresses(environment, self.num_nodes, self.num_nodes * self.num_processes)
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            with parent_named():
                self._call_children_scripts()
            first = environment.node_rank() * self.num_processes
            children.watch({first + rank: process for rank, process in enumerate(self.procs, 1)})
        set_num_threads_if_needed(num_processes=self.num_processes)
        children.start_run()
        with parent_watched():
            return function(*args, **kwargs)


class SignalForwarder:
    """A signal handler for a process that only waits for the processes of the run. It passes signals on to them.

    Args:
        launcher: the launcher that has started them.
    """

    def __init__(self, launcher: MultiProcessingLauncher) -> None:
        self._launcher = launcher
        self._process = os.getpid()
        self._interrupts = 0

    def __call__(self, number: int, frame: Any) -> None:
        """Handle a signal."""
        if os.getpid() != self._process:  # a process that is just being forked has this handler, too
            signal.signal(number, default_handler(number))
            signal.raise_signal(number)
        elif number != signal.SIGINT:
            self._launcher.kill(signal.Signals(number))
        elif self._interrupts:
            raise KeyboardInterrupt
        else:
            self._interrupts += 1  # the terminal has sent the signal to all of them


@contextmanager
def signals_passed_on(launcher: MultiProcessingLauncher) -> Iterator[None]:
    """Return a context for launching the processes of a run: signals to this process are passed on to them.

    Raises:
        SystemExit, KeyboardInterrupt: if a signal has ended the run in these processes.
    """
    receive = SignalForwarder(launcher)
    is_main = threading.current_thread() is threading.main_thread()
    taken = [n for n in ENDING_SIGNALS if is_main and signal.getsignal(n) == default_handler(n)]
    for number in taken:
        signal.signal(number, receive)
    try:
        yield
    except ProcessExitedException as error:
        ends = {128 + number: number for number in ENDING_SIGNALS}
        if error.exit_code in ends:
            raise exception_of(ends[error.exit_code]) from None
        raise
    finally:
        for number in taken:
            signal.signal(number, default_handler(number))


def default_handler(number: int) -> Any:
    """Return Python's default handler of a signal."""
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def exception_of(number: int) -> BaseException:
    """Return the exception to raise for a signal. If uncaught, it gives the exit status that a shell expects."""
    return KeyboardInterrupt() if number == signal.SIGINT else SIGTERMException(128 + number)
