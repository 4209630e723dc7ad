"""``trainer trust``: from now on, the user's configs may name the code of a package."""

from __future__ import annotations

import importlib.util
import os
import re

from trainer.cli import trusted
from trainer.cli.arguments import Arguments, UsageError
from trainer.cli.targets import PACKAGES, is_refused
from trainer.errors import did_you_mean


def command(arguments: Arguments) -> int:
    """``trainer trust`` and ``trainer trust NAME ...``."""
    if trusted.VARIABLE in os.environ and arguments.words:
        raise UsageError(
            f"{trusted.VARIABLE} is set in the environment, to {os.environ[trusted.VARIABLE]!r}, and replaces"
            " what `trainer trust` keeps. Add the package there, or unset it."
        )
    for name in arguments.words:
        _check(name)
    known, file = list(trusted.packages()), trusted.file()
    added = [name for name in dict.fromkeys(arguments.words) if name not in known]
    if added:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join([*known, *added]) + "\n", encoding="utf-8")
        print(f"Trusted from now on: {', '.join(added)}. Any config may name their classes and functions, which run as")
        print(f"you. {file} has the list: take a line out to take it back.")
    elif arguments.words:
        print(f"Trusted already: {', '.join(dict.fromkeys(arguments.words))}. {file} has the list.")
    else:
        source = f"the environment's {trusted.VARIABLE}" if trusted.VARIABLE in os.environ else str(file)
        print("\n".join(known) or f"No package is trusted by {source}. To trust one: python -m trainer trust NAME")
    return 0


def _check(name: str) -> None:
    root = name.partition(".")[0]
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name):
        raise UsageError(f"trust got {name!r}, expected the name of a package as it is imported, such as timm.")
    if is_refused(name):
        raise UsageError(
            f"{name} runs, unpickles or writes what it is given: a config may not name it, trusted or not."
        )
    if name in PACKAGES:
        raise UsageError(f"Of {name} a config may name what experiments are made of, without being trusted.")
    if importlib.util.find_spec(root) is None:
        raise UsageError(f"There is no package {root!r} installed.{did_you_mean(root, _installed())} Install it first.")


def _installed() -> list[str]:
    from importlib.metadata import distributions

    return sorted({(one.metadata["Name"] or "").replace("-", "_") for one in distributions()})
