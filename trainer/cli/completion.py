"""``trainer completion SHELL``: a script that has the shell ask us what may come next. Needs neither Hydra nor torch.

The scripts call ``trainer _complete SHELL WORDS...`` at every press of the tab key.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from trainer.cli.arguments import COMMANDS, FLAGS, GROUPS_TO_ADD, RUNS, Arguments, UsageError
from trainer.cli.keys import Key, description, groups, keys, options
from trainer.errors import did_you_mean

_BASH = """\
# Completion of the commands and settings of `trainer`, for bash. In ~/.bashrc:  eval "$(trainer completion bash)"
_trainer_complete() {
    local IFS=$'\\n'
    COMPREPLY=($("${COMP_WORDS[0]}" _complete bash "${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" 2>/dev/null))
}
complete -o nospace -F _trainer_complete trainer
"""

_ZSH = """\
#compdef trainer
# Completion of the commands and settings of `trainer`, for zsh. In ~/.zshrc, after compinit:
#   eval "$(trainer completion zsh)"
_trainer_complete() {
    local -a texts shown
    local text about
    while IFS=$'\\t' read -r text about; do
        texts+=("$text")
        shown+=("${text% }${about:+  -- $about}")
    done < <("${words[1]}" _complete zsh "${(@Q)words[2,CURRENT]}" 2>/dev/null)
    compadd -Q -S '' -l -d shown -- "${texts[@]}"
}
compdef _trainer_complete trainer
"""

_FISH = """\
# Completion of the commands and settings of `trainer`, for fish. Once:
#   trainer completion fish > ~/.config/fish/completions/trainer.fish
function __trainer_complete
    set -l words (commandline -opc) (commandline -ct)
    $words[1] _complete fish $words[2..-1] 2>/dev/null
end
complete -c trainer -f -a '(__trainer_complete)'
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}

_FOLDERS = ("--config-dir", "--config-path", "-cd", "-cp")
_FILES = {
    "ckpt": (".ckpt",),
    "ckpt_path": (".ckpt",),
    "weights": (".ckpt", ".safetensors", ".pt", ".pth", ".bin"),
}


class Candidate(NamedTuple):
    """What a word may become.

    Attributes:
        text: the whole word; with a space behind it where it is complete.
        about: a few words on it, which zsh and fish show.
    """

    text: str
    about: str = ""


def command(arguments: Arguments) -> int:
    """``trainer completion bash|zsh|fish``."""
    shells = ", ".join(SCRIPTS)
    if not arguments.words:
        raise UsageError(f'completion needs the name of a shell ({shells}): eval "$(trainer completion bash)"')
    (shell,) = arguments.words
    if shell not in SCRIPTS:
        raise UsageError(f"There is no completion for {shell!r}.{did_you_mean(shell, SCRIPTS)} Expected {shells}.")
    print(SCRIPTS[shell], end="")
    return 0


def answer(asked: list[str]) -> int:
    """``trainer _complete SHELL ...``: what a script asks; prints a candidate a line.

    bash gives the line up to the cursor and its word breaks, and wants what comes behind the last of these; the others
    give the words, of which the last is to be completed, and show a description behind a tab.
    """
    shell, *rest = asked
    words = _split(rest[0])[1:] if shell == "bash" else rest
    cut = 0
    if shell == "bash":
        breaks = rest[1] if len(rest) > 1 else "="
        cut = max((position + 1 for position, letter in enumerate(words[-1]) if letter in breaks), default=0)
    for text, about in candidates(words):
        if shell == "bash":
            print(text[cut:])
        else:
            print(f"{text.rstrip() if shell == 'fish' else text}\t{about}" if about else text)
    return 0


def _split(line: str) -> list[str]:
    """The words of a line up to the cursor; the last one is empty behind a space."""
    try:
        words = shlex.split(line)
    except ValueError:  # a quote that is still open
        words = line.split()
    return words if words and not line[-1:].isspace() else [*words, ""]


def candidates(words: list[str]) -> list[Candidate]:
    """What the last of ``words`` may become, in alphabetical order.

    Args:
        words: of the command line, without the program's name.
    """
    *before, word = words or [""]
    config_dir = next((b for a, b in pairwise(before) if a in ("--config-dir", "-cd")), None)
    commands = [one for one in before if one in COMMANDS]
    found: Iterable[Candidate]
    if before and before[-1] in _FOLDERS:
        found = _paths("", word, (), folders_only=True)
    elif before and before[-1] in ("--cfg", "-c"):
        found = [Candidate("job "), Candidate("hydra "), Candidate("all ")]
    elif word.startswith("-"):
        found = (Candidate(f"{spelling} ", flag.about) for flag in FLAGS for spelling in flag.spellings)
    elif not commands:
        from trainer.cli.help import SUMMARY

        found = (Candidate(f"{name} ", SUMMARY.get(name, "")) for name in COMMANDS)
    elif commands[0] == "recipes" and "=" not in word:
        names = [Candidate(f"{name} ", description(file)) for name, file in options("recipe", config_dir).items()]
        found = names if before[-1] != "recipes" else [*names, Candidate("copy ", "write one to conf/recipe, to edit")]
    elif commands[0] == "completion":
        found = (Candidate(f"{shell} ") for shell in SCRIPTS)
    elif commands[0] == "report":
        found = _paths("", word, (".html",))
    elif commands[0] in ("consolidate", "shard", "export"):
        found = _paths("", word, (".ckpt", ".safetensors"))
    elif commands[0] == "tune" and before[-1] == "tune":
        found = [Candidate("batch_size "), Candidate("lr ")]
    elif commands[0] in (*RUNS, "tune", "checks", "recipes"):
        found = _settings(before, word, config_dir)
    else:
        found = ()
    return sorted({one for one in found if one.text.startswith(word)})


def _settings(before: list[str], word: str, config_dir: str | None) -> Iterator[Candidate]:
    key, equals, value = word.partition("=")
    bare = key.lstrip("+~")
    sign = key[: len(key) - len(bare)]
    if not equals:
        yield from _names(sign, bare, before, config_dir)
    elif bare in groups(config_dir):
        start = word.removesuffix(value.rpartition(",")[2])
        for name, file in options(bare, config_dir).items():
            yield Candidate(f"{start}{name} ", description(file))
    elif bare in _FILES:
        yield from _paths(f"{key}=", value, _FILES[bare])
    elif bare.endswith((".root", ".dir", "_dir", "dirpath")):
        yield from _paths(f"{key}=", value, (), folders_only=True)
    elif found := keys(before, config_dir).get(bare):
        for choice in found.choices:
            yield Candidate(f"{key}={choice} ")


def _names(sign: str, start: str, before: list[str], config_dir: str | None) -> Iterator[Candidate]:
    """Groups and keys, behind the sign for what is added or left out."""
    listed = groups(config_dir)
    yield from (Candidate(f"+{group}=") for group in listed if group in GROUPS_TO_ADD)
    if sign != "+":  # which is for what is not there
        yield from (Candidate(_signed(sign, f"{group}=")) for group in listed if group not in GROUPS_TO_ADD)
        known = [key for key in keys(before, config_dir).values() if key.name not in listed]
        for text, about in _next_parts(known, start):
            yield Candidate(_signed(sign, text), about)


def _signed(sign: str, text: str) -> str:
    """``~`` takes no value."""
    return f"~{text.replace('=', ' ')}" if sign == "~" else f"{sign}{text}"


def _next_parts(known: Iterable[Key], start: str) -> Iterator[Candidate]:
    """Keys up to their next dot behind ``start``, as a shell completes a path folder by folder."""
    depth = start.count(".")
    for key in known:
        if not key.name.startswith(start):
            continue
        parts = key.name.split(".")
        if len(parts) > depth + 1:
            yield Candidate(".".join(parts[: depth + 1]) + ".")
        elif not isinstance(key.value, dict) and (not parts[-1].startswith("_") or parts[-1] == "_target_"):
            yield Candidate(f"{key.name}=", key.meaning)


def _paths(start: str, value: str, endings: tuple[str, ...], *, folders_only: bool = False) -> Iterator[Candidate]:
    """Folders, and files with one of ``endings``, that begin with ``value``; behind ``start``."""
    folder, _, name = value.rpartition("/")
    place = Path(folder + "/" if "/" in value else ".").expanduser()
    try:
        entries = sorted(os.scandir(place), key=lambda entry: entry.name)
    except OSError:
        return
    inside = f"{folder}/" if "/" in value else ""
    for entry in entries:
        if not entry.name.startswith(name) or (entry.name.startswith(".") and not name):
            continue
        if entry.is_dir():
            is_checkpoint = entry.name.endswith(endings) and not folders_only  # a folder that is one
            yield Candidate(f"{start}{inside}{entry.name}{' ' if is_checkpoint else '/'}")
        elif not folders_only and entry.name.endswith(endings):
            yield Candidate(f"{start}{inside}{entry.name} ")
