"""Config groups, their options, and the meaning of each key of a composed config.

The meaning of a key is the comment after it in a config file. The meaning of a node is the first line of the comment at
the top of its file. The meanings of the Trainer's arguments are in ``trainer.arguments``.

This module imports neither torch nor Hydra.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from trainer.cli.failure import printable
from trainer.cli.folders import conf_folders
from trainer.cli.parsing import GROUPS_TO_ADD
from trainer.cli.schema import SETTINGS

if TYPE_CHECKING:
    from trainer.cli.compose import Composer

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_COMMENT = re.compile(r"^\s*,?\s*#\s*(.*\S)")


def options(group: str, config_dir: str | None = None) -> dict[str, Path]:
    """Return the options of a config group and their files, in alphabetical order.

    Args:
        group: the name of the group, such as ``recipe``.
        config_dir: the value of ``--config-dir``, or None.
    """
    files: dict[str, Path] = {}
    for folder in conf_folders(config_dir):
        for file in (folder / group).rglob("*.yaml"):
            files.setdefault(file.relative_to(folder / group).with_suffix("").as_posix(), file)
    return dict(sorted(files.items()))


def heading(file: Path) -> list[str]:
    """Return the comment at the top of a config, without Hydra's ``@package`` line."""
    lines = takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
    return [line.rstrip() for line in lines if "@package" not in line]


def description(file: Path) -> str:
    """Return the first line of the comment at the top of a config."""
    texts = (line.lstrip("#").strip() for line in heading(file))
    return printable(next(filter(None, texts), ""))


def meanings(composer: Composer, words: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """Return a dict from the full name of each key to its meaning, and the set of keys in config files.

    If several files comment on a key, the last comment is used. Comments in recipes, and in options of the groups debug
    and sweep, are appended in parentheses.

    Args:
        composer: finds the files.
        words: overrides, which choose options of config groups.
    """
    meanings, written = {f"trainer.{name}": argument.meaning for name, argument in SETTINGS.items()}, set[str]()
    for file, group, package in composer.files(words):
        text = file.read_text(encoding="utf-8")
        prefix = f"{package}." if package else ""
        entries = list(_entries(_LOADER(text).get_single_node(), prefix, text.splitlines()))
        is_remark = group in GROUPS_TO_ADD
        if group and not is_remark and (meaning := description(file)):
            nodes = [name for name, is_node, _ in entries if is_node and name.count(".") == 1]
            for node in (group, *(nodes[:1] if group in ("callbacks", "logger") else ())):
                meanings[node] = meaning
        for name, _, comment in entries:
            written.add(name)
            before = meanings.get(name, "")
            meanings[name] = (
                f"{before.rstrip('.')} ({comment})" if is_remark and before and comment else comment or before
            )
    return meanings, written


def _entries(node: Any, prefix: str, lines: list[str]) -> Iterator[tuple[str, bool, str]]:
    """Iterate over the entries of a YAML node. A comment follows the value, or the key if the value is a block."""
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        is_block = isinstance(value, yaml.CollectionNode) and not value.flow_style
        mark = name.end_mark if is_block else value.end_mark
        rest = lines[mark.line][mark.column :] if mark.line < len(lines) else ""
        comment = _COMMENT.match(rest.removeprefix(":") if is_block else rest)
        yield f"{prefix}{name.value}", isinstance(value, yaml.MappingNode), comment[1] if comment else ""
        yield from _entries(value, f"{prefix}{name.value}.", lines)
