"""The benchmark runs, and writes its table."""

from __future__ import annotations

import logging
import re
import runpy
import sys

import pytest

from tests.scripts.conftest import SCRIPTS
from tests.simulated_cuda.device import Stream
from trainer.data import prefetching


def test_writes_its_table(table):
    words = ["--steps", "10", "--warmup", "5", "--repeats", "1", "--precision", "16-mixed", "--mode", "log and bar"]
    text = table("benchmark_overhead", words)
    assert re.search(r"\| 16-mixed \| log and bar \| \d+ \| [+-]\d+ \| [+-]\d+ \| [+-]\d+ \|", text)
    assert "medians of 1 interleaved rounds of 10 steps, wall time; torch" in text


def run_on_a_gpu(cuda, monkeypatch, capsys, *words):
    """Run the script on the simulated device, and return its table and the kernels and copies."""
    given = ["--device", "cuda", "--repeats", "1", "--only", "ours", *words]  # Fabric moves weights in place
    monkeypatch.setattr(sys, "argv", ["benchmark_overhead", *given])
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    monkeypatch.setenv("AMP_BENCH", "1")  # stay in this process
    monkeypatch.setattr(logging, "disable", lambda level: None)  # for other tests
    with cuda.watch() as seen:
        runpy.run_path(str(SCRIPTS / "benchmark_overhead"), run_name="__main__")
    return capsys.readouterr().out, seen


def test_on_a_gpu(cuda, monkeypatch, capsys):
    words = ("--steps", "10", "--warmup", "5", "--precision", "16-mixed")
    table, seen = run_on_a_gpu(cuda, monkeypatch, capsys, *words)
    assert len(re.findall(r"\| 16-mixed \| [a-zA-Z. ]+ \| \d+ \| [+-]\d+ \|", table)) == 2 * 3
    assert "10 steps, events on a Simulated H100; torch" in table
    assert "_amp_update_scale_" in seen.kernels


@pytest.mark.whole
def test_batches_from_the_host_to_a_gpu(cuda, monkeypatch, capsys):
    modes = ["from the host", "from the host, not prefetched"]
    monkeypatch.setattr(Stream, "query", lambda self: False)  # the device is behind the host
    monkeypatch.setattr(prefetching, "MIN_BYTES", 64 * 1024 * 4)
    words = ["--steps", "4", "--warmup", "2", "--precision", "32-true", "--mode", *modes, "--host-rows", "64"]
    table, seen = run_on_a_gpu(cuda, monkeypatch, capsys, *words)
    for mode in modes:
        assert len(re.findall(rf"\| 32-true \| {mode} \| \d+ \| [+-]\d+ \|", table)) == 2
    large = [copy.stream > 0 for copy in seen.copies if copy.nbytes == 64 * 1024 * 4]
    assert large == [*[True] * 2 * 7, *[False] * 2 * 7]  # by hand and with us
