"""Print each warning of a run as one line, and write it to the run's log, which the report reads. Imports no torch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.cli.failure import log_handler
from trainer.common.files import from_here
from trainer.common.packages import is_users_file


@contextmanager
def log_warnings() -> Iterator[None]:
    """Inside the context, print each warning once, as one line, and also write it to the run's log.

    Only the handler of the log gets the warnings, because Python itself prints them, above the progress bar. Repeated
    texts are dropped: torch issues some warnings from several places and for each dataloader.
    """
    show, form = warnings.showwarning, warnings.formatwarning
    shown: set[str] = set()

    def show_once(message: Warning | str, category: type[Warning], filename: str, lineno: int, *file: Any) -> None:
        text = _in_one_line(message)
        if text in shown:
            return
        shown.add(text)
        warnings.formatwarning = _line  # set here, because importing Lightning replaces it
        show(message, category, filename, lineno, *file)
        if (handler := log_handler()) is not None:
            entry = f"{text} ({from_here(Path(filename))}:{lineno})"
            handler.handle(logging.LogRecord("py.warnings", logging.WARNING, filename, lineno, "%s", (entry,), None))

    warnings.showwarning = show_once  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning, warnings.formatwarning = show, form


def _line(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """Return the line for the terminal, with file and line number if the file is the user's own."""
    is_own = Path(filename).is_relative_to(Path.cwd()) and is_users_file(filename)
    return f"WARNING: {_in_one_line(message)}{f' ({from_here(Path(filename))}:{lineno})' if is_own else ''}\n"


def _in_one_line(message: Warning | str) -> str:
    return " ".join(str(message).split())
