"""The benchmark runs, and writes its table."""

from __future__ import annotations

import logging
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.simulated_cuda.device import Stream

ROOT = Path(__file__).parents[2]


def test_writes_its_table(tmp_path, python):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- benchmark_overhead: start -->\nold\n<!-- benchmark_overhead: end -->\nafter\n")
    words = ["--steps", "10", "--warmup", "5", "--repeats", "1", "--precision", "16-mixed", "--mode", "log and bar"]
    command = [str(ROOT / "scripts" / "benchmark_overhead"), *words, "--markdown", str(page)]
    done = python.run(*command, env={**os.environ, "AMP_BENCH": "1"})  # stay in this environment
    assert done.returncode == 0, done.stderr[-2000:]
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert re.search(r"\| 16-mixed \| log and bar \| \d+ \| [+-]\d+ \| [+-]\d+ \| [+-]\d+ \|", text)
    assert "medians of 1 interleaved rounds of 10 steps, wall time; torch" in text


def test_on_a_gpu(cuda, monkeypatch, capsys):
    words = ["--device", "cuda", "--steps", "10", "--warmup", "5", "--repeats", "1", "--precision", "16-mixed"]
    monkeypatch.setattr(sys, "argv", ["benchmark_overhead", *words, "--only", "ours"])  # Fabric moves weights in place
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    monkeypatch.setenv("AMP_BENCH", "1")  # stay in this process
    monkeypatch.setattr(logging, "disable", lambda level: None)  # for other tests
    with cuda.watch() as seen:
        runpy.run_path(str(ROOT / "scripts" / "benchmark_overhead"), run_name="__main__")
    table = capsys.readouterr().out
    assert len(re.findall(r"\| 16-mixed \| [a-zA-Z. ]+ \| \d+ \| [+-]\d+ \|", table)) == 2 * 3
    assert "10 steps, events on a Simulated H100; torch" in table
    assert "_amp_update_scale_" in seen.kernels


def test_with_workers(tmp_path, python):
    page = tmp_path / "page.md"
    page.write_text("<!-- benchmark_overhead workers: start -->\n<!-- benchmark_overhead workers: end -->\n")
    words = ["--mode", "workers", "--steps", "10", "--warmup", "5", "--repeats", "1", "--precision", "32-true"]
    command = [str(ROOT / "scripts" / "benchmark_overhead"), *words, "--only", "ours", "--clock", "all"]
    done = python.run(*command, "--markdown", str(page), env={**os.environ, "AMP_BENCH": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    text = page.read_text()
    assert "| precision | workers | augmentation | hand-written (us) | ours (us) |\n|---|---|---|---|---|\n" in text
    rows = re.findall(r"\| 32-true \| (\d) \| (none|random) \| \d+ \| [+-]\d+ \|\n", text)
    assert rows == [(str(workers), which) for which in ("none", "random") for workers in (0, 1, 2)]
    assert "10 steps, processor time of all processes; torch" in text


@pytest.mark.whole
def test_batches_from_the_host_to_a_gpu(cuda, monkeypatch, capsys):
    words = ["--device", "cuda", "--steps", "4", "--warmup", "2", "--repeats", "1", "--precision", "bf16-mixed"]
    modes = ["from the host", "from the host, not prefetched"]
    words += ["--mode", *modes, "--host-rows", "512", "--only", "ours"]
    monkeypatch.setattr(sys, "argv", ["benchmark_overhead", *words])
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    monkeypatch.setenv("AMP_BENCH", "1")  # stay in this process
    monkeypatch.setattr(logging, "disable", lambda level: None)  # for other tests
    monkeypatch.setattr(Stream, "query", lambda self: False)  # the device is behind the host
    with cuda.watch() as seen:
        runpy.run_path(str(ROOT / "scripts" / "benchmark_overhead"), run_name="__main__")
    table = capsys.readouterr().out
    for mode in modes:
        assert len(re.findall(rf"\| bf16-mixed \| {mode} \| \d+ \| [+-]\d+ \|", table)) == 2
    large = [copy.stream > 0 for copy in seen.copies if copy.nbytes == 512 * 1024 * 4]
    assert large == [*[True] * 2 * 7, *[False] * 2 * 7]  # by hand and with us


_VALGRIND = """#!/bin/sh
for word; do
    case $word in
        --callgrind-out-file=*) file=${word#*=}; shift ;;
        -*) shift ;;
        *) break ;;
    esac
done
echo 0 > "$file.dumps"
exec "$@"
"""
_CALLGRIND_CONTROL = """#!/bin/sh
echo "$1" >> "$WORDS"
if [ "$1" = --dump ]; then
    number=$(($(cat "$CALLGRIND_FOLDER/counts.dumps") + 1))
    echo $number > "$CALLGRIND_FOLDER/counts.dumps"
    echo "totals: ${number}0000000" > "$CALLGRIND_FOLDER/counts.$number"
fi
"""


def test_instructions(tmp_path, python):
    """Emulate Valgrind: the n-th count is 10 million times n."""
    for name, program in {"valgrind": _VALGRIND, "callgrind_control": _CALLGRIND_CONTROL}.items():
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    page = tmp_path / "page.md"
    page.write_text("<!-- benchmark_overhead instructions: start -->\n<!-- benchmark_overhead instructions: end -->\n")
    words = ["--clock", "instructions", "--steps", "10", "--warmup", "5", "--repeats", "1", "--precision", "32-true"]
    words += ["--mode", "plain", "metric in validation", "--only", "ours", "--markdown", str(page)]
    command = [str(ROOT / "scripts" / "benchmark_overhead"), *words]
    own = {"AMP_BENCH": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}", "WORDS": str(tmp_path / "words")}
    done = python.run(*command, env={**os.environ, **own})
    assert done.returncode == 0, done.stderr[-2000:]
    text = page.read_text()
    assert "hand-written (thousand instructions) | ours (thousand instructions) |\n" in text
    assert "| 32-true | plain | 1000 | +1000 |\n| 32-true | metric in validation | 3000 | +1000 |\n" in text
    assert "`scripts/benchmark_overhead --clock instructions`" in text
    assert (tmp_path / "words").read_text().split() == ["--instr=on", "--instr=off", "--dump"] * 4


def test_instructions_without_valgrind(python):
    command = [str(ROOT / "scripts" / "benchmark_overhead"), "--clock", "instructions"]
    done = python.run(*command, env={**os.environ, "AMP_BENCH": "1", "PATH": "/nowhere"})
    assert done.returncode == 1
    assert "expected Valgrind on this machine" in done.stderr


def test_additional_benchmarks(tmp_path, python):
    page = tmp_path / "page.md"
    page.write_text("<!-- benchmark_overhead further: start -->\n<!-- benchmark_overhead further: end -->\n")
    words = ["--mode", "defaults", "metric in validation", "--steps", "10", "--warmup", "5", "--repeats", "1"]
    command = [str(ROOT / "scripts" / "benchmark_overhead"), *words, "--precision", "bf16-mixed"]
    done = python.run(*command, "--markdown", str(page), env={**os.environ, "AMP_BENCH": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    rows = re.findall(r"\| bf16-mixed \| ([a-z ]+) \| \d+ \| [+-]\d+ \| [+-]\d+ \| [+-]\d+ \|\n", page.read_text())
    assert rows == ["defaults", "metric in validation"]


def test_mode_from_the_host_is_refused_on_a_cpu(python):
    command = [str(ROOT / "scripts" / "benchmark_overhead"), "--mode", "from the host"]
    done = python.run(*command, env={**os.environ, "AMP_BENCH": "1"})
    assert done.returncode == 2
    assert "give --device cuda with that mode" in done.stderr
