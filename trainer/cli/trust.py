"""``trainer trust``: the packages that a user's configs may name, beyond those that everybody's may.

A package that the user has installed from a folder of their own, as pip notes it down, is the user's code. Others are
trusted once and for good, in a file of the user's configuration folder; never in a project, which may come from
somebody else. Trusting a package means that any config may have its code run as you.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from trainer.cli.arguments import Arguments, UsageError
from trainer.errors import did_you_mean

VARIABLE = "TRAINER_TRUST"
"""Packages, separated by commas; where it is set, it stands in the place of the file."""

_OURS = "amp-trainer"


def command(arguments: Arguments) -> int:
    """``trainer trust`` and ``trainer trust NAME ...``."""
    if VARIABLE in os.environ and arguments.words:
        raise UsageError(
            f"{VARIABLE} is set in the environment, to {os.environ[VARIABLE]!r}, and stands in the place of what"
            " `trainer trust` keeps. Add the package there, or unset it."
        )
    for name in arguments.words:
        _check(name)
    known, file = list(trusted()), file_of_user()
    added = [name for name in dict.fromkeys(arguments.words) if name not in known]
    if added:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join([*known, *added]) + "\n", encoding="utf-8")
        print(f"Trusted from now on: {', '.join(added)}. Any config may name their classes and functions, which run as")
        print(f"you. {file} has the list: take a line out to take it back.")
    elif arguments.words:
        print(f"Trusted already: {', '.join(dict.fromkeys(arguments.words))}. {file} has the list.")
    else:
        source = f"the environment's {VARIABLE}" if VARIABLE in os.environ else str(file)
        print("\n".join(known) or f"No package is trusted by {source}. To trust one: python -m trainer trust NAME")
    return 0


def trusted() -> tuple[str, ...]:
    """The packages, or modules, that the user trusts."""
    said = os.environ.get(VARIABLE)
    if said is None:
        try:
            said = file_of_user().read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return ()
        except (OSError, ValueError) as error:
            raise UsageError(f"{file_of_user()} cannot be read: {error}. It has a package on each line.") from error
    return tuple(name for name in re.split(r"[,\s]+", said) if name)


def file_of_user() -> Path:
    """Where ``trainer trust`` keeps its list."""
    if os.name == "nt":
        folder = Path(os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming")
    else:
        folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return folder / _OURS / "trusted"


def is_installed_from_folder(root: str) -> bool:
    """Whether the top-level module ``root`` is of a package that pip has installed from a folder, editable or not.

    Pip writes that down in ``direct_url.json`` (PEP 610). Imports nothing.
    """
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


def _check(name: str) -> None:
    from trainer.cli.targets import PACKAGES, is_refused

    root = name.partition(".")[0]
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name):
        raise UsageError(f"trust got {name!r}, expected the name of a package as it is imported, such as timm.")
    if is_refused(name):
        raise UsageError(
            f"{name} runs, unpickles or writes what it is given: a config may not name it, trusted or not."
        )
    if name in PACKAGES:
        raise UsageError(f"Of {name} a config may name what experiments are made of, without being trusted.")
    if importlib.util.find_spec(root) is None:
        raise UsageError(f"There is no package {root!r} installed.{did_you_mean(root, _installed())} Install it first.")


def _installed() -> list[str]:
    return sorted({(one.metadata["Name"] or "").replace("-", "_") for one in distributions()})
