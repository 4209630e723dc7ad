"""``run.json``: everything that is known of one run, in one file. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.files import write_text

RUN = "run.json"
"""The file that a run keeps in its folder, from its beginning to its end."""

_VERSION = 1
_OLDER = ("result.json", "curves.json", "environment.json")
"""What earlier versions wrote in its place."""


class RunFile:
    """The facts of a run, and the file that they are written to.

    Args:
        folder: of the run; made when the file is written. None for a run that has none: nothing is written.
        facts: what is known so far.

    Attributes:
        facts: what the file is going to say. Who runs the run, and `RunRecorder`, add to it.
        former: what the file said before: of an earlier run in the same folder. {} without one.
    """

    def __init__(self, folder: Path | None, **facts: Any) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = {"version": _VERSION, "status": "running", **facts}
        self.former = {} if folder is None else read(folder)

    def write(self) -> None:
        """Write what is known.

        Raises:
            OSError: it cannot be written.
        """
        if self.folder is not None:
            write(self.folder, self.facts)


def read(folder: Path, name: str = RUN) -> dict[str, Any]:
    """What ``run.json`` in ``folder``, or another file of JSON, says; {} where there is none, or it cannot be read.

    A link that leads out of the folder, perhaps to a secret, counts as missing. So does a pipe.
    """
    file = folder / name
    try:
        if not (file.is_file() and file.resolve().is_relative_to(folder.resolve())):
            return {}
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write ``run.json``, a line for each fact, so that a reader sees all of it, or what was there before.

    Raises:
        OSError: it cannot be written.
    """
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(fact)}" for name, fact in facts.items())
    write_text(folder / RUN, f"{{\n{lines}\n}}\n")


def of_older_version(folder: Path) -> str:
    """What to say of a folder that an earlier version has written, in files that are no longer read; else empty."""
    found = [name for name in _OLDER if (folder / name).is_file()]
    if not found or (folder / RUN).is_file():
        return ""
    return (
        f"{folder} was written by an older version (it has {found[0]}, expected {RUN}), whose record of a run is no"
        " longer read. Make the run again, or use the version that wrote it."
    )
