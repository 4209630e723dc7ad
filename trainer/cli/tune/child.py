"""A function in a process of its own, which leaves nothing behind: no memory, no random state, no threads.

On Linux such processes are forks of a server that has imported torch and Lightning and nothing else, so that they
start in a moment. Elsewhere forks are not safe, and each process imports everything again.
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
Tell = Callable[[Message], None]
"""Answers with the message, and ends the process, whatever it is still doing."""

_SIGKILL = 9
_PRELOADED = "trainer.cli.tune.attempt"


def run_in_child(function: str, log: Path, **arguments: Any) -> Message:
    """Call ``function(tell, folder, **arguments)`` in a process of its own; ``folder`` is a temporary one.

    Args:
        function: ``module:name``, so that this process need not import it; it tells one message, which JSON can hold.
        log: gets what the process prints.
        arguments: can be pickled.

    Returns:
        What it told. For a process that ended without telling anything ``{"status": "died", "signal": its number or
        None, "exit_status": a number or None}``.
    """
    context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload([_PRELOADED])
    start_method = multiprocessing.get_start_method()
    with tempfile.TemporaryDirectory(prefix=".tune-", dir=log.parent, ignore_cleanup_errors=True) as folder:
        process = context.Process(target=_entry, args=(function, Path(folder), log, start_method, arguments))
        process.start()
        try:
            process.join()
        finally:
            process.kill()
            process.join()
        answer = _answer(Path(folder))
        if answer.is_file():
            message: Message = json.loads(answer.read_text(encoding="utf-8"))
            return message
    signal = -process.exitcode if process.exitcode < 0 else None
    return {"status": "died", "signal": signal, "exit_status": process.exitcode if signal is None else None}


def is_killed(message: Message) -> bool:
    """Whether the system has killed the process, which is what it does when memory runs out."""
    return bool(message["status"] == "died" and message["signal"] == _SIGKILL)


def _answer(folder: Path) -> Path:
    return folder / "answer.json"


def _entry(function: str, folder: Path, log: Path, start_method: str, arguments: dict[str, Any]) -> None:
    multiprocessing.set_start_method(start_method, force=True)  # of dataloader workers: as in any other run
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    module, _, name = function.partition(":")

    def tell(message: Message) -> None:
        write_text(_answer(folder), json.dumps(message))
        for child in multiprocessing.active_children():  # workers of dataloaders
            child.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    getattr(import_module(module), name)(tell, folder, **arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # nobody is left to be told
