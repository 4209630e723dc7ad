"""Shared parts of the benchmarks: the environment of the checkout, writing a table into a page. Imports no torch."""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def enter_checkout(**environment: str) -> None:
    """Import ``trainer`` from this checkout, and restart in its ``.venv`` if there is one and no other is active.

    Call this before importing torch: ``environment`` (for example ``OMP_NUM_THREADS``) is set for the new process only.
    """
    python = ROOT / ".venv" / "bin" / "python"
    if "VIRTUAL_ENV" not in os.environ and "AMP_BENCH" not in os.environ and python.exists():
        os.environ.update(environment, AMP_BENCH="1")
        os.execv(python, [str(python), *sys.argv])
    sys.path.insert(1, str(ROOT))


def replace_table(page: Path, name: str, table: str) -> None:
    """Replace the text between ``<!-- name: start -->`` and ``<!-- name: end -->`` with ``table``."""
    start, end = f"<!-- {name}: start -->", f"<!-- {name}: end -->"
    before, has_start, rest = page.read_text().partition(start)
    _, has_end, after = rest.partition(end)
    if not (has_start and has_end):
        sys.exit(f"Got {page}, expected a file with the lines {start} and {end}. Add them where the table should go.")
    page.write_text(f"{before}{start}\n{table}\n{end}{after}")


def spread(values: list[float]) -> float:
    """Return half the distance from the lower to the upper quartile."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2
