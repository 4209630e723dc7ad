"""The keys of the config: what each is set to, by which file, and what it means.

A config file says what a key means in the comment behind it, and what a node is in the comment on its top;
`trainer.arguments` says it of the settings of the ``trainer`` node. The files are read as they are, without Hydra,
which takes too long for a press of the tab key. Needs no torch either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from trainer.arguments import ARGUMENTS
from trainer.cli.arguments import GROUPS_TO_ADD
from trainer.cli.failure import printable
from trainer.cli.folders import conf_folders

ROOT = "amp_trainer"
"""The config that every run starts from."""

SETTINGS = {name: one for name, one in ARGUMENTS.items() if name not in ("precision", "logger", "callbacks")}
"""The Trainer's arguments that ``trainer.NAME`` sets; the others are config groups."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_COMMENT = re.compile(r"^\s*,?\s*#\s*(.*\S)")
_DEEPEST = 9  # a config that is built upon itself ends there


class Key(NamedTuple):
    """A key of the config.

    Attributes:
        name: in full, such as ``optimizer.lr``.
        value: the one it is given by the last file that sets it; a node has {}.
        meaning: in a few words; "" where no file says it. What a recipe remarks stands in brackets behind it.
        file: the last that sets it; None for a setting of the Trainer that none does.
    """

    name: str
    value: Any
    meaning: str
    file: Path | None = None

    @property
    def choices(self) -> list[str]:
        """The words that it may be set to, as far as that is known."""
        argument = ARGUMENTS.get(self.name.removeprefix("trainer."))
        if argument is not None:
            return argument.choices
        return ["true", "false"] if isinstance(self.value, bool) else []


def groups(config_dir: str | None = None) -> list[str]:
    """The config groups, those of Hydra's own left out."""
    folders = (one for folder in conf_folders(config_dir) for one in folder.iterdir() if one.is_dir())
    return sorted({folder.name for folder in folders if not folder.name.startswith((".", "_", "hydra"))})


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


def heading(file: Path) -> list[str]:
    """The comment that a config starts with, Hydra's ``@package`` line aside."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            lines.append(line.rstrip())
    return lines


def description(file: Path) -> str:
    """The first line of a config's heading."""
    texts = (line.lstrip("#").strip() for line in heading(file))
    return printable(next(filter(None, texts), ""))


def keys(words: Sequence[str] = (), config_dir: str | None = None) -> dict[str, Key]:
    """The keys of the config that ``words`` compose, by name.

    Args:
        words: of the command line. Those that choose an option of a config group count; other values do not.
        config_dir: what ``--config-dir`` was given, if anything.
    """
    found = {f"trainer.{name}": Key(f"trainer.{name}", one.default, one.meaning) for name, one in SETTINGS.items()}
    for config in _composed(words, config_dir):
        is_remark = config.group in GROUPS_TO_ADD
        if config.group and not is_remark and (told := description(config.file)):
            nodes = [name for name, value, _ in config.entries if isinstance(value, dict) and name.count(".") == 1]
            for node in (config.group, *(nodes[:1] if config.group in ("callbacks", "logger") else ())):
                found[node] = Key(node, {}, told, config.file)
        for name, value, comment in config.entries:
            before = found[name].meaning if name in found else ""
            meaning = comment or before
            if is_remark and before and comment:
                meaning = f"{before.rstrip('.')} ({comment})"
            if not isinstance(value, dict):  # no node, which it may have been
                found = {key: one for key, one in found.items() if not key.startswith(f"{name}.")}
            found[name] = Key(name, value, meaning, config.file)
    return found


def flatten(node: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Full key and value of everything in ``node``, of the nodes in it as well."""
    for name, child in node.items():
        yield f"{prefix}{name}", child
        if isinstance(child, dict):
            yield from flatten(child, f"{prefix}{name}.")


def _composed(words: Sequence[str], config_dir: str | None) -> list[_Config]:
    """The configs that ``words`` compose, those that win last: the root, options of groups, recipes and the like."""
    said = dict(word.lstrip("+").split("=", 1) for word in words if "=" in word)
    chosen: dict[str, Any] = {}
    root = _with_bases(ROOT, chosen, config_dir)
    added = [
        config
        for group in GROUPS_TO_ADD
        for option in _listed(said.pop(group, None))
        for config in _with_bases(f"{group}/{option}", chosen, config_dir)
    ]
    known = groups(config_dir)
    selected = [
        config
        for group, option in (chosen | said).items()
        for each in (_listed(option) if group in known else ())
        for config in _with_bases(f"{group}/{each}", {}, config_dir)
    ]
    return [*root, *selected, *added]


def _listed(option: Any) -> list[Any]:
    """The options that are chosen: of ``[a,b]`` both; of a sweep over ``a,b`` the first."""
    if isinstance(option, str) and option.startswith("["):
        return [each.strip() for each in option.strip("[]").split(",")]
    if isinstance(option, str):
        return [option.partition(",")[0]]
    return option if isinstance(option, list) else []


class _Config(NamedTuple):
    """A config file: its group, the keys that it sets, in full, with value and comment, and its list of defaults."""

    group: str
    file: Path
    entries: list[tuple[str, Any, str]]
    defaults: list[Any]


def _with_bases(name: str, chosen: dict[str, Any], config_dir: str | None, depth: int = 0) -> list[_Config]:
    """The config ``name`` behind those that it is built upon. Notes in ``chosen`` the options that it chooses."""
    place = Path(f"{name}.yaml")
    file = next((folder / place for folder in conf_folders(config_dir) if (folder / place).is_file()), None)
    if file is None or depth > _DEEPEST:
        return []
    config = _read(file, name.rpartition("/")[0], file.stat().st_mtime_ns)
    bases: list[_Config] = []
    for entry in config.defaults:
        if isinstance(entry, str) and entry != "_self_" and config.group:
            bases += _with_bases(f"{config.group}/{entry.partition('@')[0]}", chosen, config_dir, depth + 1)
        elif isinstance(entry, dict):
            chosen |= {str(key).removeprefix("override ").removeprefix("/"): option for key, option in entry.items()}
    return [*bases, config]


@lru_cache(maxsize=256)
def _read(file: Path, group: str, modified: int) -> _Config:
    """A file, read once for as long as it is not ``modified``. One that is no YAML has no keys."""
    text = file.read_text(encoding="utf-8")
    found = re.search(r"^#\s*@package\s+(\S+)", text, re.MULTILINE)
    package = group.replace("/", ".") if found is None else found[1]
    prefix = "" if package in ("", "_global_", "_root_") else f"{package}."
    loader = _LOADER(text)
    try:
        entries = list(_entries(loader, loader.get_single_node(), prefix, text.splitlines()))
    except yaml.YAMLError:
        return _Config(group, file, [], [])
    defaults = next((value for name, value, _ in entries if name == f"{prefix}defaults"), None)
    own = [entry for entry in entries if entry[0] != f"{prefix}defaults" and not _is_hydras(entry[0])]
    return _Config(group, file, own, defaults if isinstance(defaults, list) else [])


def _is_hydras(key: str) -> bool:
    return key.partition(".")[0] == "hydra" and key != "hydra.run.dir"


def _entries(loader: Any, node: Any, prefix: str, lines: list[str]) -> Iterator[tuple[str, Any, str]]:
    """Full key, value and comment of everything in a node of YAML; a node in it has the value {}.

    The comment is the one in the line in which a value ends or, of a node on several lines, in that of its key.
    """
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        is_node = isinstance(value, yaml.MappingNode)
        is_block = isinstance(value, yaml.CollectionNode) and not value.flow_style
        mark = name.end_mark if is_block else value.end_mark
        rest = lines[mark.line][mark.column :] if mark.line < len(lines) else ""
        comment = _COMMENT.match(rest.removeprefix(":") if is_block else rest)
        plain = {} if is_node else loader.construct_object(value, deep=True)
        yield f"{prefix}{name.value}", plain, comment[1] if comment else ""
        yield from _entries(loader, value, f"{prefix}{name.value}.", lines)
