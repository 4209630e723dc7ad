"""``trainer recipes``: list the recipes, print one with the meaning of its keys, or copy one. Imports no torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from trainer.cli.folders import packaged_conf
from trainer.cli.keys import description, heading, meanings, options
from trainer.cli.parsing import Arguments, UsageError, quoted_options
from trainer.cli.schema import SETTINGS
from trainer.common.files import from_here
from trainer.common.terminal import command_line, program
from trainer.errors import did_you_mean

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_COLUMN = 44
"""Column of the comments. In longer lines, the comment follows the value."""


def command(arguments: Arguments) -> int:
    """Run ``recipes``, ``recipes NAME [SETTING=VALUE ...]`` or ``recipes copy NAME [NEWNAME]``."""
    config_dir, names = arguments.flags.get("--config-dir"), arguments.words
    if not names:
        print(table(config_dir))
    elif names[0] == "copy":
        if len(names) == 1:
            raise UsageError("recipes copy got no recipe, expected recipes copy NAME [NEWNAME].")
        print(copy(names[1], names[-1], config_dir))
    elif len(names) > 1:
        raise UsageError(f"Got the recipes {' and '.join(names)}, expected one, or copy NAME [NEWNAME].")
    else:
        print(show(names[0], arguments.overrides, config_dir))
    return 0


def table(config_dir: str | None = None) -> str:
    """Return the recipes of this package and of ``./conf``, with a description, one per line."""
    files = options("recipe", config_dir)
    width = max(map(len, files))
    return "\n".join(f"{name:<{width}}  {description(file)}".rstrip() for name, file in files.items())


def show(name: str, overrides: Sequence[str], config_dir: str | None = None) -> str:
    """Return a composed recipe as YAML with the meaning of each key.

    Leaves out the ``hydra`` node, and the Trainer settings that have their defaults and are in no file.

    Args:
        name: name of the recipe.
        overrides: overrides of the command line.
        config_dir: the value of ``--config-dir``, or None.

    Raises:
        UsageError: if there is no such recipe, or an override is invalid.
    """
    from trainer.cli.compose import Composer, unresolved

    file = _find(name, config_dir)
    flags = {} if config_dir is None else {"--config-dir": config_dir}
    words = [f"+recipe={quoted_options('recipe', name)}", *overrides]
    composer = Composer(Arguments(flags=flags))
    config = unresolved(composer.compose(words))
    known, written = meanings(composer, words)
    config["trainer"] = {
        name: value
        for name, value in config["trainer"].items()
        if name not in SETTINGS or value != SETTINGS[name].default or f"trainer.{name}" in written
    }
    del config["hydra"]
    comments = [line.replace("python -m trainer", program()) for line in heading(file)]
    return "\n".join([*comments, f"# From {_place(file)} and the files it includes:", "", *annotated(config, known)])


def annotated(config: dict[Any, Any], known: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    """Iterate over the lines of ``config`` as YAML, with the meaning of each key as a comment.

    Args:
        config: plain containers.
        known: meanings by key.
        prefix: key of the node ``config`` with a dot after it. Default: "", for a whole config.
    """
    for name, value in config.items():
        line = "  " * prefix.count(".") + f"{name}:"
        inner = value if isinstance(value, dict) else {}
        if not inner:
            plain = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
            line += f" {plain.removesuffix('...' + chr(10)).strip()}"
        meaning = known.get(f"{prefix}{name}")
        if not meaning and isinstance(value, str) and (reference := _REFERENCE.fullmatch(value)):
            meaning = f"the value of {reference[1]}"
        yield f"{line:<{_COLUMN}} # {meaning}" if meaning else line
        yield from annotated(inner, known, f"{prefix}{name}.")


def copy(name: str, new: str, config_dir: str | None = None) -> str:
    """Copy a recipe to ``./conf/recipe/NEW.yaml``, and return a message about it.

    Raises:
        UsageError: if there is no such recipe, the file exists already, or ``new`` is not a valid name.
    """
    file = _find(name, config_dir)
    if not re.fullmatch(r"\w[\w-]*", new):
        raise UsageError(f"Got {new!r} as the name of a recipe, expected letters, digits, - and _.")
    target = Path("conf", "recipe", f"{new}.yaml")
    if target.exists():
        raise UsageError(f"{target} exists already. Choose another name: recipes copy {name} NAME")
    text = file.read_text(encoding="utf-8")
    text = re.sub(rf"(?<![\w.])(\+?recipe=){re.escape(name)}(?![\w/-]|\.\w)", rf"\g<1>{new}", text)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"Cannot write {target}: {error.strerror}.") from error
    example = re.search(rf"^#\s+python -m trainer (\S.*recipe={re.escape(new)}\b.*)$", text, re.MULTILINE)
    words = shlex.split(example[1]) if example else ["fit", f"+recipe={new}"]
    return f"Wrote {target}, a copy of {_place(file)}. Edit it, then run:\n  {command_line(*words)}"


def _find(name: str, config_dir: str | None) -> Path:
    files = options("recipe", config_dir)
    if name not in files:
        raise UsageError(f"There is no recipe {name!r}.{did_you_mean(name, files)} See `{command_line('recipes')}`.")
    return files[name]


def _place(file: Path) -> str:
    """Return the path of a config, relative to the working directory or to this package."""
    packaged = packaged_conf()
    if file.is_relative_to(packaged) and not file.is_relative_to(Path.cwd()):
        return f"the package's conf/{file.relative_to(packaged).as_posix()}"
    return from_here(file).as_posix()
