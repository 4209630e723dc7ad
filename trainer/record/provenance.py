"""Record the environment of a run: versions, machine, code and command. Does not import torch."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trainer.common import machine, redaction

_PACKAGES = (
    "amp-trainer", "torch", "lightning", "torchmetrics", "torchvision", "hydra-core", "omegaconf", "numpy",
)  # fmt: skip
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NTASKS", "WORLD_SIZE",
)  # fmt: skip
_GIT_TIMEOUT = 5.0  # seconds


def environment() -> dict[str, Any]:
    """Return the facts that are needed to reproduce a run. Initializes no device, so processes can still be forked.

    Returns:
        ``started`` (seconds, of `time.time`), ``host``, ``pid``, ``command`` (words; secrets redacted), ``directory``,
        ``python``, ``platform``, ``versions`` by package, ``cuda`` (the version that torch was built for, or None),
        ``cpu`` (its name), ``cores`` (usable by this process), ``memory`` (bytes, or None; the limit of the container
        if it has one), ``git`` (``commit``, ``branch``, ``modified``; None outside a repository) and ``variables``,
        the environment variables that affect training.
    """
    torch = sys.modules.get("torch")
    return {
        "started": time.time(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "command": [redaction.text(word) for word in sys.orig_argv],
        "directory": os.getcwd(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: text for name in _PACKAGES if (text := version_of(name)) is not None},
        "cuda": torch.version.cuda if torch is not None else None,
        "cpu": machine.cpu_name(),
        "cores": machine.cores().usable,
        "memory": machine.memory().most,
        "git": _git(),
        "variables": {name: redaction.text(os.environ[name]) for name in _VARIABLES if name in os.environ},
    }


def version_of(name: str) -> str | None:
    """Return the version of a package without importing it, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """Return the commit and branch of the working directory, and whether tracked files are modified, or None."""
    if not any((folder / ".git").exists() for folder in (Path.cwd(), *Path.cwd().parents)):
        return None

    # run no command of the repository's config, and lock and write nothing
    options = ["--no-optional-locks", "-c", "core.fsmonitor=false"]
    line = ["git", *options, "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=_GIT_TIMEOUT, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):  # no git, a folder of another user, a slow disk
        return None
    lines = done.stdout.splitlines()
    facts = dict(line.removeprefix("# ").split(" ", 1) for line in lines if line.startswith("# "))
    if facts["branch.oid"] == "(initial)":  # no commit yet
        return None
    modified = any(not line.startswith("# ") for line in lines)
    return {"commit": facts["branch.oid"], "branch": facts["branch.head"], "modified": modified}
