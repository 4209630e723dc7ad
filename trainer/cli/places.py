"""Where a config may have files written: names lead out of no folder, and folders elsewhere are the user's to say."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from trainer.cli.arguments import UsageError

_WRITERS = ("callbacks", "logger", "trainer")
_NAMES = ("experiment_name", "filename", "name", "run_name", "sub_dir", "version")
_FOLDERS = ("default_root_dir", "dir", "dirpath", "log_dir", "offline_directory", "root_dir", "save_dir")


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
        for key, name, value in _texts(settings.get(writer), writer):
            if name in _NAMES and _leads_out(value):
                raise UsageError(f"{key} is {value}, expected a name that stays in its folder: without '..' or a root.")
            is_said = any(key == one or key.startswith(f"{one}.") for one in given)
            if name == "storage" and not is_said:
                raise UsageError(
                    f"{key} is {value} in a config file. A study is written to, wherever it is, so it is named on the"
                    f" command line: {key}={value}"
                )
            if name in _FOLDERS and not is_said and "://" not in value and not _is_inside(here, value):
                raise UsageError(
                    f"{key} leads to {value}, which is not in the working directory. To write there, say so on the"
                    f" command line: {key}={value}"
                )


def _texts(node: Any, key: str) -> Iterator[tuple[str, str, str]]:
    """Full key, last name and value of every text in ``node``."""
    children: Iterator[tuple[str, str, Any]] = iter(())
    if isinstance(node, dict):
        children = ((f"{key}.{name}", str(name), child) for name, child in node.items())
    elif isinstance(node, list):
        children = ((f"{key}[{index}]", "", child) for index, child in enumerate(node))
    for place, name, child in children:
        if isinstance(child, str):
            yield place, name, child
        else:
            yield from _texts(child, place)


def _leads_out(name: str) -> bool:
    parts = re.split(r"[/\\]", name)
    return ".." in parts or (len(parts) > 1 and not parts[0]) or bool(re.match(r"[a-zA-Z]:[/\\]|~|\w+://", name))


def _is_inside(here: Path, folder: str) -> bool:
    return (here / Path(folder).expanduser()).resolve().is_relative_to(here)
