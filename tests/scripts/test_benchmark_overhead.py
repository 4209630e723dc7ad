"""The benchmark runs, and writes its table."""

import logging
import re
import runpy
import sys

from tests.scripts.conftest import SCRIPTS


def test_writes_its_table(table):
    words = ["--steps", "10", "--warmup", "5", "--repeats", "1", "--precision", "16-mixed", "--mode", "log and bar"]
    text = table("benchmark_overhead", words)
    assert re.search(r"\| 16-mixed \| log and bar \| \d+ \| [+-]\d+ \| [+-]\d+ \| [+-]\d+ \|", text)
    assert "lower quartiles of 1 interleaved rounds of 10 steps, wall time; torch" in text


def test_on_a_gpu(cuda, monkeypatch, capsys):
    given = "--device cuda --repeats 1 --only ours --steps 10 --warmup 5 --precision 16-mixed"  # Fabric moves in place
    monkeypatch.setattr(sys, "argv", ["benchmark_overhead", *given.split()])
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    monkeypatch.setenv("AMP_BENCH", "1")  # stay in this process
    monkeypatch.setattr(logging, "disable", lambda level: None)  # for other tests
    with cuda.watch() as seen:
        runpy.run_path(str(SCRIPTS / "benchmark_overhead"), run_name="__main__")
    table = capsys.readouterr().out
    assert len(re.findall(r"\| 16-mixed \| [a-zA-Z. ]+ \| \d+ \| [+-]\d+ \|", table)) == 2 * 3
    assert "10 steps, events on a Simulated H100; torch" in table
    assert "_amp_update_scale_" in seen.kernels
