"""The benchmark writes its table. The peak memory of our step is that by hand, and a copy of small weights."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.warm_python import WarmPython

ROOT = Path(__file__).parents[2]


def test_writes_its_table(tmp_path: Path, python: WarmPython) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- benchmark_memory: start -->\nold\n<!-- benchmark_memory: end -->\nafter\n")
    sizes = ["--width", "256", "--heads", "4", "--layers", "4", "--context", "64", "--vocabulary", "256"]
    words = [*sizes, "--sequences", "2", "64", "--markdown", str(page)]
    command = [str(ROOT / "scripts" / "benchmark_memory"), *words]
    done = python.run(*command, env={**os.environ, "AMP_BENCH": "1"})  # stay in this environment
    assert done.returncode == 0, done.stderr[-2000:]
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    rows = re.findall(r"^\| (\d+) x 64 \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert [row[0] for row in rows] == ["2", "64"]
    for _, hand, ours, late, lightnings in rows:
        assert float(hand) <= float(ours) <= float(hand) + 2**26 / 2**30  # OverflowReport keeps the weights
        assert float(late) > float(hand)
        assert float(lightnings) > float(hand)
