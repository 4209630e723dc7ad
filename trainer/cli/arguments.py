"""Reading the command line: which word is the subcommand, which are overrides, which are flags.

Hydra wants overrides and nothing else, all of them side by side. People write ``fit -m +recipe=a
precision=32,16``. `read` takes the second form apart, and `Arguments.for_hydra` puts it together as the
first: ``+recipe=a precision=32-true,16-mixed command=fit --multirun``. It reads that form too, because the
other ranks of a run are started with it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainer.cli import commands
from trainer.cli.folders import conf_folders
from trainer.errors import ConfigurationError, did_you_mean
from trainer.precision.names import match

_OF_EXPORT = ("ckpt", "ckpt_path", "recipe", "to")
"""With one of these settings ``export`` takes settings, and no words."""

GROUPS_TO_ADD = ("recipe", "debug", "sweep")
"""Not in the default config: Hydra wants a ``+`` in front. It may be left out here."""

COMPARED = ("32-true", "16-mixed", "bf16-mixed")
"""The precisions that ``compare`` compares where none are given."""

_PATHS = ("ckpt", "ckpt_path", "weights", "to")
"""Settings that are paths: an = or a space in them needs no quotes."""

_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


class Flag(NamedTuple):
    """A flag of Hydra's, or of ours.

    Attributes:
        spellings: the long one first.
        value: what follows it, in a word; "" for nothing, in brackets where it may be left out.
        about: what it does; "" for those that `--hydra-help` tells of.
    """

    spellings: tuple[str, ...]
    value: str = ""
    about: str = ""


FLAGS = (
    Flag(("--help", "-h"), about="this text; after a command, what that command does"),
    Flag(("--version",), about="the versions of this package and of those it stands on"),
    Flag(("--multirun", "-m"), about="a sweep: one run for every combination of the comma-separated values"),
    Flag(("--cfg", "-c"), "job", "print the config instead of running; with --package trainer a part of it"),
    Flag(("--info", "-i"), "[WHAT]", f"how the config is composed; WHAT is {', '.join(_INFO)}"),
    Flag(("--config-dir", "-cd"), "FOLDER", "look for configs there too (./conf is always looked into, and first)"),
    Flag(("--quiet", "-q"), about="no progress bar and no tables: warnings, and one line at the end"),
    Flag(("--debug",), about="errors with the whole traceback; it is in the run's log anyway"),
    Flag(("--hydra-help",), about="the rest of Hydra's flags"),
    Flag(("--resolve",)),
    Flag(("--package", "-p"), "KEY"),
    Flag(("--run", "-r")),
    Flag(("--shell-completion", "-sc")),
    Flag(("--config-path", "-cp"), "FOLDER"),
    Flag(("--config-name", "-cn"), "NAME"),
    Flag(("--experimental-rerun",), "FILE"),
)
_BY_SPELLING = {spelling: flag for flag in FLAGS for spelling in flag.spellings}
_SHOW = {"--cfg", "--info", "--hydra-help", "--shell-completion"}
OURS = ("--debug", "--quiet")
"""Flags that Hydra does not know. They change what is shown, not what is computed."""


class UsageError(ConfigurationError):
    """The command line, or a config, is wrong. The message is all the user is shown; exit status 2."""


@dataclass
class Arguments:
    """A command line, taken apart.

    Args:
        command: a name of `trainer.cli.commands`, or None if none was given.
        words: the words without ``=`` after the command, such as the name of a recipe.
        overrides: Hydra's, in the order given; aliases are already replaced, ``command=`` is taken out.
        flags: value by long spelling, ``""`` for those that have none.
        again: whether ``resume=auto`` was added because Slurm runs the job again.
    """

    command: str | None = None
    words: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    flags: dict[str, str] = field(default_factory=dict)
    again: bool = False

    @property
    def multirun(self) -> bool:
        """Whether ``-m`` was given."""
        return "--multirun" in self.flags

    @property
    def shows(self) -> bool:
        """Whether Hydra is to print something instead of running."""
        return not _SHOW.isdisjoint(self.flags)

    def check_flags(self) -> None:
        """Refuse flags that are about a run, for a command that composes a config and runs nothing.

        Raises:
            UsageError: ``-m``, or one by which Hydra prints something.
        """
        if self.shows or self.multirun:
            flag = "--multirun" if self.multirun else next(iter(self.flags))
            raise UsageError(
                f"{flag} does not go with {self.command}. `python -m trainer fit ... --cfg job` shows the config."
            )

    def words_of_config(self) -> list[str]:
        """What the config is composed with: the overrides, then ``command=...``."""
        return [*self.overrides, f"command={self.command}"]

    def for_hydra(self) -> list[str]:
        """What ``sys.argv[1:]`` is to be: `words_of_config`, then Hydra's flags. For Hydra's own help that alone."""
        if "--hydra-help" in self.flags:  # it is not about this config, and Hydra composes none of it
            return ["--hydra-help"]
        flags = [word for flag, value in self.flags.items() if flag not in OURS for word in (flag, value) if word]
        return [*self.words_of_config(), *flags]


def read(argv: Sequence[str]) -> Arguments:
    """Take ``argv`` (without the program's name) apart.

    Raises:
        UsageError: an unknown subcommand or flag, a flag without its value, or a word that is neither.
    """
    arguments = Arguments()
    words = list(argv)
    while words:
        word = words.pop(0)
        if word.startswith("-"):
            _read_flag(word, words, arguments)
        elif ("=" in word or word.startswith("~")) and not _is_of_files(word, arguments):
            _read_override(word, arguments)
        elif (command := commands.find(arguments.command)) and len(arguments.words) < command.words:
            arguments.words.append(word)
        else:
            _read_command(word, arguments)
    if arguments.command == "compare":
        _complete_comparison(arguments)
    if arguments.multirun and arguments.shows:
        raise UsageError(f"--multirun runs and {' '.join(set(arguments.flags) & _SHOW)} shows: leave one of them out.")
    return arguments


def _is_of_files(word: str, arguments: Arguments) -> bool:
    """Return whether a word with an = in it is the name of a file."""
    if arguments.command != "export":
        command = commands.find(arguments.command)
        return command is not None and command.takes_files
    return not arguments.overrides and word.lstrip("+").partition("=")[0] not in _OF_EXPORT


def _complete_comparison(arguments: Arguments) -> None:
    """A comparison is a sweep, over the precisions where nothing is said of them."""
    if arguments.shows:
        raise UsageError(
            f"compare runs several trainings and {' '.join(set(arguments.flags) & _SHOW)} shows one: write fit for"
            " compare, and one value for each setting."
        )
    arguments.flags["--multirun"] = ""
    chosen = ("precision", "precision._target_", "sweep", "hydra.sweeper.params.precision")
    if not any(override.partition("=")[0].lstrip("+") in chosen for override in arguments.overrides):
        arguments.overrides.append(f"precision={','.join(COMPARED)}")


def _read_flag(word: str, words: list[str], arguments: Arguments) -> None:
    spelling, equals, value = word.partition("=")
    flag = _BY_SPELLING.get(spelling)
    if flag is None:
        known = [flag.spellings[0][2:] for flag in FLAGS]
        near = did_you_mean(spelling.lstrip("-"), known).replace(" '", " '--")
        raise UsageError(
            f"There is no flag {spelling!r}.{near} `python -m trainer --help` lists the flags. Settings have no dashes:"
            " key=value."
        )
    name = flag.spellings[0]
    if flag.value.startswith("[") and not equals:
        value = words.pop(0) if words and words[0] in _INFO else "all"
    elif flag.value and not equals:
        if not words:
            raise UsageError(f"{spelling} needs a value, such as `{name} {flag.value}`.")
        value = words.pop(0)
    arguments.flags[name] = value


def _read_override(word: str, arguments: Arguments) -> None:
    key, _, value = word.partition("=")
    bare = key.lstrip("+")
    if not bare:
        raise UsageError(f"Got {word!r}, expected a setting written as key=value.")
    if bare == "command":
        _read_command(value, arguments)
        return
    if key in GROUPS_TO_ADD:
        word = f"+{word}"
    elif bare in ("precision", "hydra.sweeper.params.precision") and not value.startswith("{"):
        word = f"{key}={canonical_precisions(value)}"
    elif bare in _PATHS and re.search(r"[=\\ ]", value) and not re.search(r"[,'\"]|^\$\{", value):
        word = f"{key}='{value}'"  # such as epoch=3-step=80.ckpt, or C:\\runs\\last.ckpt
    arguments.overrides.append(word)


def _read_command(word: str, arguments: Arguments) -> None:
    if commands.find(word) is None:
        names = commands.names()
        hint = did_you_mean(word, names)
        if arguments.command is not None and (not hint or word.startswith("+")):
            raise UsageError(
                f"Got the word {word!r}, expected settings written as key=value, without spaces around the =; a recipe"
                " is chosen by +recipe=NAME."
            )
        raise UsageError(f"There is no command {word!r}.{hint} The commands are {', '.join(names)}.")
    if arguments.command not in (None, word):
        raise UsageError(f"Got two commands, {arguments.command!r} and {word!r}, expected one.")
    arguments.command = word


def canonical_precisions(value: str) -> str:
    """Replace every short form in the value of a ``precision=`` override by the name of the option it stands for.

    Hydra reads 32 as a number and refuses it as an option. Quotes are dropped: no precision needs them.

    >>> canonical_precisions("32, 'bf16',16-mixed")
    '32-true, bf16-mixed,16-mixed'
    """
    unquoted = value.replace('"', "").replace("'", "")
    names = [file.stem for folder in conf_folders() for file in folder.glob("precision/*.yaml")]
    return re.sub(r"[^\s,()\[\]]+", lambda found: match(found[0], names) or found[0], unquoted)
