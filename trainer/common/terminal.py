"""Print lines and tables on the terminal, and format numbers and Markdown tables. Does not import torch."""

from __future__ import annotations

import os
import shlex
import textwrap
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # takes a moment to import
    from rich.console import Console
    from rich.table import Table as RichTable

QUIET = "TRAINER_QUIET"
"""The environment variable that passes ``--quiet`` to all processes of a command."""

PROGRAM = "TRAINER_PROGRAM"
"""The environment variable with the words that the user started this program with."""


def is_quiet() -> bool:
    """Return whether ``--quiet`` was given. Only warnings and the last line are then printed, no tables and no bar."""
    return os.environ.get(QUIET, "") not in ("", "0")


def program() -> str:
    """Return the words that start this program, as the user wrote them: ``trainer`` or ``python -m trainer``."""
    return os.environ.get(PROGRAM) or "python -m trainer"


def command_line(*words: object) -> str:
    """Return a command of this program that can be pasted into a shell.

    All commands in output and messages are made by this function. ``tests/cli/test_printed_commands.py`` finds each
    call and runs its command.

    Args:
        *words: the command and its arguments, not quoted.
    """
    return f"{program()} {shlex.join(map(str, words))}"


def four_digits(value: float) -> str:
    """Format a number from 1e-4 to 1e10 with four significant digits, without an exponent.

    >>> four_digits(34.831), four_digits(66961.2)
    ('34.83', '66,960')
    """
    return f"{float(f'{value:.4g}'):,.10g}"


def format_number(value: float | None) -> str:
    """Return a number as text: with four digits, or three and an exponent; a whole number below 1e9 with all digits.

    None becomes "-".

    >>> format_number(65536.0), format_number(0.123456), format_number(1e-5), format_number(None)
    ('65,536', '0.1235', '1e-05', '-')
    """
    if value is None:
        return "-"
    is_whole = abs(value) < 1e9 and value == int(value)
    return f"{value:,.0f}" if is_whole else f"{value:,.4g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.3g}"


def format_seconds(seconds: float) -> str:
    """Return a duration as text.

    >>> format_seconds(5.25), format_seconds(3661)
    ('5.2 s', '1:01:01')
    """
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def format_mebibytes(size: int | None) -> str:
    """Return a number of bytes in MiB, or "-" for None.

    >>> format_mebibytes(3 * 2**30)
    '3,072 MiB'
    """
    return "-" if size is None else f"{size / 2**20:,.0f} MiB"


def shortened(text: str) -> str:
    """Return a text in one line, cut at about 100 characters."""
    return textwrap.shorten(text, 100, placeholder=" [...]")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows))


class Table(NamedTuple):
    """A table on the terminal.

    Args:
        title: title above the table.
        header: names of the columns; empty for a list of facts.
        rows: cells of each row; an empty row is a separator.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def show(self) -> None:
        """Print the table, unless ``--quiet`` was given."""
        if not is_quiet():
            console().print(self.drawn())

    def drawn(self) -> RichTable:
        """Return the table for rich."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        has_header, header = bool(self.header), self.header or [""] * max(map(len, self.rows))
        table = RichTable(
            title=Text(self.title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
            show_header=has_header, pad_edge=has_header,
        )  # fmt: skip
        for place, name in enumerate(header):
            is_number = has_header and place > 0 and all(cells[place][:1] in "+-.0123456789" for cells in self.rows)
            is_label = not has_header and place == 0
            table.add_column(
                Text(name), justify="right" if is_number else "left", overflow="fold", no_wrap=is_label or is_number,
                style="dim" if is_label else None,
            )  # fmt: skip
        for cells in self.rows:
            if cells:
                table.add_row(*map(Text, cells))
            else:
                table.add_section()
        return table


def inform(text: str) -> None:
    """Print a line for the user's information, unless ``--quiet`` was given."""
    if not is_quiet():
        print(text, flush=True)


def print_line(text: str, style: str | None = None) -> None:
    """Print a line of any length, without inserting line breaks."""
    console().print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def console(given: Console | None = None, width: int = 160) -> Console:
    """Return ``given``, or rich's console for ``sys.stdout``, with ``width`` columns if it is not a terminal.

    rich assumes 80 columns otherwise, and would break names and paths.
    """
    from rich import get_console
    from rich.console import Console

    shown_in = given or get_console()
    return shown_in if shown_in.is_terminal else Console(file=shown_in.file, width=width)
