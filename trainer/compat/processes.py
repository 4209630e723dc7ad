"""The processes of one run end together: where one of them dies or raises, the others do not wait for it for ever.

Lightning looks after the processes that it has started, and kills everything at once when one fails; but those whose
parent has failed wait for it, on a GPU for half an hour. Here all of them get the time to say what happened first.
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
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

GRACE = 10.0
"""Seconds that a process gets to end by itself once another has failed, and to end at all once it has to."""
LAST_WORDS = 30.0
"""Seconds that callbacks and loggers get once a run has raised (``on_exception``), where other processes wait."""
_LOOK = 0.2
_PARENT = "AMP_TRAINER_PARENT"


class WatchedLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of scripts, whose processes end together."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other processes, and call ``function`` in this one."""
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            os.environ[_PARENT] = str(os.getpid())
            self._call_children_scripts()
            first = environment.node_rank() * self.num_processes
            others.watch({first + rank: process for rank, process in enumerate(self.procs, 1)})
        _set_num_threads_if_needed(num_processes=self.num_processes)
        others.start_run()
        with _parent_watched():
            return function(*args, **kwargs)


class _Others:
    """The processes that this one has started.

    Attributes:
        has_failed: whether the last run of this process, or a process that it has started, has failed.
        expected: exit statuses of processes that are no failures: 0, and that with which this process ends itself.
        exit_status: of this process, where it has to be ended because it hangs at its end.
    """

    def __init__(self) -> None:
        self.has_failed = False
        self.expected = {0}
        self.exit_status = 1
        self._processes: dict[int, Popen[Any]] = {}
        self._said: set[int] = set()

    def start_run(self) -> None:
        """A run starts: whatever happened before has been dealt with."""
        self.has_failed, self.expected = False, {0}

    def watch(self, processes: dict[int, Popen[Any]]) -> None:
        """From now on, these processes (by their rank) and this one end together."""
        self._processes = processes
        threading.Thread(target=self._look_after_them, daemon=True, name="others").start()
        self.come_first()

    def come_first(self) -> None:
        """Be the first of what happens when the interpreter ends: what comes after may wait for the others."""
        atexit.unregister(self.end)
        atexit.register(self.end)

    def end(self) -> None:
        """This process ends: so do those that it has started, if something has failed."""
        if not self.has_failed:
            return
        deadline = time.monotonic() + GRACE
        while self._alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._any_has_failed()
        self.kill()
        with contextlib.suppress(RuntimeError):  # some versions of Python start no threads as late as this
            _after(GRACE, _leave, self.exit_status)

    def send(self, number: int) -> None:
        """Pass a signal on to them."""
        for process in self._alive().values():
            process.send_signal(number)

    def kill(self) -> None:
        """End the processes that are left, at once."""
        for rank, process in self._alive().items():
            _say(f"Rank {rank} (process {process.pid}) has not ended by itself, and is killed.")
            process.kill()

    def _alive(self) -> dict[int, Popen[Any]]:
        return {rank: process for rank, process in self._processes.items() if process.poll() is None}

    def _look_after_them(self) -> None:
        while not self._any_has_failed():
            time.sleep(_LOOK)
        self.has_failed = True
        time.sleep(GRACE)  # what this process waits for may fail of itself, and says more
        self.kill()
        _leave(1)

    def _any_has_failed(self) -> bool:
        """Whether one of them has failed; if so, says so, once."""
        failed = {
            rank: process
            for rank, process in self._processes.items()
            if process.poll() is not None and process.returncode not in self.expected
        }
        for rank, process in failed.items():
            if rank not in self._said:
                self._said.add(rank)
                _say(f"Rank {rank} (process {process.pid}) {_how(process.returncode)}. The others end, too.")
        return bool(failed)


others = _Others()


@contextmanager
def last_words(error: BaseException, *, waited_for: bool) -> Iterator[None]:
    """While everybody is told that a run has ended with ``error``.

    Args:
        error: what it has raised.
        waited_for: whether other processes may wait for this one, or it for them: it has to come to an end.
    """
    code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    others.expected.add(code)
    if not waited_for:
        yield
        return
    others.has_failed, others.exit_status = True, code
    timer = _after(LAST_WORDS, _give_up, error, code)
    try:
        yield
    finally:
        timer.cancel()


def _give_up(error: BaseException, code: int) -> None:
    _say(
        f"This process has not come to its end within {LAST_WORDS:.0f} s of its error: it may wait for others."
        f" The error was:\n{''.join(traceback.format_exception(error))}"
    )
    others.kill()
    _leave(code)


def leave_group_at_exit() -> None:
    """Leave the process group before the interpreter ends.

    A thread of gloo lets go of a tensor some time after its work is done. Where that tensor is Python's, and the
    interpreter has ended meanwhile, the process is aborted.
    """
    atexit.unregister(_leave_group)
    atexit.register(_leave_group)
    others.come_first()


def _leave_group() -> None:
    distributed = torch.distributed
    if distributed.is_initialized() and not others.has_failed:
        with contextlib.suppress(Exception):
            gc.collect()  # wrappers hold the group: its threads end with whoever is the last to hold it
            distributed.destroy_process_group()


@contextmanager
def _parent_watched() -> Iterator[None]:
    """During a run in a process that ``WatchedLauncher`` has started, which is over when rank 0 is no more."""
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
    _say(f"Rank 0 (process {parent}) has died in the middle of the run. Rank {rank} cannot go on without it, and ends.")
    time.sleep(GRACE)
    _leave(1)


def _how(code: int) -> str:
    """How a process has ended."""
    if code >= 0:
        return f"has ended with exit status {code}; what it said is above"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"\ntrainer: {text}\n".encode())


def _after(seconds: float, function: Callable[..., None], *args: Any) -> threading.Timer:
    timer = threading.Timer(seconds, function, args)
    timer.daemon = True
    timer.start()
    return timer


def _leave(code: int) -> None:
    """End the process, whatever its other threads wait for."""
    flushing = threading.Thread(target=_flush, daemon=True)  # they may hold the streams, too
    flushing.start()
    flushing.join(1.0)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
