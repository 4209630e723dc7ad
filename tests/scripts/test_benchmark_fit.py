"""The benchmark of whole runs writes its tables, with a row for each case."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.warm_python import WarmPython

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark_fit"


@pytest.mark.whole
def test_tables_have_times_files_and_bytes(tmp_path: Path, python: WarmPython) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- benchmark_fit: start -->\nold\n<!-- benchmark_fit: end -->\nafter\n")
    words = [str(SCRIPT), "--repeats", "1", "--only", "fit, bare, one batch", "--markdown", str(page)]
    done = python.run(*words, env=os.environ | {"AMP_BENCH": "1"})
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert re.search(r"^\| fit, bare, one batch, no validation \| \*\*[\d.]+\*\* \| [\d.]+ \| [\d.]+ \|$", text, re.M)
    files = re.search(r"^\| files that it leaves behind \| \*\*(\d+)\*\* \| (\d+) \|$", text, re.M)
    assert files is not None
    assert files[1] == files[2]
    assert "old" not in text
