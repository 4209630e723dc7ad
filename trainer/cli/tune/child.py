"""Run a function in a child process, so that it leaves no memory, random state or threads behind.

On Linux, the children are forks of a server process that has only imported torch and Lightning, so that they start
quickly. On other systems, forks are not safe, and each child imports everything.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from trainer.files import write_text

Message = dict[str, Any]
Send = Callable[[Message], None]
"""Sends the message as the answer, and ends the child process."""

_SIGKILL = 9
_PRELOADED = "trainer.cli.tune.attempt"
_ANSWER = "answer.json"


def run_in_child(function: str, log: Path, **arguments: Any) -> Message:
    """Call ``function(send, folder, **arguments)`` in a child process; ``folder`` is a temporary one.

    Args:
        function: ``module:name``, which this process does not import. It calls ``send`` once, with a message that can
            be written as JSON.
        log: the child's output is appended to this file.
        arguments: picklable arguments.

    Returns:
        The message. Its ``status`` is ``ok``, ``out of memory`` or ``failed``; the last two have an ``error``. If the
        child ends without a message, the message is created here: SIGKILL counts as ``out of memory``.
    """
    context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload([_PRELOADED])
    start_method = multiprocessing.get_start_method()
    with tempfile.TemporaryDirectory(prefix=".tune-", dir=log.parent, ignore_cleanup_errors=True) as folder:
        process = context.Process(target=_child_main, args=(function, Path(folder), log, start_method, arguments))
        process.start()
        try:
            process.join()
        finally:
            process.kill()
            process.join()
        answer = Path(folder, _ANSWER)
        if answer.is_file():
            message: Message = json.loads(answer.read_text(encoding="utf-8"))
            return message
    status = process.exitcode
    if status == -_SIGKILL:
        return {"status": "out of memory", "error": "killed by the system"}
    end = f"signal {-status}" if status < 0 else f"status {status}"
    return {"status": "failed", "error": f"the process ended with {end} and without a message"}


def _child_main(function: str, folder: Path, log: Path, start_method: str, arguments: dict[str, Any]) -> None:
    multiprocessing.set_start_method(start_method, force=True)  # for dataloader workers, as in an ordinary run
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    module, _, name = function.partition(":")

    def send(message: Message) -> None:
        write_text(folder / _ANSWER, json.dumps(message))
        for child in multiprocessing.active_children():  # workers of dataloaders
            child.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    getattr(import_module(module), name)(send, folder, **arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # the answer is no longer needed
