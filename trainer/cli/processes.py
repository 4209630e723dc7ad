"""Which process of a run this is, and what the others must know of it, as told by the environment."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from trainer._lazy import garbage_collection_paused

PARENT = "TRAINER_PARENT"
"""The variable with the process id of the sweep that has started this process, and that it ends with."""

DEBUG = "TRAINER_DEBUG"
"""The variable of the environment that says ``--debug`` to every process of a command."""

# What a launcher leaves behind for the processes of one run, and no other run may see.
_LEAKS = (
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "RANK",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "WORLD_SIZE",
)


def rank() -> int:
    """The global rank, as far as the launcher (torchrun, Lightning's own, SLURM) has said; else that on this node."""
    names = ("RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "LOCAL_RANK")
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


def is_first() -> bool:
    """Whether this is global rank 0, as far as the launcher has said."""
    is_global = any(name in os.environ for name in ("RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"))
    return rank() == 0 and (is_global or int(os.environ.get("NODE_RANK", 0)) == 0)


def under_torchrun() -> bool:
    """Whether torchrun started this process together with others."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def slurm_step() -> str | None:
    """The job and the step, such as ``"17.0"``, whose tasks srun has started, this process among them; else None.

    A job that Slurm runs again keeps both.
    """
    if under_torchrun() or not {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"} <= os.environ.keys():
        return None
    return f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without what belongs to a single run, for a run of its own."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _LEAKS and not name.startswith("TORCHELASTIC_")
    }


def end_with_parent() -> None:
    """Save and end, by a SIGTERM, when the sweep that has started this process is gone without a word (killed)."""
    parent = int(os.environ.pop(PARENT, 0))
    if parent != os.getppid() or os.name != "posix":
        return  # elsewhere a process does not learn of it

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="end_with_parent", daemon=True).start()


@contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """A context in which environment variables have these values; None for unset. Processes started in it see them."""
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
    """Pause garbage collection for the first import of torch and Lightning, and exclude the imported objects from it.

    The process is ours, so that they are excluded until it exits.
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


def agree(folder: str) -> str:
    """Rank 0's ``folder``, on every rank that torchrun started; elsewhere ``folder`` itself.

    Every rank composes the config, and with it the time in the folder's name, for itself. torchrun serves a
    key-value store for the ranks to find each other; the name goes through that before there is a process
    group. Slurm serves none, and folders are named after its jobs.
    """
    if not under_torchrun():
        return folder
    from trainer.engine.rendezvous import is_served, store_of_this_start

    if not is_served():
        return folder
    store = store_of_this_start()
    if is_first():
        store.set("folder", folder)
    return str(store.get("folder").decode())


def is_debug() -> bool:
    """Whether errors are to be shown with their tracebacks."""
    return os.environ.get(DEBUG, "") not in ("", "0")
