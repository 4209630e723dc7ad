"""``trainer recipes``: what can be run, what a recipe says, and a copy of one to edit. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from trainer.cli.arguments import Arguments, UsageError
from trainer.cli.failure import printable
from trainer.cli.folders import conf_folders, packaged_conf
from trainer.errors import did_you_mean


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
                return printable(text)
    return ""


def table(config_dir: str | None = None) -> str:
    """The recipes, ours and those in ``./conf``, one a line."""
    found = options("recipe", config_dir)
    if not found:
        return "There are no recipes: put one into conf/recipe/."
    width = max(map(len, found))
    return "\n".join(f"{name:<{width}}  {description(file)}".rstrip() for name, file in found.items())


def show(name: str, overrides: Sequence[str], config_dir: str | None = None) -> str:
    """A recipe, composed, with the meaning of every key.

    Raises:
        UsageError: there is no such recipe, or an override that does not fit.
    """
    from trainer.cli import meanings
    from trainer.cli.compose import Composer

    file = _find(name, config_dir)
    flags = {} if config_dir is None else {"--config-dir": config_dir}
    words = [f"+recipe={name}", *overrides]
    config = meanings.shown(Composer(Arguments(flags=flags)), words, config_dir)
    return "\n".join([*_comment(file), f"# From {_place(file)}, and what it builds upon:", "", config])


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


def _comment(file: Path) -> list[str]:
    """The comment that a config starts with, Hydra's ``@package`` line aside."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            lines.append(line.rstrip())
    return lines


def _place(file: Path) -> str:
    """Where a config is: from the working directory on, or within our package."""
    if file.is_relative_to(Path.cwd()):
        return file.relative_to(Path.cwd()).as_posix()
    ours = packaged_conf()
    return f"the package's conf/{file.relative_to(ours).as_posix()}" if file.is_relative_to(ours) else str(file)
