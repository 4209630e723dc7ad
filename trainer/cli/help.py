"""The texts of ``--help`` and ``--version``. Imports no torch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import trainer
from trainer.arguments import describe
from trainer.cli import commands
from trainer.cli.folders import conf_folders
from trainer.cli.keys import meanings, options
from trainer.cli.parsing import FLAGS, GROUPS_TO_ADD, Arguments
from trainer.common.terminal import command_line, program
from trainer.record.provenance import version_of

_GROUPS_OF_COMMANDS = ("Train", "Use a trained model", "Inspect")
"""Titles of groups in the order of the first screen."""

_FIRST_STEPS = (
    ("recipes resnet50", "print a recipe, with the meaning of each key"),
    ("fit +recipe=resnet50 precision=16-mixed", "train it in mixed precision"),
    ("fit +recipe=resnet50 optimizer.lr=0.01", "override any setting; to sweep, add -m and give 0.1,0.01"),
    ("test ckpt=outputs/resnet50/DATE_TIME", "test a run (its folder or a checkpoint) with its own config"),
)
"""Commands on the first screen."""

_WIDTH = 118
_NAMES = 36  # largest width of the column of names
_PROGRAM_PLACEHOLDER = "python -m trainer"
"""The program in the help of commands, which `help_text` replaces by the program that the user started."""

LISTS_SETTINGS = "fit"
"""The command that lists the settings and flags of all commands in its ``--help``."""

_ADDED = (
    ("+model.dropout=0.1", "+ adds a setting that is not in the config yet"),
    ("+name=my-run", "write the run to outputs/my-run/DATE_TIME"),
    ("hydra.run.dir=FOLDER", "write the run to FOLDER"),
)


def help_text(command: str | None, config_dir: str | None = None) -> str:
    """Return the text of ``--help``.

    Args:
        command: a name of `trainer.cli.commands`, or None for the overview of all commands.
        config_dir: the value of ``--config-dir``, or None.
    """
    about = commands.find(command)
    if command is None or about is None:
        return _first_screen(config_dir)
    sections = [f"usage: {_PROGRAM_PLACEHOLDER} {command} {about.usage}", about.about]
    if about.examples:
        sections.append(f"Examples:\n{about.examples.format(command=command)}")
    sections += _settings(config_dir, about.settings)
    if command == LISTS_SETTINGS:
        flags = [(f"{', '.join(reversed(flag.spellings))} {flag.value}", flag.about) for flag in FLAGS if flag.about]
        names = sorted({path.name for folder in conf_folders(config_dir) for path in folder.iterdir() if path.is_dir()})
        added = {group: f"{'+' * (group in GROUPS_TO_ADD)}{group}=" for group in names if group != "hydra"}
        groups = [(name, text) for group, name in added.items() if (text := ", ".join(options(group, config_dir)))]
        heading = "Config groups: GROUP=OPTION uses conf/GROUP/OPTION.yaml of your project or of this package:"
        sections += [_format_rows(heading, groups), *_settings(config_dir, ["", "trainer"])]
        sections.append(_format_rows("Flags, at any position:", flags))
    text = "\n\n".join(sections).replace(_PROGRAM_PLACEHOLDER, program())
    if command != LISTS_SETTINGS and "SETTING" in about.usage:
        text += f"\n\n`{command_line(LISTS_SETTINGS, '--help')}` lists the settings and flags."
    return text


def _settings(config_dir: str | None, nodes: Sequence[str]) -> list[str]:
    """Return one section for each of ``nodes``, with its settings in the default config; "" is the config itself."""
    if not nodes:
        return []  # most commands have no settings, and composing a config takes half a second
    from trainer.cli.compose import Composer, unresolved
    from trainer.cli.schema import walk

    composer = Composer(Arguments(flags={} if config_dir is None else {"--config-dir": config_dir}))
    known, _ = meanings(composer, ())
    entries = list(walk(unresolved(composer.compose(())), into_lists=False))
    left_out = {*composer.groups(), "", "command", "hydra", "objective", "checkpoint_files", "trainer._target_"}
    sections = []
    for node in nodes:
        rows = [
            (f"{entry.key}={describe(entry.value)}", known.get(entry.key, ""))
            for entry in entries
            if entry.key.rpartition(".")[0] in (node, node or "checkpoint_files") and entry.key not in left_out
        ]
        title = f"Settings {node}.NAME and their defaults:" if node else "Settings and their defaults:"
        sections.append(_format_rows(title, rows if node else [*rows, *_ADDED]))
    return sections


def _format_rows(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return names and descriptions in two columns under a title."""
    width = min(max(len(name) for name, _ in rows), _NAMES)
    lines = [_wrap(f"  {name:<{width}}  ", about) for name, about in rows]
    return "\n".join([title, *lines])


def _first_screen(config_dir: str | None) -> str:
    """Return the commands by group, the first steps, and pointers to further help, on one screen."""
    known = {name: command for name in commands.names() if (command := commands.find(name))}
    width = max(map(len, known))
    lines = [(trainer.__doc__ or "").partition("\n")[0], "", f"usage: {program()} COMMAND [SETTING=VALUE ...] [FLAGS]"]
    for title in dict.fromkeys([*_GROUPS_OF_COMMANDS, *(command.group for command in known.values())]):
        rows = [(f"{name:<{width}}", command.summary) for name, command in known.items() if command.group == title]
        lines += ["", _format_rows(f"{title}:", rows)]
    recipes = ", ".join(options("recipe", config_dir)) or "none yet: put one into conf/recipe/"
    steps = [(command_line(*words.split()), about) for words, about in _FIRST_STEPS]
    width = max(len(words) for words, _ in steps)
    lines += ["", "First steps:", *(f"  {words:<{width}}  {about}" for words, about in steps)]
    rest = [
        f"`{program()} COMMAND --help` describes a command.",
        f"`{command_line(LISTS_SETTINGS, '--help')}` lists all settings and flags.",
        "--debug prints full tracebacks, -q prints one line at the end of a run.",
    ]
    return "\n".join([*lines, "", _wrap("Recipes: ", recipes), "", *rest])


def _wrap(start: str, text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False)


def versions() -> str:
    """Return the versions of this package and of its dependencies, without importing them."""
    names = ("torch", "lightning", "torchmetrics", "hydra-core")
    lines = [f"{name} {version_of(name) or 'is not installed'}" for name in names]
    return "\n".join([f"trainer {trainer.__version__}", *lines])
