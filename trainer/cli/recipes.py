"""``trainer recipes``: what can be run, what a recipe says, and a copy of one to edit. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from trainer.cli.arguments import Arguments, UsageError
from trainer.cli.folders import packaged_conf
from trainer.cli.keys import description, heading, meanings, options
from trainer.cli.schema import SETTINGS
from trainer.errors import did_you_mean
from trainer.files import from_here

_SPECIAL = {
    "_target_": "what is made of this node",
    "_partial_": "true: the rest of its arguments are given later",
    "_args_": "arguments without a name",
    "_recursive_": "whether the nodes inside are made first",
    "_convert_": "how containers are passed on",
}
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_COLUMN = 44
"""Where comments begin, if the line is not longer."""


def command(arguments: Arguments) -> int:
    """``trainer recipes``, ``trainer recipes NAME [SETTING=VALUE ...]`` and ``trainer recipes copy NAME [NEWNAME]``."""
    config_dir = arguments.flags.get("--config-dir")
    names = [word for word in arguments.words if "=" not in word]
    overrides = [word for word in arguments.words if "=" in word] + arguments.overrides
    if not names:
        print(table(config_dir))
    elif names[0] == "copy":
        if len(names) == 1:
            raise UsageError("recipes copy needs the name of a recipe: recipes copy NAME [NEWNAME].")
        print(copy(names[1], names[-1], config_dir))
    elif len(names) > 1:
        raise UsageError(f"Got the recipes {' and '.join(names)}, expected one; or copy NAME [NEWNAME].")
    else:
        print(show(names[0], overrides, config_dir))
    return 0


def table(config_dir: str | None = None) -> str:
    """The recipes, ours and those in ``./conf``, one a line."""
    found = options("recipe", config_dir)
    width = max(map(len, found))
    return "\n".join(f"{name:<{width}}  {description(file)}".rstrip() for name, file in found.items())


def show(name: str, overrides: Sequence[str], config_dir: str | None = None) -> str:
    """A recipe, composed, with the meaning of every key.

    Left out are Hydra's own node, and settings of the Trainer that nobody sets.

    Raises:
        UsageError: there is no such recipe, or an override that does not fit.
    """
    from omegaconf import OmegaConf

    from trainer.cli.compose import Composer

    file = _find(name, config_dir)
    flags = {} if config_dir is None else {"--config-dir": config_dir}
    words = [f"+recipe={name}", *overrides]
    composer = Composer(Arguments(flags=flags))
    config = OmegaConf.to_container(composer.compose(words), resolve=False)
    assert isinstance(config, dict)
    known, written = meanings(composer, words)
    config["trainer"] = {
        name: value
        for name, value in config["trainer"].items()
        if name not in SETTINGS or value != SETTINGS[name].default or f"trainer.{name}" in written
    }
    del config["hydra"]
    return "\n".join([*heading(file), f"# From {_place(file)}, and what it builds upon:", "", annotated(config, known)])


def annotated(config: dict[Any, Any], known: Mapping[str, str]) -> str:
    """``config`` as YAML with the meaning behind every key that has one.

    Args:
        config: as plain containers.
        known: the meanings by key.
    """
    return "\n".join(_lines(config, known, ""))


def _lines(node: dict[Any, Any], known: Mapping[str, str], prefix: str) -> Iterator[str]:
    for name, value in node.items():
        line = "  " * prefix.count(".") + f"{name}:"
        if isinstance(value, dict) and value:
            inner = list(_lines(value, known, f"{prefix}{name}."))
        else:
            inner = []
            plain = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
            line += f" {plain.removesuffix('...' + chr(10)).strip()}"
        meaning = _meaning(f"{prefix}{name}", value, known)
        yield f"{line:<{_COLUMN}} # {meaning}" if meaning else line
        yield from inner


def _meaning(key: str, value: Any, known: Mapping[str, str]) -> str:
    if known.get(key):
        return known[key]
    reference = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return _SPECIAL.get(key.rpartition(".")[2]) or (f"what {reference[1]} is" if reference else "")


def copy(name: str, new: str, config_dir: str | None = None) -> str:
    """Write a recipe to ``./conf/recipe/NEW.yaml``, to be edited; returns what to say about it.

    Raises:
        UsageError: there is no such recipe, the file is there already, or ``new`` is no name.
    """
    file = _find(name, config_dir)
    if not re.fullmatch(r"\w[\w-]*", new):
        raise UsageError(f"{new!r} is no name for a recipe, expected letters, digits, - and _.")
    target = Path("conf", "recipe", f"{new}.yaml")
    if target.exists():
        raise UsageError(
            f"{target} is there already: nothing was written. Choose another name: recipes copy {name} NAME"
        )
    text = re.sub(
        rf"(?<![\w.])(\+?recipe=){re.escape(name)}(?![\w/-]|\.\w)", rf"\g<1>{new}", file.read_text(encoding="utf-8")
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"Cannot write {target}: {error.strerror}.") from error
    commands = re.findall(rf"^#\s+(python -m trainer \S.*recipe={re.escape(new)}\b.*)$", text, re.MULTILINE)
    return f"Wrote {target}, a copy of {_place(file)}. Edit it, then run:\n  " + (
        commands[0] if commands else f"python -m trainer fit +recipe={new}"
    )


def _find(name: str, config_dir: str | None) -> Path:
    found = options("recipe", config_dir)
    if name not in found:
        raise UsageError(
            f"There is no recipe {name!r}.{did_you_mean(name, found)} `python -m trainer recipes` lists them."
        )
    return found[name]


def _place(file: Path) -> str:
    """Where a config is: from the working directory on, or within our package."""
    ours = packaged_conf()
    if file.is_relative_to(ours) and not file.is_relative_to(Path.cwd()):
        return f"the package's conf/{file.relative_to(ours).as_posix()}"
    return from_here(file).as_posix()
