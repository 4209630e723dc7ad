"""End all processes of a run if one of them dies or raises, so that the others do not wait for it forever.

The launchers watch the processes that they started, and kill all of them at once if one fails. But if the parent fails,
its children keep waiting for it, on a GPU for half an hour. Here each process that has failed gets some time to report
its error, and then all processes end.
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
"""Seconds that a process gets to end by itself after another has failed, and to complete an exit that has begun."""
ERROR_TIMEOUT = 30.0
"""Seconds that callbacks and loggers get after an error (``on_exception``) if other processes may be waiting."""
_POLL_INTERVAL = 0.2
_PARENT = "AMP_TRAINER_PARENT"


class ChildProcesses:
    """The child processes of this process.

    Attributes:
        has_failed: whether the last run of this process, or a child process, has failed.
        expected: exit statuses of children that do not count as failures: 0, and this process's own exit status.
        exit_status: exit status of this process if it has to be ended because it hangs at exit.
    """

    def __init__(self) -> None:
        self.has_failed = False
        self.expected = {0}
        self.exit_status = 1
        self._processes: dict[int, Popen[Any]] = {}
        self._reported: set[int] = set()

    def start_run(self) -> None:
        """Forget the failures of earlier runs, because a new run starts."""
        self.has_failed, self.expected = False, {0}

    def watch(self, processes: dict[int, Popen[Any]]) -> None:
        """Watch these processes, given by rank, from now on: if one of them fails, end all of them and this process."""
        self._processes = processes
        threading.Thread(target=self._watch_children, daemon=True, name="child processes").start()
        self.exit_first()

    def exit_first(self) -> None:
        """Make :meth:`exit` the interpreter's first exit handler, because later ones may wait for the children."""
        atexit.unregister(self.exit)
        atexit.register(self.exit)

    def exit(self) -> None:
        """End the children when this process exits, if anything has failed."""
        if not self.has_failed:
            return
        deadline = time.monotonic() + GRACE
        while self._alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._any_has_failed()
        self.kill()
        with contextlib.suppress(RuntimeError):  # some versions of Python cannot start threads this late
            _start_timer(GRACE, _exit, self.exit_status)

    def send(self, number: int) -> None:
        """Send a signal to all running children."""
        for process in self._alive().values():
            process.send_signal(number)

    def kill(self) -> None:
        """Kill the children that are still running."""
        for rank, process in self._alive().items():
            write_stderr(f"Rank {rank} (process {process.pid}) has not exited, and is killed.")
            process.kill()

    def _alive(self) -> dict[int, Popen[Any]]:
        return {rank: process for rank, process in self._processes.items() if process.poll() is None}

    def _watch_children(self) -> None:
        """Wait until a child has failed, then end the others and this process. Runs in a thread."""
        while not self._any_has_failed():
            time.sleep(_POLL_INTERVAL)
        self.has_failed = True
        time.sleep(GRACE)  # this process may raise a more specific error, because the child is missing
        self.kill()
        _exit(1)

    def _any_has_failed(self) -> bool:
        """Return whether a child has failed. Reports each failure once."""
        failed = {
            rank: process
            for rank, process in self._processes.items()
            if process.poll() is not None and process.returncode not in self.expected
        }
        for rank, process in failed.items():
            if rank not in self._reported:
                self._reported.add(rank)
                write_stderr(
                    f"Rank {rank} (process {process.pid}) {_exit_description(process.returncode)}. The others end, too."
                )
        return bool(failed)


children = ChildProcesses()


@contextmanager
def deadline_after(error: BaseException, *, waited_for: bool) -> Iterator[None]:
    """Limit the time of code that follows an error, such as ``on_exception``, to ``ERROR_TIMEOUT`` seconds.

    Args:
        error: the exception that ended the run.
        waited_for: whether other processes and this one may be waiting for each other. If not, there is no limit.
    """
    code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    children.expected.add(code)
    if not waited_for:
        yield
        return
    children.has_failed, children.exit_status = True, code
    timer = _start_timer(ERROR_TIMEOUT, _give_up, error, code)
    try:
        yield
    finally:
        timer.cancel()


def _give_up(error: BaseException, code: int) -> None:
    write_stderr(
        f"This process has not ended within {ERROR_TIMEOUT:.0f} s of its error: it may be waiting for other processes."
        f" The error was:\n{''.join(traceback.format_exception(error))}"
    )
    children.kill()
    _exit(code)


def leave_group_at_exit() -> None:
    """Leave the process group before the interpreter ends.

    A thread of gloo releases a tensor some time after its work is done. If that tensor belongs to Python and the
    interpreter has ended by then, the process is aborted.
    """
    atexit.unregister(_leave_group)
    atexit.register(_leave_group)
    children.exit_first()


def _leave_group() -> None:
    distributed = torch.distributed
    if distributed.is_initialized() and not children.has_failed:
        with contextlib.suppress(Exception):
            gc.collect()  # wrappers hold the group; its threads end when the last reference is gone
            distributed.destroy_process_group()


@contextmanager
def parent_named() -> Iterator[None]:
    """Pass this process's id, in an environment variable, to the processes that the ``with`` block starts."""
    os.environ[_PARENT] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[_PARENT]


@contextmanager
def parent_watched() -> Iterator[None]:
    """If this process was started in :func:`parent_named`, exit if the process that started it dies during a run."""
    parent, done = int(os.environ.get(_PARENT, 0)), threading.Event()
    if parent in (0, os.getpid()):
        yield
        return

    def look() -> None:
        while not done.wait(_POLL_INTERVAL):
            if os.getppid() != parent:
                _exit_without_parent(parent)

    threading.Thread(target=look, daemon=True, name="parent").start()
    try:
        yield
    finally:
        done.set()


def _exit_without_parent(parent: int) -> None:
    rank = os.environ.get("LOCAL_RANK", "?")
    write_stderr(
        f"The process that started this one (process {parent}, local rank 0) has died during the run. Local rank {rank}"
        " cannot continue without it, and exits."
    )
    time.sleep(GRACE)
    _exit(1)


def _exit_description(code: int) -> str:
    """Return how a process ended, as the end of a sentence."""
    if code >= 0:
        return f"has ended with exit status {code}; its output is above"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"


def write_stderr(text: str) -> None:
    """Write a message of the Trainer to standard error immediately, even if the interpreter is about to end."""
    with contextlib.suppress(OSError):
        os.write(2, f"\ntrainer: {text}\n".encode())


def _start_timer(seconds: float, function: Callable[..., None], *args: Any) -> threading.Timer:
    timer = threading.Timer(seconds, function, args)
    timer.daemon = True
    timer.start()
    return timer


def _exit(code: int) -> None:
    """End the process immediately, even if other threads are blocked."""
    flushing = threading.Thread(target=_flush, daemon=True)  # another thread may hold the stream's lock
    flushing.start()
    flushing.join(1.0)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
