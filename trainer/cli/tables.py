"""Tables of numbers: on the terminal, and in Markdown. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # takes a moment to import
    from rich.console import Console
    from rich.table import Table

_STYLES = {"failed": "red", "interrupted": "red", "unsupported": "red", "emulated": "yellow", "pruned": "dim"}
"""Of the rows with a cell that says so."""


def four_digits(value: float) -> str:
    """A rate, without a power of ten.

    >>> four_digits(34.831), four_digits(66961.2)
    ('34.83', '66,960')
    """
    return f"{float(f'{value:.4g}'):,.10g}"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows))


def print_table(
    title: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Sequence[str],
    spare: Sequence[str] = (),
) -> Console:
    """Print a table; the row of the best job, whose first cell says so, is bold, and others have a colour of theirs.

    Args:
        title: above the table.
        header: the columns' names; none for a list of facts.
        rows: their cells.
        left: names of the columns that are aligned to the left.
        spare: names of the columns that are left out, one after the other, while the terminal is too narrow for all.

    Returns:
        The console it went to, for more.
    """
    from rich.measure import Measurement

    shown_in, listed, dropped = console(), list(rows), list[str]()
    unlimited = shown_in.options.update(max_width=1000)
    table = _table(title, header, listed, left, dropped)
    for name in spare:
        if Measurement.get(shown_in, unlimited, table).maximum <= shown_in.width:
            break
        dropped.append(name)
        table = _table(title, header, listed, left, dropped)
    shown_in.print(table)
    return shown_in


def _table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str], dropped: Sequence[str]
) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, show_header=bool(header))
    header = header or [""] * len(rows[0])
    kept = [place for place, name in enumerate(header) if name not in dropped]
    for name in (header[place] for place in kept):
        is_left = name in left or not name
        # when columns have been dropped, what is still too wide is a text, and no number is folded
        table.add_column(
            Text(name), justify="left" if is_left else "right", overflow="fold", no_wrap=bool(dropped) and not is_left
        )
    for cells in rows:
        table.add_row(*(Text(cells[place]) for place in kept), style=_style(cells))
    return table


def console() -> Console:
    """A console as wide as a table wants where it is not a terminal's."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)


def _style(cells: Sequence[str]) -> str | None:
    if cells[0].endswith("(best)"):
        return "bold green"
    return next((_STYLES[cell] for cell in cells if cell in _STYLES), None)
