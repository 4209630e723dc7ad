"""Whether an output that a page shows is what was printed."""

from __future__ import annotations

import re


def missing_line(shown: str, printed: str) -> str | None:
    """The first line of ``shown`` that ``printed`` does not have, in their order; None if it has all.

    Numbers may be others (runs are shortened, machines differ), and so may white space. A line ``...`` stands for any
    number of lines, and ``...`` inside of a line for anything.
    """
    lines = [_plain(line) for line in printed.splitlines()]
    place = 0
    for line in shown.splitlines():
        plain = _plain(line)
        if plain in ("", "..."):
            continue
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in plain.split("...")))
        found = next((number for number in range(place, len(lines)) if pattern.search(lines[number])), None)
        if found is None:
            return line
        place = found + 1
    return None


def _plain(line: str) -> str:
    """Without what may be another each time."""
    number = r"(?<![A-Za-z])[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?"
    return " ".join(re.sub(number, "0", line).split())
