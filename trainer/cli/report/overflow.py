"""Overflow reports, as `trainer.callbacks.OverflowReport` has written them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

PATTERN = "overflow_report_step_*.md"


@dataclass(frozen=True)
class Overflow:
    """One report.

    Args:
        step: the optimizer step.
        title: one line.
        verdict: what happened.
        advice: what to try, most promising first.
        rows: labels and what stands beside them.
    """

    step: int
    title: str
    verdict: str
    advice: list[str] = field(default_factory=list)
    rows: list[tuple[str, str]] = field(default_factory=list)


def read_overflow(file: Path) -> Overflow | None:
    """Read a report; None where the file is none, cannot be read, or has nothing in it yet."""
    number = re.fullmatch(r"overflow_report_step_(\d+)\.md", file.name)
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    title = next((line[2:] for line in lines if line.startswith("# ")), "")
    if number is None or not title:
        return None
    cells = [line.strip("| ").split(" | ", 1) for line in lines if re.match(r"\| \S.* \| ", line)]
    told = [line for line in lines if line and not line.startswith(("# ", "- ", "|"))]
    return Overflow(
        int(number[1]),
        title,
        "\n".join(told),
        [line[2:] for line in lines if line.startswith("- ")],
        [(label, value) for label, value in cells],
    )
