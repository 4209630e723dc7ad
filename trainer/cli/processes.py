"""The rank of this process, and the environment variables that processes of a command share."""

from __future__ import annotations

import atexit
import gc
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trainer.common.lazy import garbage_collection_paused

PARENT = "TRAINER_PARENT"
"""Environment variable with the id of the process that started a job. A job exits when that process exits."""

DEBUG = "TRAINER_DEBUG"
"""Environment variable that passes ``--debug`` to all processes of a command."""

_RUN_SPECIFIC = re.compile(
    r"((GROUP|LOCAL|NODE|ROLE)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|PL_(GLOBAL_SEED|SEED_WORKERS)|ROLE_NAME"
    r"|TORCHELASTIC_.*"
)
"""Environment variables that a launcher sets for the processes of one run, and that other runs must not inherit."""


def rank() -> int:
    """Return the global rank from the variables of the launcher (torchrun, Lightning, Slurm), else the local rank."""
    names = ("RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "LOCAL_RANK")
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


def is_first() -> bool:
    """Return whether this is global rank 0 according to the variables of the launcher."""
    is_global = any(name in os.environ for name in ("RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"))
    return rank() == 0 and (is_global or int(os.environ.get("NODE_RANK", 0)) == 0)


def under_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def slurm_step() -> str | None:
    """Return job and step of Slurm, such as ``"17.0"``, if srun started this process; otherwise None.

    A requeued job has the same job and step.
    """
    if under_torchrun() or not {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"} <= os.environ.keys():
        return None
    return f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` for the start of another run, without the variables of a single run."""
    return {name: value for name, value in environment.items() if not _RUN_SPECIFIC.fullmatch(name)}


def end_with_parent() -> bool:
    """When the sweep that started this process is killed, send SIGTERM to this process, so that it saves and exits.

    Returns:
        Whether a sweep started this process.
    """
    parent = int(os.environ.pop(PARENT, 0))
    if parent != os.getppid() or os.name != "posix":
        return bool(parent)  # only POSIX reports a new parent

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="end_with_parent", daemon=True).start()
    return True


@contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables inside the context, also for processes started inside. A value of None unsets one."""
    before = {name: os.environ.get(name) for name in values}
    _set_environment(values)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def imports_only() -> Iterator[None]:
    """Pause garbage collection during the first import of torch and Lightning, and freeze the imported objects.

    They stay frozen until the process exits, because it runs only this command.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    with garbage_collection_paused():
        try:
            yield
        finally:
            gc.freeze()
            atexit.register(gc.unfreeze)  # extensions complain at exit if their objects are not collected


def started_as() -> str | None:
    """Return the words that the user started this program with: ``trainer``, ``python3 -m trainer`` or a path.

    Returns:
        None if another program calls this package in its own process.
    """
    script = Path(sys.argv[0])
    if script.name == "__main__.py":
        return f"{shlex.quote(sys.orig_argv[0])} -m {script.parent.name}" if "-m" in sys.orig_argv else None
    return shlex.quote(script.name if shutil.which(script.name) == str(script.absolute()) else str(script))


def broadcast_folder(folder: str) -> str:
    """Return the ``folder`` of rank 0 on all ranks that torchrun started; without torchrun, return ``folder``.

    Each rank composes the config itself, so the time in the folder's name may differ between ranks. There is no
    process group yet, so the name is sent through the key-value store that torchrun serves. Slurm has no such store,
    so the folders of its jobs are named after the job.
    """
    if not under_torchrun():
        return folder
    from trainer.common.rendezvous import is_served, store_of_this_start

    if not is_served():
        return folder
    store = store_of_this_start()
    if is_first():
        store.set("folder", folder)
    return str(store.get("folder").decode())


def is_debug() -> bool:
    """Return whether ``--debug`` was given, so that errors are printed with tracebacks."""
    return os.environ.get(DEBUG, "") not in ("", "0")
