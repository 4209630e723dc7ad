"""``trainer report``: write an HTML report of a run, a sweep or several runs, from their files. Imports no torch.

``selection`` finds the runs, ``artifacts`` reads their files, ``charts`` selects the charts, ``drawing`` draws them,
and ``page`` (``several`` for more than one run) fills the template. The page is one file and needs no network.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli.parsing import Arguments, UsageError
from trainer.common import packages
from trainer.common.files import write_text
from trainer.common.terminal import command_line

if TYPE_CHECKING:
    from trainer.cli.report.selection import ReportSubject

__all__ = ["PAGE", "command", "write_report"]

PAGE = "report.html"
"""Default name of the page, in the folder of the run or sweep."""


def command(arguments: Arguments) -> int:
    """Run ``trainer report [RUN_DIR ...] [OUT.html]``."""
    from trainer.cli.report.selection import choose_subject  # the imports of a report take half a second

    if problem := packages.missing("report"):
        raise UsageError(f"report needs {problem}")
    names = list(arguments.words)
    named = names.pop() if names and Path(names[-1]).suffix.lower() in (".html", ".htm") else None
    about = choose_subject(names)
    out = Path(named) if named else about.folder / PAGE
    if not names:
        print(f"The newest run is {about.folder}")
    for problem in (*about.left_out, *write_report(about, out)):
        print(f"Left out: {problem}", file=sys.stderr)
    print(f"The report is {out}")
    return 0


def write_report(about: ReportSubject, out: Path) -> list[str]:
    """Write the page of a run, a sweep, or several runs.

    Args:
        about: the runs.
        out: the file. An existing file is overwritten.

    Returns:
        Messages about runs that are left out because they cannot be read.

    Raises:
        UsageError: if the page cannot be written, or no run can be read.
    """
    from trainer.cli.report.page import run_page
    from trainer.cli.report.several import INVALID_RECORD_ERRORS, several_page, unreadable

    left_out: list[str] = []
    if about.kind == "run":
        try:
            text = run_page(about.folder)
        except INVALID_RECORD_ERRORS as error:
            raise UsageError(unreadable(about.folder, error)) from error
    else:
        text, left_out = several_page(about)
    try:
        write_text(out, text)  # replaces a link of that name
    except OSError as error:
        command = command_line("report", *(about.runs if about.kind == "runs" else [about.folder]), PAGE)
        raise UsageError(f"Cannot write {out}: {error.strerror}. Name another file: `{command}`.") from error
    return left_out
