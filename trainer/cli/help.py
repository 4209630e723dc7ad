"""The texts of ``--help`` and ``--version``. Needs no torch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import trainer
from trainer.arguments import describe
from trainer.cli import commands
from trainer.cli.arguments import FLAGS, GROUPS_TO_ADD, Arguments
from trainer.cli.keys import meanings, options
from trainer.record.provenance import version_of

_GROUPS_OF_COMMANDS = ("Train", "Use what was trained", "Look around")
"""Titles that come first on the first screen."""

_BEGIN = """\
Begin with:
  trainer recipes resnet50                           what a recipe says, with the meaning of every key
  trainer fit +recipe=resnet50 precision=16-mixed    train it, in mixed precision
  trainer fit +recipe=resnet50 optimizer.lr=0.01     override any key; -m and 0.1,0.01 sweep over it
  trainer test ckpt=outputs/resnet50/DATE_TIME       a run's folder, or a checkpoint, brings its config along"""

_READ_ON = """\
`trainer COMMAND --help` says all about a command; `trainer fit --help` lists the settings and flags.
`python -m trainer` is the same program. Errors are short: --debug shows tracebacks, -q leaves one line of output."""

_WIDTH = 118
_NAMES = 36  # the width of the column of names, if they are not longer

_GROUPS = {
    "recipe": "what to train: a model, data and settings that fit together",
    "precision": "of the arithmetic; 32, 16, bf16 and 64 will do as well; auto goes by the device",
    "model": "the LightningModule",
    "data": "the LightningDataModule",
    "optimizer": "",
    "scheduler": "of the learning rate",
    "trainer": "the devices",
    "callbacks": "",
    "compile": "torch.compile, for the whole run",
    "tuning": "fast: TF32, cudnn.benchmark, channels_last, expandable segments",
    "logger": "several: logger=[default,wandb]",
    "compare": "what compare asks of the runs",
    "tune": "what tune tries",
    "checks": "what checks assumes",
    "debug": "settings to look for mistakes with",
    "sweep": "ready-made sweeps",
}

_ADDED = (
    ("+model.dropout=0.1", "a + adds a setting that the config does not have yet"),
    ("+name=my-run", "everything goes to outputs/my-run/DATE_TIME"),
    ("hydra.run.dir=FOLDER", "everything goes there"),
)


def help_text(command: str | None, config_dir: str | None = None) -> str:
    """Return the text that ``--help`` prints, for a command or, with None, for all.

    Args:
        command: a name of `trainer.cli.commands`, or None.
        config_dir: the value of ``--config-dir``, or None.
    """
    about = commands.find(command)
    if command is None or about is None:
        return _first_screen(config_dir)
    sections = [f"usage: python -m trainer {command} {about.usage}", about.about]
    if about.examples:
        sections.append(f"Examples:\n{about.examples.format(command=command)}")
    if about.function:
        return "\n\n".join([*sections, *_settings(config_dir, about.settings)])
    *own, general, trainers = _settings(config_dir, [*about.settings, "", "trainer"])
    flags = [(f"{', '.join(reversed(one.spellings))} {one.value}", one.about) for one in FLAGS if one.about]
    sections += [*own, _groups(config_dir), general, trainers, _listed("Flags, anywhere among the settings:", flags)]
    return "\n\n".join(sections)


def _settings(config_dir: str | None, nodes: Sequence[str]) -> list[str]:
    """Return a section for each node of the default config, with its settings; "" is the config itself."""
    if not nodes:
        return []
    from omegaconf import OmegaConf

    from trainer.cli.compose import Composer
    from trainer.cli.walk import walk

    composer = Composer(Arguments(flags={} if config_dir is None else {"--config-dir": config_dir}))
    known, _ = meanings(composer, ())
    entries = list(walk(OmegaConf.to_container(composer.compose(()), resolve=False), into_lists=False))
    left_out = {*composer.groups(), "", "command", "hydra", "objective", "checkpoint_files", "trainer._target_"}
    sections = []
    for node in nodes:
        rows = [
            (f"{entry.key}={describe(entry.value)}", known.get(entry.key, ""))
            for entry in entries
            if entry.key.rpartition(".")[0] in (node, node or "checkpoint_files") and entry.key not in left_out
        ]
        if node:
            sections.append(_listed(f"Settings {node}.NAME, with their defaults:", rows))
        else:
            sections.append(_listed("Settings, with their defaults (--cfg job prints all):", [*rows, *_ADDED]))
    return sections


def _listed(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Names, and what they are, in two columns under a title."""
    width = min(max(len(name) for name, _ in rows), _NAMES)
    lines = [_wrapped(f"  {name:<{width}}  ", about) for name, about in rows]
    return "\n".join([title, *lines])


def _first_screen(config_dir: str | None) -> str:
    """Return the commands in groups, the first steps, and further help, on one screen."""
    found = {name: command for name in commands.names() if (command := commands.find(name))}
    width = max(map(len, found))
    lines = [(trainer.__doc__ or "").partition("\n")[0], "", "usage: trainer COMMAND [SETTING=VALUE ...] [FLAGS]"]
    for title in dict.fromkeys([*_GROUPS_OF_COMMANDS, *(command.group for command in found.values())]):
        rows = [(f"{name:<{width}}", command.summary) for name, command in found.items() if command.group == title]
        lines += ["", _listed(f"{title}:", rows)]
    recipes = ", ".join(options("recipe", config_dir)) or "none yet: put one into conf/recipe/"
    return "\n".join([*lines, "", _BEGIN, "", _wrapped("Recipes: ", recipes), "", _READ_ON])


def _wrapped(start: str, text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False)


def versions() -> str:
    """The versions of this package and of those it stands on, without importing them."""
    names = ("torch", "lightning", "torchmetrics", "hydra-core")
    lines = [f"{name} {version_of(name) or 'is not installed'}" for name in names]
    return "\n".join([f"trainer {trainer.__version__}", *lines])


def _groups(config_dir: str | None) -> str:
    rows = []
    for group, about in _GROUPS.items():
        found = ", ".join(options(group, config_dir)) or "none yet"
        name = f"+{group}=" if group in GROUPS_TO_ADD else f"{group}="
        rows.append((name, f"{found}{f'  ({about})' if about else ''}"))
    return _listed("Settings that choose a file, conf/GROUP/OPTION.yaml, of ours or of your own:", rows)
