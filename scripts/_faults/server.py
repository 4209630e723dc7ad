"""Fork a process for each run from one that has imported torch and Lightning, which saves seconds per run.

Each run is requested by one line of JSON on the standard input: ``folder`` (for the files ``log``, ``pid`` and
``exit``), ``environment``, ``what`` to run, and its ``options``. There is no answer: the client reads the files.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn


def serve() -> None:
    """Serve until the standard input ends."""
    import hydra.core.global_hydra  # noqa: F401
    import tensorboard  # noqa: F401
    import torchdata.stateful_dataloader  # noqa: F401
    import torchmetrics.classification  # noqa: F401
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401

    import trainer.cli.build
    import trainer.cli.config_checks
    import trainer.trainer  # noqa: F401
    from _faults import program  # noqa: F401

    assert threading.active_count() == 1, "a process with threads must not be forked"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # this process does not wait for supervisors
    print("ready", flush=True)
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            supervise(json.loads(line))
            os._exit(0)


def supervise(request: dict[str, Any]) -> None:
    """Start the run, and record its exit status."""
    folder = Path(request["folder"])
    pid = os.fork()
    if pid == 0:
        run(request, folder)
    write(folder / "pid", pid)
    _, status = os.waitpid(pid, 0)
    write(folder / "exit", os.waitstatus_to_exitcode(status))


def write(path: Path, number: int) -> None:
    """Write a file atomically."""
    part = path.with_suffix(".part")
    part.write_text(str(number))
    os.replace(part, path)


def run(request: dict[str, Any], folder: Path) -> NoReturn:
    """Run in the new process. Never returns: an exception ends the interpreter, as in a normal process."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background processes with SIGINT ignored
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0, closefd=False)
    os.environ.update(request.get("environment", {}))
    os.chdir(request.get("cwd", folder))
    if request["what"] == "program":
        from _faults import program

        program.main(request["options"])
        sys.exit(0)
    if request["what"] == "torchrun":
        from torch.distributed.run import main as torchrun

        torchrun(request["options"])
        sys.exit(0)
    from trainer.cli import main

    sys.argv = ["trainer", *request["options"]]
    sys.exit(main())


if __name__ == "__main__":
    serve()
