"""End the processes of one run together: where one of them dies or raises, the others do not wait for it for ever.

The launchers look after the processes that they have started, and kill all of them at once when one fails; but
processes whose parent has failed go on waiting for it, on a GPU for half an hour. Here each process that has failed
gets some time to say what happened, and then all of them end.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from subprocess import Popen
from typing import Any

import torch

GRACE = 10.0
"""Seconds that a process gets to end by itself once another has failed, and to exit once it has to."""
LAST_WORDS = 30.0
"""Seconds that callbacks and loggers get after an error (``on_exception``), where other processes wait."""
_LOOK = 0.2
_PARENT = "AMP_TRAINER_PARENT"


class ChildProcesses:
    """The processes that this one has started.

    Attributes:
        has_failed: whether the last run of this process, or a child, has failed.
        expected: exit statuses of children that are no failures: 0, and that with which this process will exit.
        exit_status: of this process, where it has to be ended because it hangs while it exits.
    """

    def __init__(self) -> None:
        self.has_failed = False
        self.expected = {0}
        self.exit_status = 1
        self._processes: dict[int, Popen[Any]] = {}
        self._reported: set[int] = set()

    def start_run(self) -> None:
        """A run starts: failures of earlier runs have been dealt with."""
        self.has_failed, self.expected = False, {0}

    def watch(self, processes: dict[int, Popen[Any]]) -> None:
        """From now on, these processes (by their rank) and this one end together."""
        self._processes = processes
        threading.Thread(target=self._end_with_them, daemon=True, name="child processes").start()
        self.exit_first()

    def exit_first(self) -> None:
        """Make :meth:`exit` the first exit handler of the interpreter: the later ones may wait for the children."""
        atexit.unregister(self.exit)
        atexit.register(self.exit)

    def exit(self) -> None:
        """This process exits: if something has failed, its children end, too."""
        if not self.has_failed:
            return
        deadline = time.monotonic() + GRACE
        while self._alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._any_has_failed()
        self.kill()
        with contextlib.suppress(RuntimeError):  # some versions of Python start no threads as late as this
            _after(GRACE, _exit, self.exit_status)

    def send(self, number: int) -> None:
        """Send them a signal."""
        for process in self._alive().values():
            process.send_signal(number)

    def kill(self) -> None:
        """Kill those that still run."""
        for rank, process in self._alive().items():
            say(f"Rank {rank} (process {process.pid}) has not ended by itself, and is killed.")
            process.kill()

    def _alive(self) -> dict[int, Popen[Any]]:
        return {rank: process for rank, process in self._processes.items() if process.poll() is None}

    def _end_with_them(self) -> None:
        """Wait until one has failed, then end the others and this process. Runs in a thread."""
        while not self._any_has_failed():
            time.sleep(_LOOK)
        self.has_failed = True
        time.sleep(GRACE)  # this process may fail by itself, because it misses the child, and its error says more
        self.kill()
        _exit(1)

    def _any_has_failed(self) -> bool:
        """Whether one of them has failed. Each failure is reported once."""
        failed = {
            rank: process
            for rank, process in self._processes.items()
            if process.poll() is not None and process.returncode not in self.expected
        }
        for rank, process in failed.items():
            if rank not in self._reported:
                self._reported.add(rank)
                say(f"Rank {rank} (process {process.pid}) {_how(process.returncode)}. The others end, too.")
        return bool(failed)


children = ChildProcesses()


@contextmanager
def deadline_after(error: BaseException, *, waited_for: bool) -> Iterator[None]:
    """A context for what follows an error of a run, such as ``on_exception``: it may take ``LAST_WORDS`` seconds.

    Args:
        error: what the run has raised.
        waited_for: whether other processes may wait for this one, or it for them. If not, there is no deadline.
    """
    code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    children.expected.add(code)
    if not waited_for:
        yield
        return
    children.has_failed, children.exit_status = True, code
    timer = _after(LAST_WORDS, _give_up, error, code)
    try:
        yield
    finally:
        timer.cancel()


def _give_up(error: BaseException, code: int) -> None:
    say(
        f"This process has not come to its end within {LAST_WORDS:.0f} s of its error: it may wait for others."
        f" The error was:\n{''.join(traceback.format_exception(error))}"
    )
    children.kill()
    _exit(code)


def leave_group_at_exit() -> None:
    """Leave the process group before the interpreter ends.

    A thread of gloo releases a tensor some time after its work is done. If that tensor is Python's, and the interpreter
    has ended by then, the process is aborted.
    """
    atexit.unregister(_leave_group)
    atexit.register(_leave_group)
    children.exit_first()


def _leave_group() -> None:
    distributed = torch.distributed
    if distributed.is_initialized() and not children.has_failed:
        with contextlib.suppress(Exception):
            gc.collect()  # wrappers hold the group, whose threads end with the last reference to it
            distributed.destroy_process_group()


def name_parent() -> None:
    """Tell the processes that this one is about to start who their parent is."""
    os.environ[_PARENT] = str(os.getpid())


@contextmanager
def parent_watched() -> Iterator[None]:
    """A context for a run: in a process that another one has started (:func:`name_parent`), end if that one dies."""
    parent, done = int(os.environ.get(_PARENT, 0)), threading.Event()
    if parent in (0, os.getpid()):
        yield
        return

    def look() -> None:
        while not done.wait(_LOOK):
            if os.getppid() != parent:
                _end_without(parent)

    threading.Thread(target=look, daemon=True, name="parent").start()
    try:
        yield
    finally:
        done.set()


def _end_without(parent: int) -> None:
    rank = os.environ.get("LOCAL_RANK", "?")
    say(f"Rank 0 (process {parent}) has died in the middle of the run. Rank {rank} cannot go on without it, and ends.")
    time.sleep(GRACE)
    _exit(1)


def _how(code: int) -> str:
    """How a process has ended."""
    if code >= 0:
        return f"has ended with exit status {code}; what it said is above"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"


def say(text: str) -> None:
    """Write a message of ours to standard error at once, also where the interpreter is about to end."""
    with contextlib.suppress(OSError):
        os.write(2, f"\ntrainer: {text}\n".encode())


def _after(seconds: float, function: Callable[..., None], *args: Any) -> threading.Timer:
    timer = threading.Timer(seconds, function, args)
    timer.daemon = True
    timer.start()
    return timer


def _exit(code: int) -> None:
    """End the process at once, whatever its other threads wait for."""
    flushing = threading.Thread(target=_flush, daemon=True)  # another thread may hold the streams
    flushing.start()
    flushing.join(1.0)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
