"""What each key of a composed config means, in the words of the files that it was composed from. Needs no torch.

A config file says what a key means in the comment behind it, and what a node is in the comment on its top. The settings
of the ``trainer`` node have their meanings in `trainer.cli.schema`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict

from trainer.cli.arguments import GROUPS_TO_ADD
from trainer.cli.compose import CONFIG_NAME, Composer
from trainer.cli.folders import conf_folders
from trainer.cli.recipes import description
from trainer.cli.schema import MEANINGS, TrainerSettings

_SPECIAL = {
    "_target_": "what is made of this node",
    "_partial_": "true: the rest of its arguments are given later",
    "_args_": "arguments without a name",
    "_recursive_": "whether the nodes inside are made first",
    "_convert_": "how containers are passed on",
}
_COMMENT = re.compile(r"^\s*,?\s*#\s*(.*\S)")
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_COLUMN = 44
"""Where comments begin, if the line is not longer."""


def shown(composer: Composer, overrides: Sequence[str], config_dir: str | None = None) -> str:
    """The config that ``overrides`` compose, as YAML with a meaning behind every key that has one.

    Left out are Hydra's own node, and settings of the Trainer that none of the files sets.

    Raises:
        UsageError: a config or an override that does not fit.
    """
    config = composer.compose(overrides)
    with open_dict(config):
        del config["hydra"]
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    told = meanings(composer, overrides, config_dir)
    defaults = TrainerSettings().__dict__
    written = _written(composer, overrides, config_dir)
    plain["trainer"] = {
        name: value
        for name, value in plain["trainer"].items()
        if f"trainer.{name}" in written or value != defaults.get(name)
    }
    return "\n".join(_lines(plain, told))


def without_meaning(composer: Composer, overrides: Sequence[str], config_dir: str | None = None) -> list[str]:
    """The keys of the composed config that no file says the meaning of, those of Hydra's node left out."""
    config = OmegaConf.to_container(composer.compose(overrides), resolve=False)
    assert isinstance(config, dict)
    told = meanings(composer, overrides, config_dir)
    return [key for key, value in _leaves(config) if not key.startswith("hydra.") and not _meaning(key, value, told)]


def meanings(composer: Composer, overrides: Sequence[str], config_dir: str | None = None) -> dict[str, str]:
    """By full key, what it means. A recipe's own remark stands in brackets behind the general meaning.

    Args:
        composer: finds the files.
        overrides: of the command line, as for `Composer.compose`.
        config_dir: what ``--config-dir`` was given, if anything.
    """
    general = {f"trainer.{name}": meaning for name, meaning in MEANINGS.items()}
    remarks: dict[str, str] = {}
    for path, package, file in _files(composer, overrides, config_dir):
        group = path.partition("/")[0]
        if "/" in path and group not in GROUPS_TO_ADD and (told := description(file)):
            general[package or group] = told
            if group in ("callbacks", "logger"):
                own = [key for key, _, _ in _keys(file, package) if key.count(".") == 1]
                general |= dict.fromkeys(own[:1], told)
        if group in GROUPS_TO_ADD:
            remarks |= _comments(file, "")
            continue
        general |= {key: comment for key, comment in _comments(file, package).items() if key not in general or comment}
    both = {key: f"{general[key].rstrip('.')} ({remark})" for key, remark in remarks.items() if key in general}
    return {**general, **remarks, **both}


def _files(composer: Composer, overrides: Sequence[str], config_dir: str | None) -> Iterator[tuple[str, str, Path]]:
    """Name, package and file of every config that is composed, in that order."""
    listed = composer.loader.compute_defaults_list(CONFIG_NAME, list(overrides), RunMode.RUN).defaults
    for default in listed:
        name, package = default.config_path, default.package or ""
        if name is None or name.startswith(("hydra/", "_schema/")):
            continue
        for folder in conf_folders(config_dir):
            if (file := folder / f"{name}.yaml").is_file():
                yield name, package, file
                break


def _written(composer: Composer, overrides: Sequence[str], config_dir: str | None) -> set[str]:
    keys = {word.lstrip("+").partition("=")[0] for word in overrides}
    for _, package, file in _files(composer, overrides, config_dir):
        keys |= {key for key, _, _ in _keys(file, package)}
    return keys


def _keys(file: Path, package: str) -> Iterator[tuple[str, Any, Any]]:
    """Full key, and the nodes of the parser for key and value, of everything in ``file``."""
    text = file.read_text(encoding="utf-8")
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if found := re.search(r"^#\s*@package\s+(\S+)", text, re.MULTILINE):
        package = "" if found[1] in ("_global_", "_root_") else package

    def walk(node: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
        for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
            key = f"{prefix}.{name.value}" if prefix else str(name.value)
            if key != "defaults":
                yield key, name, value
                yield from walk(value, key)

    yield from walk(root, package)


def _comments(file: Path, package: str) -> dict[str, str]:
    """By full key, the comment behind it, in the line in which its value ends or, of a node, the key."""
    lines = file.read_text(encoding="utf-8").splitlines()
    found = {}
    for key, name, value in _keys(file, package):
        block = isinstance(value, yaml.CollectionNode) and not value.flow_style
        mark = name.end_mark if block else value.end_mark
        if mark.line < len(lines):
            rest = lines[mark.line][mark.column :]
            if comment := _COMMENT.match(rest.removeprefix(":") if block else rest):
                found[key] = comment[1]
    return found


def _lines(node: dict[Any, Any], told: dict[str, str], prefix: str = "") -> Iterator[str]:
    indent = "  " * (prefix.count(".") + 1 if prefix else 0)
    for name, value in node.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        meaning = _meaning(key, value, told)
        if isinstance(value, dict) and value:
            yield _with_comment(f"{indent}{name}:", meaning)
            yield from _lines(value, told, key)
            continue
        written = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
        yield _with_comment(f"{indent}{name}: {written.removesuffix('...' + chr(10)).strip()}", meaning)


def _with_comment(line: str, meaning: str) -> str:
    return f"{line:<{_COLUMN}} # {meaning}" if meaning else line


def _meaning(key: str, value: Any, told: dict[str, str]) -> str:
    if key in told:
        return told[key]
    last = key.rpartition(".")[2]
    if last in _SPECIAL:
        return _SPECIAL[last]
    if isinstance(value, str) and (reference := _REFERENCE.fullmatch(value)):
        return f"what {reference[1]} is"
    return ""


def _leaves(node: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, dict) and value:
            yield from _leaves(value, key)
        else:
            yield key, value
