"""Run a function in a child process, so that it leaves no memory, random state or threads behind.

The process is a program that `trainer.cli.warm_process` starts: ``python -m trainer.cli.tune FOLDER``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from trainer.cli.processes import end_with_parent
from trainer.cli.schema import targets
from trainer.cli.warm_process import start_process
from trainer.common.files import write_text
from trainer.record.run_record import read_json

Message = dict[str, Any]
Send = Callable[[Message], None]
"""Sends the message as the answer, and ends the child process."""

_SIGKILL = 9
_CALL = "call.pickle"
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
    with tempfile.TemporaryDirectory(prefix=".tune-", dir=log.parent, ignore_cleanup_errors=True) as folder:
        Path(folder, _CALL).write_bytes(pickle.dumps((function, arguments)))
        with log.open("ab") as output:
            process = start_process(
                [__package__, folder],
                folder=os.getcwd(),
                environment=os.environ,
                output=output,
                names=[function.replace(":", "."), *(str(name) for _, name in targets(arguments))],
            )
        try:
            status = process.wait()
        finally:
            process.send_signal(_SIGKILL)
            process.wait()
        if message := read_json(Path(folder), _ANSWER):
            return message
    if status == -_SIGKILL:
        return {"status": "out of memory", "error": "killed by the system"}
    end = f"signal {-status}" if status < 0 else f"status {status}"
    return {"status": "failed", "error": f"the process ended with {end} and without a message"}


def main(folder: Path) -> None:
    """Call the function that `run_in_child` has written to ``folder``."""
    end_with_parent()
    function, arguments = pickle.loads((folder / _CALL).read_bytes())
    module, _, name = function.partition(":")

    def send(message: Message) -> None:
        write_text(folder / _ANSWER, json.dumps(message))
        for child in multiprocessing.active_children():  # workers of dataloaders
            child.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    getattr(import_module(module), name)(send, folder, **arguments)
