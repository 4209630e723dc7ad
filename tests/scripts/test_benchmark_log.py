"""The benchmark runs, and writes its table."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.warm_python import WarmPython

ROOT = Path(__file__).parents[2]


def test_writes_its_table(tmp_path: Path, python: WarmPython) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- benchmark_log: start -->\nold\n<!-- benchmark_log: end -->\nafter\n")
    words = ["--steps", "2", "--warmup", "1", "--repeats", "1", "--calls", "2", "--markdown", str(page)]
    command = [str(ROOT / "scripts" / "benchmark_log"), *words]
    done = python.run(*command, env={**os.environ, "AMP_BENCH": "1"})  # stay in this environment
    assert done.returncode == 0, done.stderr[-2000:]
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert len(re.findall(r"\| (?:tensor|number|metric object), [\w, ]+ \| [\d.]+ \| [\d.]+ \|", text)) == 9
    assert "medians of 1 interleaved rounds of 2 steps; torch" in text
