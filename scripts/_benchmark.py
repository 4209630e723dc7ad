"""What the benchmarks share: the checkout's environment, and where a table goes. Imports no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def enter_checkout(**environment: str) -> None:
    """Make ``trainer`` that of this checkout; where it has a ``.venv`` and no other is active, start again in that.

    Called before torch is imported: ``environment`` (``OMP_NUM_THREADS``) is set for the new process only.
    """
    python = ROOT / ".venv" / "bin" / "python"
    if "VIRTUAL_ENV" not in os.environ and "AMP_BENCH" not in os.environ and python.exists():
        os.environ.update(environment, AMP_BENCH="1")
        os.execv(python, [str(python), *sys.argv])
    sys.path.insert(1, str(ROOT))


def replace_table(page: Path, name: str, table: str) -> None:
    """Put ``table`` in the place of what stands between ``<!-- name: start -->`` and ``<!-- name: end -->``."""
    start, end = f"<!-- {name}: start -->", f"<!-- {name}: end -->"
    before, has_start, rest = page.read_text().partition(start)
    _, has_end, after = rest.partition(end)
    if not (has_start and has_end):
        sys.exit(f"Got {page}, expected a file with the lines {start} and {end}. Add them where the table should go.")
    page.write_text(f"{before}{start}\n{table}\n{end}{after}")
