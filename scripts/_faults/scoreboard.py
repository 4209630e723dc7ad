"""Outcomes and their tables. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Outcome:
    """The outcome of a case.

    Attributes:
        word: ``exact``: bitwise equal to the undisturbed run. ``inexact``: the run ended, with other numbers.
            ``lost``: it could not resume, or started over. ``hung``: it did not end. ``code ran``: a file executed its
            code. ``silent``: no error was reported.
        detail: more about it.
        good: whether the outcome is as promised; by default, only ``exact`` is.
    """

    word: str
    detail: str = ""
    good: bool | None = None

    def __post_init__(self) -> None:
        if self.good is None:
            self.good = self.word == "exact"

    def __str__(self) -> str:
        return f"{self.word}: {self.detail}" if self.detail else self.word


@dataclass
class Row:
    """One case, and its outcome per Trainer."""

    name: str
    title: str
    outcomes: dict[str, Outcome]
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return plain containers."""
        return {**asdict(self), "outcomes": {who: asdict(outcome) for who, outcome in self.outcomes.items()}}


def markdown(rows: list[Row], whos: list[str]) -> str:
    """Return the table for the documentation."""
    lines = [f"| fault | {' | '.join(whos)} |", f"|---|{'---|' * len(whos)}"]
    for row in rows:
        cells = [_cell(row.outcomes.get(who)) for who in whos]
        lines.append(f"| {row.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "-"
    word = f"**{outcome.word}**" if outcome.good else outcome.word
    # short cells: no example, and only the first of many differences, which is the most important one
    detail = re.sub(r", such as:? .*", "", outcome.detail)
    detail = re.sub(r"(other [^,]*)(, [^,]*){2,}$", r"\1, ...", detail)
    return f"{word}: {detail}".replace("|", "\\|").replace("\n", " ") if detail else word
