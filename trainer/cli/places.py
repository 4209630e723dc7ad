"""Where a config may have files written: names lead out of no folder, and folders elsewhere are the user's to say."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from trainer.cli.arguments import UsageError
from trainer.cli.targets import PACKAGES

_WRITERS = ("callbacks", "logger", "trainer")
_NAMES = ("experiment_name", "filename", "name", "run_name", "sub_dir", "version")
_FOLDERS = ("default_root_dir", "dir", "dirpath", "log_dir", "offline_directory", "root_dir", "save_dir")
_SAID = ("exclude_batches_path", "storage")
"""Files, or more, that are written to wherever they are."""

_LOCAL = re.compile(r"^(?:file|local):(?://)?", re.IGNORECASE)


def check_option(group: str, name: str) -> None:
    """An option of a config group is found in the folders of configs.

    Raises:
        UsageError: ``name`` leads out of them.
    """
    if _leads_out(name):
        raise UsageError(
            f"{group}={name} is a path, expected the name of an option. Configs elsewhere are found with --config-dir"
            f" FOLDER, which has the folder {group} in it."
        )


def check(settings: dict[str, Any], given: Collection[str]) -> None:
    """Refuse names and folders that lead away from the run.

    Args:
        settings: the config, as plain containers. The folder of the run is not known yet, and any name in it.
        given: keys that the command line sets.

    Raises:
        UsageError: a name that is a path to elsewhere; a folder elsewhere that the command line does not say.
    """
    here = Path.cwd().resolve()
    for writer in _WRITERS:
        for key, name, value, is_ours in _texts(settings.get(writer), writer):
            if name in _NAMES and _leads_out(value):
                raise UsageError(
                    f"{key} is {value}, expected a name that stays in its folder: without '..', a root, or a $VARIABLE"
                    " that has one."
                )
            node = key.partition("[")[0]
            if any(node == one or node.startswith(f"{one}.") for one in given):
                continue
            if name in _SAID:
                raise UsageError(
                    f"{key} is {value} in a config file. It is written to, wherever it is, so it is named on the"
                    f" command line: {key}={value}"
                )
            is_web = re.match(r"https?://(?!.*::)", value) and "_args_[" not in key
            if name in _FOLDERS or (is_ours and not is_web):
                _check_place(key, value, here)


def _check_place(key: str, value: str, here: Path) -> None:
    place = _LOCAL.sub("", value)
    if "://" not in place and is_inside(here, place):
        return
    how = "give the argument by its name, on the command line." if "[" in key else ""
    raise UsageError(
        f"{key} leads to {value}, which is not in the working directory. To write there,"
        f" {how or f'say so on the command line: {key}={value}'}"
    )


def _texts(node: Any, key: str, is_ours: bool = False) -> Iterator[tuple[str, str, str, bool]]:
    """Full key, last name and value of every text in ``node``, and whether it goes to a class of a known package.

    A class of the user's own reads files as well; of those of known packages what a text is for need not be guessed.
    """
    children: Iterator[tuple[str, str, Any]] = iter(())
    if isinstance(node, dict):
        target = str(node.get("_target_", ""))
        is_ours = target.partition(".")[0] in PACKAGES if target else is_ours
        children = ((f"{key}.{name}", str(name), child) for name, child in node.items())
    elif isinstance(node, list):
        children = ((f"{key}[{index}]", "", child) for index, child in enumerate(node))
    for place, name, child in children:
        if isinstance(child, str):
            yield place, name, child, is_ours
        else:
            yield from _texts(child, place, is_ours)


def _leads_out(name: str) -> bool:
    name = os.path.expandvars(name)  # as some loggers do
    parts = re.split(r"[/\\]", name)
    is_path = ".." in parts or (len(parts) > 1 and not parts[0]) or bool(re.match(r"[a-zA-Z]:[/\\]|~|\w+://", name))
    return is_path or not name.isprintable()


def is_inside(folder: Path, path: str) -> bool:
    """Whether ``path``, as it would be read in ``folder``, is in there. Links are followed."""
    try:
        return (folder / Path(os.path.expandvars(path)).expanduser()).resolve().is_relative_to(folder.resolve())
    except (RuntimeError, ValueError):  # a home that nobody has, a zero byte
        return False
