"""Tables of numbers: on the terminal, and in Markdown. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from trainer.cli.processes import is_quiet

if TYPE_CHECKING:  # takes a moment to import
    from rich.console import Console
    from rich.table import Table as RichTable

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


class Table(NamedTuple):
    """A table on the terminal.

    Args:
        title: above it.
        header: the columns' names; none for a list of facts.
        rows: the cells.
        left: names of the columns that are aligned to the left, the others are numbers; None for all.
        spare: names of the columns that are left out, one after the other, while the terminal is too narrow for all.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[str] | None = None
    spare: Sequence[str] = ()

    def show(self) -> None:
        """Print it, but not with ``--quiet``; the row of the best job, whose first cell says so, is bold."""
        if is_quiet():
            return
        from rich.measure import Measurement

        shown_in, dropped = console(), list[str]()
        unlimited = shown_in.options.update(max_width=1000)
        table = self._without(dropped)
        for name in self.spare:
            if Measurement.get(shown_in, unlimited, table).maximum <= shown_in.width:
                break
            dropped.append(name)
            table = self._without(dropped)
        shown_in.print(table)

    def _without(self, dropped: Sequence[str]) -> RichTable:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        title, header = Text(self.title), self.header or [""] * len(self.rows[0])
        table = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=bool(self.header))
        kept = [place for place, name in enumerate(header) if name not in dropped]
        for name in (header[place] for place in kept):
            is_number = self.left is not None and name not in self.left
            # when columns have been dropped, what is still too wide is a text, and no number is folded
            no_wrap = bool(dropped) and is_number
            table.add_column(Text(name), justify="right" if is_number else "left", overflow="fold", no_wrap=no_wrap)
        for cells in self.rows:
            table.add_row(*(Text(cells[place]) for place in kept), style=_style(cells))
        return table


def tell(text: str, style: str | None = None) -> None:
    """Print a line, which the terminal breaks where it is too long."""
    console().print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def console() -> Console:
    """A console as wide as a table wants where it is not a terminal's."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)


def _style(cells: Sequence[str]) -> str | None:
    if cells[0].endswith("(best)"):
        return "bold green"
    return next((_STYLES[cell] for cell in cells if cell in _STYLES), None)
