"""``trainer report``: one HTML page of a run or a sweep, from the files in its folder. Imports no torch.

``folders`` says which folder is meant, ``record`` reads it, ``charts`` says what is drawn, ``drawing`` draws, and
``page`` puts it together. The page needs nothing but itself: no network, and no file beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli.arguments import UsageError
from trainer.files import write_text

if TYPE_CHECKING:
    from trainer.cli.arguments import Arguments

__all__ = ["PAGE", "command", "write_report"]

PAGE = "report.html"
"""The name of the page, in the folder it is about."""


def command(arguments: Arguments) -> int:
    """``trainer report [RUN_DIR [OUT.html]]``."""
    from trainer.cli.report.folders import chosen

    given = [*arguments.words, None, None][:2]
    folder = chosen(given[0])
    out = Path(given[1]) if given[1] else folder / PAGE
    if given[0] is None:
        print(f"The newest run is {folder}")
    write_report(folder, out)
    print(f"The report is {out}")
    return 0


def write_report(folder: Path, out: Path) -> None:
    """Write the page on the run, or the sweep, in ``folder``.

    Args:
        folder: of it.
        out: the file; overwritten if it is there.

    Raises:
        UsageError: it cannot be written, or what is in the folder cannot be read.
    """
    from trainer.cli.report.folders import is_sweep
    from trainer.cli.report.page import page

    if out.suffix.lower() not in (".html", ".htm") or out.is_dir():
        raise UsageError(
            f"The page was to be {out}, expected the name of an .html file, such as {out.with_name(PAGE)}."
        )
    try:
        text = page(folder, out, is_sweep(folder))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise UsageError(
            f"The files in {folder} say something that a run does not write ({type(error).__name__}: {error}). They"
            " were changed, or come from another version."
        ) from error
    try:
        write_text(out, text)  # where there is a link of that name, the page takes its place
    except OSError as error:
        raise UsageError(
            f"Cannot write {out}: {error.strerror}. Name another file: `python -m trainer report {folder} OUT.html`."
        ) from error
