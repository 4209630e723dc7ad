"""``trainer completion SHELL``: a script that has the shell ask us what may come next. Needs neither Hydra nor torch.

The scripts call ``trainer _complete SHELL WORDS...`` at every press of the tab key, so everything here reads files and
no more: the keys of the config come from the YAML files that Hydra would compose, without composing them.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from trainer.cli.arguments import COMMANDS, FLAGS, GROUPS_TO_ADD, RUNS, Arguments, UsageError
from trainer.cli.folders import conf_folders
from trainer.cli.recipes import description, options
from trainer.cli.schema import ACCELERATORS, MEANINGS, STRATEGIES
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
_FILES = ("ckpt", "ckpt_path")
_CHOICES: dict[str, tuple[str, ...]] = {
    "trainer.accelerator": ACCELERATORS,
    "trainer.strategy": STRATEGIES,
    "trainer.profiler": ("simple", "advanced", "pytorch"),
    "resume": ("auto",),
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
        found = (Candidate(f"{flag} ") for spellings, _ in FLAGS for flag in spellings)
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
    elif commands[0] == "tune" and before[-1] == "tune":
        found = [Candidate("batch_size "), Candidate("lr ")]
    elif commands[0] in (*RUNS, "tune", "recipes"):
        found = _settings(before, word, config_dir)
    else:
        found = ()
    return sorted({one for one in found if one.text.startswith(word)})


def _settings(before: list[str], word: str, config_dir: str | None) -> Iterator[Candidate]:
    groups = _groups(config_dir)
    key, equals, value = word.partition("=")
    bare = key.lstrip("+~")
    if equals and bare in groups:
        start = word[: len(word) - len(value.rpartition(",")[2])]
        for name, file in options(bare, config_dir).items():
            yield Candidate(f"{start}{name} ", description(file))
        return
    if equals and bare in _FILES:
        yield from _paths(f"{key}=", value, (".ckpt",))
        return
    known = _keys(before, config_dir)
    if equals:
        default = known.get(bare)
        if bare.endswith((".root", ".dir", "_dir", "dirpath")):
            yield from _paths(f"{key}=", value, (), folders_only=True)
        elif isinstance(default, bool) or bare in _CHOICES:
            for choice in _CHOICES.get(bare, ("true", "false")):
                yield Candidate(f"{key}={choice} ")
        return
    sign = word[: len(word) - len(bare)]
    for group in groups:
        if group in GROUPS_TO_ADD:
            yield Candidate(f"+{group}=")
        elif sign != "+":
            yield Candidate(f"{sign}{group}{'=' if sign != '~' else ' '}")
    if sign != "+":  # which is for keys that are not there
        for text, about in _next_parts(known, bare):
            yield Candidate(f"{sign}{text}" if sign != "~" else f"~{text.replace('=', ' ')}", about)


def _next_parts(known: dict[str, Any], start: str) -> Iterator[Candidate]:
    """Keys up to their next dot behind ``start``, as a shell completes a path folder by folder."""
    depth = start.count(".")
    for key, value in known.items():
        if not key.startswith(start):
            continue
        parts = key.split(".")
        if len(parts) > depth + 1:
            yield Candidate(".".join(parts[: depth + 1]) + ".")
        elif not isinstance(value, dict):
            yield Candidate(f"{key}=", MEANINGS.get(key.removeprefix("trainer."), "") if "trainer." in key else "")


def _groups(config_dir: str | None) -> list[str]:
    folders = (one for folder in conf_folders(config_dir) for one in folder.iterdir() if one.is_dir())
    return sorted({folder.name for folder in folders if not folder.name.startswith((".", "_", "hydra"))})


def _keys(before: list[str], config_dir: str | None) -> dict[str, Any]:
    """The keys of the config that the words before compose, with their values; nodes have a dict."""
    root: dict[str, Any] = {}
    _load("amp_trainer", root, {}, config_dir)
    chosen = {
        word.lstrip("+").partition("=")[0]: word.partition("=")[2].split(",")[0] for word in before if "=" in word
    }
    recipe: dict[str, Any] = {}
    selected: dict[str, Any] = {}
    if "recipe" in chosen:
        _load(f"recipe/{chosen['recipe']}", recipe, selected, config_dir)
    defaults = {**_defaults_of_root(config_dir), **selected, **{g: o for g, o in chosen.items() if "." not in g}}
    for group, option in defaults.items():
        if option and group != "recipe":
            _load(f"{group}/{option}", root, {}, config_dir)
    _merge(root, recipe)
    keys: dict[str, Any] = {f"trainer.{name}": None for name in MEANINGS}
    _flatten(root, "", keys)
    return {key: value for key, value in keys.items() if not key.startswith("hydra") or key in ("hydra.run.dir",)}


def _defaults_of_root(config_dir: str | None) -> dict[str, Any]:
    listed = _yaml("amp_trainer", config_dir).get("defaults") or []
    pairs = [pair for entry in listed if isinstance(entry, dict) for pair in entry.items()]
    return {group: option for group, option in pairs if isinstance(group, str) and not group.startswith("override")}


def _load(name: str, root: dict[str, Any], selected: dict[str, Any], config_dir: str | None, depth: int = 0) -> None:
    """Merge the config ``name``, and those that it is built upon, into ``root``; note the options that it overrides."""
    node = _yaml(name, config_dir)
    group = name.rpartition("/")[0]
    for entry in node.pop("defaults", None) or ():
        if isinstance(entry, str) and entry != "_self_" and group and depth < 9:
            _load(f"{group}/{entry.partition('@')[0]}", root, selected, config_dir, depth + 1)
        elif isinstance(entry, dict):
            for key, option in entry.items():
                if str(key).startswith("override /"):
                    selected[str(key).removeprefix("override /")] = option
    is_global = node.pop("@global", False) or not group
    _merge(root, node if is_global else {group.replace("/", "."): node})


def _yaml(name: str, config_dir: str | None) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]

    for folder in conf_folders(config_dir):
        if (file := folder / f"{name}.yaml").is_file():
            text = file.read_text(encoding="utf-8")
            try:
                node = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            except yaml.YAMLError:
                return {}
            is_global = bool(re.search(r"^#\s*@package\s+_global_", text, re.MULTILINE))
            return {**node, "@global": is_global} if isinstance(node, dict) else {}
    return {}


def _merge(root: dict[str, Any], node: dict[str, Any]) -> None:
    for name, value in node.items():
        if isinstance(value, dict) and isinstance(root.get(name), dict):
            _merge(root[name], value)
        else:
            root[name] = value


def _flatten(node: dict[str, Any], prefix: str, keys: dict[str, Any]) -> None:
    for name, value in node.items():
        if str(name).startswith(("_", "@")) and str(name) != "_target_":
            continue
        keys[f"{prefix}{name}"] = value
        if isinstance(value, dict):
            _flatten(value, f"{prefix}{name}.", keys)


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
            yield Candidate(f"{start}{inside}{entry.name}/")
        elif not folders_only and entry.name.endswith(endings):
            yield Candidate(f"{start}{inside}{entry.name} ")
