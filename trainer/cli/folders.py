"""The folders of configs and modules, of this package and of the user, in a checkout and in an installed wheel."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import trainer
from trainer.cli.processes import is_first
from trainer.common import packages

PACKAGE = Path(trainer.__file__).resolve().parent
_DEPENDENCIES = {"hydra", "lightning", "numpy", "omegaconf", "rich", "torch", "torchmetrics", "yaml"}


def packaged_conf() -> Path:
    """Return the folder with the configs of this package: inside it in a wheel, next to it in a checkout."""
    inside = PACKAGE / "conf"
    return inside if inside.is_dir() else PACKAGE.parent / "conf"


def user_conf() -> Path | None:
    """Return the user's ``./conf``, or None if it does not exist or is `packaged_conf`."""
    folder = Path.cwd() / "conf"
    return folder if folder.is_dir() and folder.resolve() != packaged_conf() else None


def conf_folders(extra: str | None = None) -> list[Path]:
    """Return the folders to search for configs, in order of precedence.

    Args:
        extra: the value of ``--config-dir``, or None.
    """
    folders = (user_conf(), packaged_conf(), Path(extra) if extra else None)
    return [folder for folder in folders if folder is not None and folder.is_dir()]


def is_users(file: str) -> bool:
    """Return whether a file of code is the user's (`packages.is_users_file`). The recipes of this project are not."""
    is_recipe = Path(file).resolve().is_relative_to(PACKAGE.parent / "recipes")
    return not (file.startswith("<") or is_recipe) and packages.is_users_file(file)


def search_here() -> None:
    """Add the working directory to ``sys.path``, which ``python -m`` does but a console script does not.

    A line on stderr names the files there that would be imported instead of this package, a package that it needs, or a
    module of Python. If one has the name of this package, the directory comes last, so that other processes of the run
    import this package.
    """
    hidden = {"trainer", *_DEPENDENCIES, *sys.stdlib_module_names}
    named = [*(file for file in sorted(Path().glob("*.py")) if file.stem in hidden), Path("trainer", "__init__.py")]
    files = [file for file in named if file.is_file() and file.resolve() != PACKAGE / "__init__.py"]
    if files and not sys.flags.safe_path and is_first():
        names = ", ".join(map(str, files))
        print(f"trainer: {names} in this folder would be imported instead of a package. Rename it.", file=sys.stderr)
    if not (sys.flags.safe_path or os.getcwd() in sys.path or "" in sys.path):
        hides_this = any("trainer" in (file.stem, file.parent.name) for file in files)
        sys.path.insert(len(sys.path) if hides_this else 0, os.getcwd())


def merge_recipes() -> None:
    """Merge the user's folder ``./recipes`` with the package ``recipes``, because one of them would hide the other.

    If both have a module of the same name, the user's is used.
    """
    user, packaged = Path.cwd() / "recipes", PACKAGE.parent / "recipes"
    if user.is_dir() and user.resolve() != packaged:
        package = importlib.import_module("recipes")
        package.__path__ = list(dict.fromkeys([str(user), *package.__path__, str(packaged)]))
