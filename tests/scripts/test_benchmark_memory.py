"""The benchmark writes its table. The peak memory of our step is that by hand, and a copy of small weights."""

import re


def test_writes_its_table(table):
    sizes = "--width 256 --heads 4 --layers 1 --context 64 --vocabulary 256 --sequences 2 64"
    text = table("benchmark_memory", sizes)
    rows = re.findall(r"^\| (\d+) x 64 \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert [row[0] for row in rows] == ["2", "64"]
    for _, hand, ours, late, lightnings in rows:
        assert float(hand) <= float(ours) <= float(hand) + 2**22 / 2**30  # OverflowReport keeps the 0.9 million weights
        assert float(late) > float(hand)
        assert float(lightnings) > float(hand)
