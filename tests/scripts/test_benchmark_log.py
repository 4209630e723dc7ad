"""The benchmark runs, and writes its table."""

import re


def test_writes_its_table(table):
    text = table("benchmark_log", "--steps 2 --warmup 1 --repeats 1 --calls 2")
    assert len(re.findall(r"\| (?:tensor|number|metric object), [\w, ]+ \| [\d.]+ \| [\d.]+ \|", text)) == 9
    assert "medians of 1 interleaved rounds of 2 steps; torch" in text
