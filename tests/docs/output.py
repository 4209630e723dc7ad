"""Compare the output on a page with the printed one."""

import re


def missing_line(shown: str, printed: str) -> str | None:
    """Return the first line of ``shown`` that is missing in ``printed``, in order, or None.

    Numbers may differ (runs are shortened, machines differ), and so may white space. A line ``...`` matches any number
    of lines, and ``...`` inside a line matches any text.
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
    """Remove the parts that may differ."""
    number = r"(?<![A-Za-z])[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?"
    return " ".join(re.sub(number, "0", line).split())
