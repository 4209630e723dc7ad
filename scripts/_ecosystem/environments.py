"""Environments for libraries: ``.ecosystem/NAME`` in the checkout, filled by uv. Standard library only.

uv links files from its cache, so that several environments share one copy of torch. It uses the package index that pip
is configured for.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".ecosystem"


def prepare(name: str, requires: list[str], python: str) -> Path:
    """Return the interpreter of an environment with ``requires`` and the dependencies of our Trainer.

    TensorBoard is added for Lightning's default logger, whose methods some libraries call. The environment is recreated
    if the requirements change.
    """
    folder = FOLDER / name
    stamp, interpreter = folder / "requirements.txt", folder / "bin" / "python"
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = (
        "\n".join(
            [*requires, *ours, "tensorboard", f"# {os.path.realpath(python) if os.path.exists(python) else python}"]
        )
        + "\n"
    )
    if stamp.exists() and stamp.read_text() == wanted:
        return interpreter
    print(f"{name}: installing {', '.join(requires)} ...", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    make, fill = ["venv", "--python", python, folder], ["pip", "install", "--python", interpreter]
    for words in (make, [*fill, "--requirement", folder / "wanted.txt"]):
        command = [uv(), *map(str, words), "--quiet"]
        done = subprocess.run(command, env={**os.environ, **pip_settings()}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"Could not install {', '.join(requires)}:\n{done.stderr.strip()}")
        (folder / "wanted.txt").write_text(wanted)
    os.replace(folder / "wanted.txt", stamp)  # the mark of a finished environment
    return interpreter


def uv() -> str:
    """Return the path of uv, and install it into a separate environment if it is missing."""
    found = shutil.which("uv")
    tools = FOLDER / ".uv"
    if found is None and not (tools / "bin" / "uv").exists():
        subprocess.run([sys.executable, "-m", "venv", str(tools)], check=True)
        subprocess.run([str(tools / "bin" / "python"), "-m", "pip", "install", "--quiet", "uv"], check=True)
    return found or str(tools / "bin" / "uv")


def pip_settings() -> dict[str, str]:
    """Return pip's settings as environment variables of uv, without those that are already set."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    values: dict[str, str] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        values[key.rpartition(".")[2]] = " ".join(shlex.split(value))
    names = {
        "index-url": "UV_DEFAULT_INDEX",
        "extra-index-url": "UV_INDEX",
        "find-links": "UV_FIND_LINKS",
        "cert": "SSL_CERT_FILE",
    }
    settings = {names[key]: " ".join(value.split()) for key, value in values.items() if key in names}
    settings["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # like pip: the best version of all indexes
    return {key: value for key, value in settings.items() if key not in os.environ}


def versions(interpreter: Path, names: list[str]) -> dict[str, str]:
    """Return the installed versions of ``names`` in an environment."""
    code = "import sys\nfrom importlib.metadata import version\nfor name in sys.argv[1:]: print(version(name))"
    done = subprocess.run([str(interpreter), "-c", code, *names], capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.split(), strict=True))


def package(requirement: str) -> str:
    """Return the package of a requirement: ``torch`` for ``torch==2.15.0``, ``scvi-tools`` for ``scvi-tools[x]``."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
    if found is None:
        raise ValueError(f"Got the requirement {requirement!r}, expected something like 'package==1.2.3'.")
    return re.sub(r"[-_.]+", "-", found[0]).lower()
