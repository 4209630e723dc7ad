"""Which packages the user trusts: by name, or because they were installed from a folder. Imports none of them.

Pip notes down which packages the user has installed from a folder. Others are trusted once and for good, in a file of
the user's configuration folder; never in a project, which may come from somebody else.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli.arguments import UsageError

if TYPE_CHECKING:
    from importlib.metadata import Distribution

VARIABLE = "TRAINER_TRUST"
"""Packages, separated by commas; where it is set, it stands in the place of the file."""

_OURS = "amp-trainer"


def packages() -> tuple[str, ...]:
    """The packages, or modules, that the user trusts."""
    said = os.environ.get(VARIABLE)
    if said is None:
        try:
            said = file().read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return ()
        except (OSError, ValueError) as error:
            raise UsageError(f"{file()} cannot be read: {error}. It has a package on each line.") from error
    return tuple(name for name in re.split(r"[,\s]+", said) if name)


def file() -> Path:
    """Where ``trainer trust`` keeps its list."""
    if os.name == "nt":
        folder = Path(os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming")
    else:
        folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return folder / _OURS / "trusted"


def is_installed_from_folder(root: str) -> bool:
    """Whether the top-level module ``root`` is of a package that pip has installed from a folder, editable or not.

    Pip writes that down in ``direct_url.json`` (PEP 610). Imports nothing of it.
    """
    from importlib.metadata import distributions

    spec = importlib.util.find_spec(root) if root not in sys.modules else sys.modules[root].__spec__
    if spec is None or (spec.origin is None and not spec.submodule_search_locations):
        return False
    places = [Path(place).resolve() for place in spec.submodule_search_locations or [spec.origin or ""]]
    for distribution in distributions():
        folder = _folder_of(distribution)
        if folder is None:
            continue
        if all(place.is_relative_to(folder) for place in places):  # editable
            return True
        if spec.origin is not None and _has(distribution, root, Path(spec.origin)):
            return True
    return False


def _folder_of(distribution: Distribution) -> Path | None:
    """The folder that ``distribution`` was installed from; None where it was not, or is ours."""
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        noted = json.loads(distribution.read_text("direct_url.json") or "{}")
        url = urlsplit(noted["url"]) if "dir_info" in noted else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if url is None or url.scheme != "file" or distribution.metadata["Name"] == _OURS:
        return None
    return Path(url2pathname(url.path)).resolve()


def _has(distribution: Distribution, root: str, origin: Path) -> bool:
    """Whether the module ``root``, which lies at ``origin``, is one of the files of ``distribution``."""
    files = [file for file in distribution.files or () if file.parts[0].partition(".")[0] == root]
    return any(Path(str(file.locate())).resolve() == origin.resolve() for file in files)
