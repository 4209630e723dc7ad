"""Where configs and modules are found: ours and the user's, in a checkout as in an installed wheel."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import trainer

PACKAGE = Path(trainer.__file__).resolve().parent


def packaged_conf() -> Path:
    """Our configs: inside the package in a wheel, beside it in a checkout."""
    inside = PACKAGE / "conf"
    return inside if inside.is_dir() else PACKAGE.parent / "conf"


def user_conf() -> Path | None:
    """The user's ``./conf``, or None if there is none or it is ours."""
    folder = Path.cwd() / "conf"
    return folder if folder.is_dir() and folder.resolve() != packaged_conf() else None


def conf_folders(extra: str | None = None) -> list[Path]:
    """The folders to look for a config in, those that win first.

    Args:
        extra: what ``--config-dir`` was given, if anything.
    """
    folders = (user_conf(), packaged_conf(), Path(extra) if extra else None)
    return [folder for folder in folders if folder is not None and folder.is_dir()]


def search_here() -> None:
    """Make modules in the working directory importable, as ``python -m`` does and a console script does not.

    If a module there has the name of this package, the directory comes last, so that other processes of the run import
    this package. A line on stderr names the module.
    """
    here = os.getcwd()
    if sys.flags.safe_path or here in sys.path or "" in sys.path:
        return
    found = [path for path in (Path(here, "trainer.py"), Path(here, "trainer", "__init__.py")) if path.is_file()]
    if not found or found[0].resolve() == PACKAGE / "__init__.py":
        sys.path.insert(0, here)
        return
    sys.path.append(here)
    print(
        f"trainer: {found[0].relative_to(here)} has the name of this package: `import trainer` and `python -m trainer`"
        " here use one or the other, depending on how a program is started. Rename it.",
        file=sys.stderr,
    )


def merge_recipes() -> None:
    """Make one package of a folder ``./recipes`` and of our recipes; where both have a module, the user's wins.

    Otherwise one would hide the other: theirs ours if it has an ``__init__.py``, ours theirs if not.
    """
    theirs, ours = Path.cwd() / "recipes", PACKAGE.parent / "recipes"
    if theirs.is_dir() and theirs.resolve() != ours:
        package = importlib.import_module("recipes")
        package.__path__ = list(dict.fromkeys([str(theirs), *package.__path__, str(ours)]))
