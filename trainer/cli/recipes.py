"""``trainer recipes``: what can be run, with a line on each. Reads files; needs neither Hydra nor torch."""

from __future__ import annotations

from pathlib import Path

from trainer.cli.arguments import Arguments
from trainer.cli.folders import conf_folders


def command(arguments: Arguments) -> int:
    """``trainer recipes``."""
    print(table(arguments.flags.get("--config-dir")))
    return 0


def options(group: str, config_dir: str | None = None) -> dict[str, Path]:
    """The options of a config group and the files they are in, in alphabetical order.

    Args:
        group: such as ``recipe``.
        config_dir: what ``--config-dir`` was given, if anything.
    """
    files: dict[str, Path] = {}
    for folder in conf_folders(config_dir):
        for file in (folder / group).rglob("*.yaml"):
            files.setdefault(file.relative_to(folder / group).with_suffix("").as_posix(), file)
    return dict(sorted(files.items()))


def description(file: Path) -> str:
    """The first line of the comment a config starts with, Hydra's ``@package`` line aside."""
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.startswith("#"):
                break
            text = line.lstrip("#").strip()
            if text and not text.startswith("@package"):
                return text
    return ""


def table(config_dir: str | None = None) -> str:
    """The recipes, ours and those in ``./conf``, one a line."""
    found = options("recipe", config_dir)
    if not found:
        return "There are no recipes: put one into conf/recipe/."
    width = max(map(len, found))
    return "\n".join(f"{name:<{width}}  {description(file)}".rstrip() for name, file in found.items())
