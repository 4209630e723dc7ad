"""Outcomes, and the tables that show them. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Outcome:
    """How a case went.

    Attributes:
        word: ``exact``: to the bit as if nothing had happened. ``inexact``: the run ended, with other numbers.
            ``lost``: it could not go on, or started over. ``hung``. ``code ran``. ``silent``: nobody was told.
        detail: more about it.
        good: whether this is what was promised; by default that of ``exact``.
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
    """One case, and how it went for each."""

    name: str
    title: str
    outcomes: dict[str, Outcome]
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain containers."""
        return {**asdict(self), "outcomes": {who: asdict(outcome) for who, outcome in self.outcomes.items()}}


def markdown(rows: list[Row], whos: list[str]) -> str:
    """The table for the documentation."""
    lines = [f"| what happens | {' | '.join(whos)} |", f"|---|{'---|' * len(whos)}"]
    for row in rows:
        cells = [_cell(row.outcomes.get(who)) for who in whos]
        lines.append(f"| {row.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "-"
    word = f"**{outcome.word}**" if outcome.good else outcome.word
    return f"{word}: {outcome.detail}".replace("|", "\\|").replace("\n", " ") if outcome.detail else word
