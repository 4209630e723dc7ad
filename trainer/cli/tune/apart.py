"""A function in a process of its own, which leaves nothing behind: no memory, no random state, no threads.

On Linux such processes are forks of a server that has imported torch and Lightning and nothing else, so that they
start in a moment. Elsewhere forks are not safe, and each imports anew.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

Message = dict[str, Any]
Tell = Callable[[Message], None]
"""Sends the message; only the first counts."""

_SIGKILL = 9
_PRELOADED = "trainer.cli.tune.attempt"
_LAST_WORDS = 10.0  # seconds that a process has to end in after it has told


def run_apart(function: str, argument: Any, log: Path) -> Message:
    """Call ``function(argument, tell)`` in a process of its own.

    Args:
        function: ``module:name``, so that this process need not import it; it tells one message.
        argument: can be pickled.
        log: gets what the process prints.

    Returns:
        What it told. For a process that ended without a word ``{"status": "died", "signal": its number or None,
        "exit_status": a number or None}``.
    """
    context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload([_PRELOADED])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_entry, args=(function, argument, sender, log, multiprocessing.get_start_method()))
    process.start()
    sender.close()
    try:
        wait([receiver, process.sentinel])
        if receiver.poll():
            message: Message = receiver.recv()
            process.join(_LAST_WORDS)
            return message
        process.join()
        return _died(process.exitcode)
    except EOFError:  # the end of the pipe, before the process's own
        process.join(_LAST_WORDS)
        return _died(process.exitcode)
    finally:
        process.kill()
        process.join()
        receiver.close()


def _died(status: int | None) -> Message:
    by_signal = status is not None and status < 0
    return {
        "status": "died",
        "signal": -status if by_signal and status is not None else None,
        "exit_status": None if by_signal else status,
    }


def killed(message: Message) -> bool:
    """Whether the system has killed the process, which is what it does when memory runs out."""
    return bool(message["status"] == "died" and message["signal"] == _SIGKILL)


def _entry(function: str, argument: Any, sender: Connection, log: Path, start_method: str) -> None:
    multiprocessing.set_start_method(start_method, force=True)  # of dataloader workers: as in any other run
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.path[:] = dict.fromkeys([os.getcwd(), *sys.path])  # where the user's modules are
    module, _, name = function.partition(":")
    getattr(import_module(module), name)(argument, sender.send)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # nobody is left to be told
