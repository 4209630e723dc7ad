"""Warnings of a run: a line on the terminal, and one in its log, where the report finds them. Imports no torch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from trainer.cli.failure import log_handler
from trainer.files import from_here


@contextmanager
def noted() -> Iterator[None]:
    """While a run goes on, its warnings are written into the log as well, and look on the terminal as those of it do.

    They go to the log's file by themselves: the terminal has them from Python, above the progress bar. What has been
    said is not said again: torch tells of too many workers from two places, and for each loader.
    """
    show, form = warnings.showwarning, warnings.formatwarning
    said: set[str] = set()

    def note(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = _in_one_line(message)
        if text in said:
            return
        said.add(text)
        warnings.formatwarning = _line  # here, for importing Lightning sets a form of its own
        show(message, category, filename, lineno, file, line)
        if (handler := log_handler()) is not None:
            told = f"{text} ({from_here(Path(filename))}:{lineno})"
            handler.handle(logging.LogRecord("py.warnings", logging.WARNING, filename, lineno, "%s", (told,), None))

    warnings.showwarning = note
    try:
        yield
    finally:
        warnings.showwarning, warnings.formatwarning = show, form


def _line(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """What the terminal is told; where, if that is in the user's own files."""
    is_own = Path(filename).is_relative_to(Path.cwd()) and "site-packages" not in filename
    return f"WARNING: {_in_one_line(message)}{f' ({from_here(Path(filename))}:{lineno})' if is_own else ''}\n"


def _in_one_line(message: Warning | str) -> str:
    return " ".join(str(message).split())
