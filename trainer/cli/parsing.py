"""Parse the command line into a command, overrides and flags.

Hydra accepts only overrides and its own flags. `read` parses the form that users write, such as ``fit -m +recipe=a
precision=32,16``, and `Arguments.for_hydra` returns Hydra's form: ``+recipe=a precision=32-true,16-mixed command=fit
--multirun``. `read` parses that form too, because launchers start the other ranks of a run with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainer.cli import commands
from trainer.cli.folders import conf_folders
from trainer.common.terminal import command_line
from trainer.errors import ConfigurationError, did_you_mean
from trainer.precision.names import match

GROUPS_TO_ADD = ("recipe", "debug", "sweep")
"""Config groups that are not in the default config. Hydra requires a ``+`` before them; here it is optional."""

COMPARED_PRECISIONS = ("32-true", "16-mixed", "bf16-mixed")
"""The precisions of ``compare`` if the command line gives none."""

_PATHS = ("ckpt", "ckpt_path", "weights", "to", "hydra.run.dir", "hydra.sweep.dir")
"""Settings that are paths. Their values need no quotes if they contain =, a space, or letters other than ASCII."""

_HOME = re.compile(r"(?<![^,])~(?=/)")
"""The home directory at the start of a value. Shells expand it only in arguments that look like assignments."""

_OPTIONS = re.compile(r"[^\s,()\[\]]+")
"""The options in the value of an override."""

_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_TOPICS = {"--cfg": ("job", "hydra", "all"), "--info": _INFO}
"""The values of flags that print something."""


class Flag(NamedTuple):
    """A flag of Hydra or of this package.

    Attributes:
        spellings: the long spelling first.
        value: placeholder of its value; in brackets if the value is optional, "" if the flag takes none.
        about: description for the help; "" for flags that only `--hydra-help` lists.
    """

    spellings: tuple[str, ...]
    value: str = ""
    about: str = ""


FLAGS = (
    Flag(("--help", "-h"), about="print this text; after a command, the help of that command"),
    Flag(("--version",), about="print the versions of this package and of its dependencies"),
    Flag(("--multirun", "-m"), about="run a sweep: one run for each combination of the comma-separated values"),
    Flag(("--cfg", "-c"), "job", "print the config instead of running; --package trainer prints only that node"),
    Flag(("--info", "-i"), "[TOPIC]", f"print how the config is composed; TOPIC is one of {', '.join(_INFO)}"),
    Flag(("--config-dir", "-cd"), "FOLDER", "also search FOLDER for configs (./conf is always searched first)"),
    Flag(("--quiet", "-q"), about="print only warnings and one line at the end: no progress bar, no tables"),
    Flag(("--debug",), about="print the full traceback of errors; it is always in the run's log"),
    Flag(("--hydra-help",), about="print the other flags of Hydra"),
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
OWN_FLAGS = ("--debug", "--quiet")
"""Flags of this package, which are not passed to Hydra. They change the output, not the results."""


class UsageError(ConfigurationError):
    """Error in the command line or a config. Only its message is printed; the exit status is 2."""


@dataclass
class Arguments:
    """A parsed command line.

    Args:
        command: a name of `trainer.cli.commands`, or None if none was given.
        words: the words without ``=`` after the command, such as the name of a recipe.
        overrides: Hydra's overrides in the order given, with those of ``+debug`` and ``+sweep`` last, aliases replaced,
            and without ``command=``.
        flags: value of each flag by its long spelling; ``""`` for flags without a value.
        requeued: whether ``resume=auto`` was added because Slurm requeued the job.
    """

    command: str | None = None
    words: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    flags: dict[str, str] = field(default_factory=dict)
    requeued: bool = False

    @property
    def multirun(self) -> bool:
        """Return whether ``-m`` was given."""
        return "--multirun" in self.flags

    @property
    def shows(self) -> bool:
        """Return whether Hydra prints something instead of running, such as the config."""
        return not _SHOW.isdisjoint(self.flags)

    def check_flags(self) -> None:
        """Check the flags of a command that does not run the config with Hydra.

        Raises:
            UsageError: if ``-m`` was given, or a flag that makes Hydra print something.
        """
        if self.multirun:
            raise UsageError(f"Got --multirun with {self.command}, which does not support it.")
        if self.shows:
            show = command_line("fit", *self.overrides, "--cfg", "job")
            raise UsageError(f"Got a flag that prints with {self.command}. To print the config, use `{show}`.")

    def config_overrides(self) -> list[str]:
        """Return the overrides that the config is composed with, including ``command=...``."""
        return [*self.overrides, f"command={self.command}"]

    def for_hydra(self) -> list[str]:
        """Return ``sys.argv[1:]`` for Hydra: `config_overrides` and Hydra's flags, or only ``--hydra-help``."""
        if "--hydra-help" in self.flags:  # Hydra's help does not compose the config
            return ["--hydra-help"]
        flags = [word for flag, value in self.flags.items() if flag not in OWN_FLAGS for word in (flag, value) if word]
        return [*self.config_overrides(), *flags]


def read(argv: Sequence[str]) -> Arguments:
    """Parse a command line.

    Args:
        argv: the words after the program's name.

    Raises:
        UsageError: if a command, flag or word is unknown, or a flag has no value.
    """
    arguments = Arguments()
    words = list(argv)
    while words:
        command = commands.find(arguments.command)
        if command is not None and command.takes_program:
            arguments.words = words
            break
        word = words.pop(0)
        takes_files = command is not None and command.takes_files
        if word.startswith("-"):
            _read_flag(word, words, arguments)
        elif ("=" in word or word.startswith("~")) and not takes_files:
            _read_override(word, arguments)
        elif command is not None and len(arguments.words) < command.words:
            arguments.words.append(word)
        else:
            _read_command(word, arguments)
    arguments.overrides.sort(key=lambda word: word.startswith(("+debug=", "+sweep=")))  # they override the recipe
    if arguments.command == "compare":  # a sweep, over `COMPARED_PRECISIONS` unless the command line chooses precisions
        arguments.flags["--multirun"] = ""
        chosen = ("precision", "precision._target_", "sweep", "hydra.sweeper.params.precision")
        if not any(override.partition("=")[0].lstrip("+") in chosen for override in arguments.overrides):
            arguments.overrides.append(f"precision={','.join(COMPARED_PRECISIONS)}")
    if arguments.multirun and arguments.shows:
        given = ["compare" if arguments.command == "compare" else "--multirun", *set(arguments.flags) & _SHOW]
        raise UsageError(f"Got {' and '.join(given)}, which prints the config of a single run. Use one value each.")
    return arguments


def _read_flag(word: str, words: list[str], arguments: Arguments) -> None:
    spelling, equals, value = word.partition("=")
    flag = _BY_SPELLING.get(spelling)
    if flag is None:
        known = [flag.spellings[0][2:] for flag in FLAGS]
        hint = did_you_mean(spelling.lstrip("-"), known).replace(" '", " '--")
        lists = f"`{command_line('fit', '--help')}` lists the flags"
        raise UsageError(f"There is no flag {spelling!r}.{hint} {lists}. Settings have no dashes: key=value.")
    name = flag.spellings[0]
    if flag.value.startswith("[") and not equals:
        value = words.pop(0) if words and words[0] in _INFO else "all"
    elif flag.value and not equals:
        if not words:
            raise UsageError(f"Got {spelling} without a value, expected `{name} {flag.value}`.")
        value = words.pop(0)
    if value not in _TOPICS.get(name, (value,)):
        raise UsageError(f"Got {spelling} {value}, expected one of {', '.join(_TOPICS[name])}.")
    arguments.flags[name] = value


def _read_override(word: str, arguments: Arguments) -> None:
    key, _, value = word.partition("=")
    bare = key.lstrip("+")
    if not bare:
        raise UsageError(f"Got {word!r}, expected a setting, key=value.")
    if bare == "command":
        _read_command(value, arguments)
        return
    if bare in GROUPS_TO_ADD:
        key = f"+{bare}"
    value = _HOME.sub(lambda _: os.path.expanduser("~"), value)
    if bare in ("precision", "hydra.sweeper.params.precision") and not value.startswith("{"):
        word = f"{key}={canonical_precisions(value)}"
    elif bare in _PATHS and re.search(r"[^\w/.:${}%-]", value, re.ASCII) and not re.search(r"[,'\"]|^\$\{", value):
        word = f"{key}='{value}'"  # such as epoch=3-step=80.ckpt, or C:\\runs\\last.ckpt
    else:
        word = f"{key}={quoted_options(bare, value)}" if "=" in word else word
    arguments.overrides.append(word)


def _read_command(word: str, arguments: Arguments) -> None:
    if commands.find(word) is None:
        names = commands.names()
        if arguments.command is not None:
            raise UsageError(f"Got the word {word!r}, expected settings, key=value, without spaces, or +recipe=NAME.")
        hint = did_you_mean(word, names)
        raise UsageError(f"There is no command {word!r}.{hint} The commands are {', '.join(names)}.")
    if arguments.command not in (None, word):
        raise UsageError(f"Got two commands, {arguments.command!r} and {word!r}, expected one.")
    arguments.command = word


def quoted_options(group: str, value: str) -> str:
    """Quote the options of a config group that Hydra would read as a number, a boolean or null.

    Args:
        group: key of the override. The value of a setting that is not a config group is returned unchanged.
        value: value of the override: one or more options, separated by commas.
    """
    if not any(map(_is_not_text, _OPTIONS.findall(value))):
        return value
    names = {file.stem for folder in conf_folders() for file in folder.glob(f"{group}/*.yaml")}
    names = {name for name in names if _is_not_text(name)}
    return _OPTIONS.sub(lambda option: f"'{option[0]}'" if option[0] in names else option[0], value)


def _is_not_text(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return word.lower() in ("null", "true", "false")
    return True


def canonical_precisions(value: str) -> str:
    """Replace the short forms in the value of a ``precision=`` override by names of options, and remove quotes.

    Hydra parses 32 as a number and rejects it as an option.

    >>> canonical_precisions("32, 'bf16',16-mixed")
    '32-true, bf16-mixed,16-mixed'
    """
    unquoted = value.replace('"', "").replace("'", "")
    names = [file.stem for folder in conf_folders() for file in folder.glob("precision/*.yaml")]
    return _OPTIONS.sub(lambda option: match(option[0], names) or option[0], unquoted)
