"""The commands of the command line: each module of this package declares one, as ``COMMAND``.

These modules import neither torch nor Hydra, so that help and errors are printed immediately. Other packages add
commands with entry points of the group ``trainer.commands``, which are read if a word is not a command of this package:

.. code-block:: toml

    [project.entry-points."trainer.commands"]
    prune = "my_package.commands:PRUNE"
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigurationError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

ENTRY_POINTS = "trainer.commands"
"""The group of entry points of other packages. Each names a :class:`Command`."""


WITH_WEIGHTS = """\
  Use the config and the best weights of a run:
    python -m trainer {command} ckpt=outputs/resnet50/DATE_TIME
  Use one of its checkpoints, with other settings:
    python -m trainer {command} ckpt=outputs/resnet50/DATE_TIME/checkpoints/last.ckpt precision=bf16 data.batch_size=8
  Use only the weights, with another config:
    python -m trainer {command} +recipe=resnet50 ckpt_path=outputs/resnet50/DATE_TIME/checkpoints/last.ckpt"""
"""Examples of the commands that evaluate trained weights."""


@dataclass(frozen=True)
class Command:
    """A command, such as ``fit`` of ``trainer fit``.

    Args:
        text: docstring of its module. The list of commands shows its first line, ``trainer NAME --help`` the rest. None
            under ``python -OO``, which removes docstrings.
        group: title of its group in the list of commands.
        usage: the arguments, for the help.
        examples: more command lines for the help. ``{command}`` is replaced by the name.
        settings: nodes of the config that the help lists.
        function: ``module:name`` of the function that is called with the
            :class:`~trainer.cli.parsing.Arguments` and returns the exit status. Default: "", which runs the config
            with the Trainer's method of the same name.
        words: the largest number of words without ``=`` after the command. Default: 0, settings only.
        takes_files: whether these words are file names, which may contain ``=``.
        takes_program: whether all words after the command are options, a program and its arguments, which only the
            function of the command parses.
    """

    text: str | None
    group: str = "Other packages"
    usage: str = "[SETTING=VALUE ...] [FLAGS]"
    examples: str = ""
    settings: tuple[str, ...] = ()
    function: str = ""
    words: int = 0
    takes_files: bool = False
    takes_program: bool = False

    @property
    def summary(self) -> str:
        """Return the first line."""
        return (self.text or "").strip().partition("\n")[0].rstrip(".")

    @property
    def about(self) -> str:
        """Return the text after the first line."""
        return (self.text or "").strip().partition("\n")[2].strip()

    def load(self) -> Callable[[Any], int]:
        """Import the function of the command."""
        module, _, name = self.function.partition(":")
        function: Callable[[Any], int] = getattr(import_module(module), name)
        return function


_PACKAGED = tuple(module.name for module in pkgutil.iter_modules(__path__))


def names() -> list[str]:
    """Return the names of all commands, those of other packages last."""
    return [*_PACKAGED, *sorted({entry.name for entry in _entry_point_commands()} - {*_PACKAGED})]


def find(name: str | None) -> Command | None:
    """Return the command of this name, or None.

    Raises:
        ConfigurationError: if the entry point of another package is not a :class:`Command`.
    """
    if name in _PACKAGED:
        command: Command = import_module(f"{__name__}.{name}").COMMAND
        return command
    for entry in _entry_point_commands() if name else ():
        if entry.name == name:
            loaded = entry.load()
            if not isinstance(loaded, Command):
                given = f"The entry point {entry.value} is a {type(loaded).__name__}"
                raise ConfigurationError(f"{given}, expected a trainer.cli.commands.Command.")
            return loaded
    return None


def _entry_point_commands() -> EntryPoints:
    from importlib.metadata import entry_points  # imported here because it takes 0.03 s

    return entry_points(group=ENTRY_POINTS)


def is_run(name: str | None) -> bool:
    """Return whether the command runs the config, as ``fit`` does."""
    command = find(name)
    return command is not None and not command.function
