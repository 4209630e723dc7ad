"""The folders of configs and modules, of this package and of the user, in a checkout and in an installed wheel."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import trainer
from trainer.cli.processes import is_first

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


def search_here() -> None:
    """Add the working directory to ``sys.path``, which ``python -m`` does but a console script does not.

    If a module there has the name of this package, the directory comes last, so that other processes of the run import
    this package. A line on stderr names the module.
    """
    working_dir = os.getcwd()
    _warn_of_hidden_packages(working_dir)
    if sys.flags.safe_path or working_dir in sys.path or "" in sys.path:
        return
    found = [
        path
        for path in (Path(working_dir, "trainer.py"), Path(working_dir, "trainer", "__init__.py"))
        if path.is_file()
    ]
    if not found or found[0].resolve() == PACKAGE / "__init__.py":
        sys.path.insert(0, working_dir)
        return
    sys.path.append(working_dir)
    print(
        f"trainer: {found[0].relative_to(working_dir)} has the name of this package. In this folder, `import trainer`"
        " and `python -m trainer` can load either of them. Rename it.",
        file=sys.stderr,
    )


def _warn_of_hidden_packages(working_dir: str) -> None:
    """Name each file in the working directory that would be imported instead of a package of Python or of a run."""
    hidden = _DEPENDENCIES | sys.stdlib_module_names
    found = sorted(name for name in os.listdir(working_dir) if name.endswith(".py") and name[:-3] in hidden)
    if found and not sys.flags.safe_path and is_first():
        print(
            f"trainer: {', '.join(found)} in this folder {'have names' if found[1:] else 'has the name'} of Python's or"
            " of an installed package, and would be imported instead. Rename it.",
            file=sys.stderr,
        )


def merge_recipes() -> None:
    """Merge the user's folder ``./recipes`` with the package ``recipes``, because one of them would hide the other.

    If both have a module of the same name, the user's is used.
    """
    user, packaged = Path.cwd() / "recipes", PACKAGE.parent / "recipes"
    if user.is_dir() and user.resolve() != packaged:
        package = importlib.import_module("recipes")
        package.__path__ = list(dict.fromkeys([str(user), *package.__path__, str(packaged)]))
