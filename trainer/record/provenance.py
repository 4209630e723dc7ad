"""Where a run takes place: versions, machine, code and command. Imports no torch."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trainer import machine, redaction

_PACKAGES = (
    "amp-trainer", "torch", "lightning", "torchmetrics", "torchvision", "hydra-core", "omegaconf", "numpy",
)  # fmt: skip
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NTASKS", "WORLD_SIZE",
)  # fmt: skip
_PATIENCE = 5.0  # seconds, for git


def environment() -> dict[str, Any]:
    """What somebody wants to know who finds the results later. Touches no device: processes can still be forked.

    Returns:
        ``started`` (seconds, of `time.time`), ``host``, ``pid``, ``command`` (words; secrets redacted), ``directory``,
        ``python``, ``platform``, ``versions`` by package, ``cuda`` (that torch was built for; None without),
        ``cpu`` (its name), ``cores`` (that this process may use), ``memory`` (bytes, or None; the limit of the
        container where there is one), ``git`` (``commit``, ``branch``, ``modified``; None where the working directory
        is in no repository) and ``variables`` of the environment: the few that matter to a training.
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
    """The version of a package, which is not imported; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """The commit of the working directory, and whether files that git knows differ from it."""
    if not any((folder / ".git").exists() for folder in (Path.cwd(), *Path.cwd().parents)):
        return None
    program = shutil.which("git")
    if program is None:
        return None

    def ask(*words: str) -> str:
        # no command of the repository's config is run, and nothing is locked or written
        line = [program, "--no-optional-locks", "-c", "core.fsmonitor=false", *words]
        done = subprocess.run(line, capture_output=True, text=True, timeout=_PATIENCE, check=True)
        return done.stdout.strip()

    try:
        commit = ask("rev-parse", "HEAD")
        branch = ask("rev-parse", "--abbrev-ref", "HEAD")
        modified = bool(ask("status", "--porcelain", "--untracked-files=no"))
    except (OSError, ValueError, subprocess.SubprocessError):  # no commit yet, somebody else's folder, a slow disk
        return None
    return {"commit": commit, "branch": branch, "modified": modified}
