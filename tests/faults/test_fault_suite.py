"""A part of ``scripts/fault_suite``, and a check that its comparison detects differences."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from _faults import bench as tools
from _faults import cases
from _faults.bench import Bench
from _faults.cases import CASES, EACH, EVERYTHING, at_each, run_case
from _faults.scoreboard import Outcome, Row, markdown
from _faults.training import Setup, differences

from tests.support import needs_fsdp2, tiered
from tests.warm_python import WarmPython

ROOT = Path(__file__).parents[2]

FAST = ("sigkill", "disk-full", "worker-killed", "two-runs", "cli-sigterm")
SLOW = ("bit-flip", "unwritable", "truncated", "sigterm", "nan", "second-signal")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, python: WarmPython) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("faults"), kills=2, python=str(python.executable))
    yield bench
    bench.close()


@pytest.mark.parametrize(
    "name", [*tiered(FAST, quick=["sigkill"]), *(pytest.param(name, marks=pytest.mark.nightly) for name in SLOW)]
)
def test_promised_outcomes(bench, name, monkeypatch):
    monkeypatch.setattr(cases, "EVERYTHING", cases.SMALL)  # fewer batches in `sigkill`
    outcome = run_case(CASES[name], bench, "ours")
    assert outcome.good, str(outcome)


@needs_fsdp2
@pytest.mark.nightly  # tests/distributed/test_nodes.py kills a process of two nodes
def test_torchrun_processes_are_killed_the_requested_number_of_times(bench):
    outcome = run_case(CASES["torchrun-kills-sharded"], bench, "ours")
    assert outcome.word == "exact", str(outcome)
    assert outcome.detail.startswith("2 kills in ")


def test_exact_from_the_middle(bench):
    setup = replace(EVERYTHING, batches=8, epochs=2, overflows=(1, 3, 11), validate_every=3)
    outcome = at_each("everything", setup, every=7)(bench, "ours")
    assert outcome.word == "exact", str(outcome)


def test_another_training_is_seen(bench):
    setup, folder = replace(EACH, batches=3, epochs=1), bench.new_folder("other")
    reference = bench.reference("ours", setup=setup)
    assert bench.train("ours", folder, setup=replace(setup, dropout=0.3), start=None).wait(60) == 0
    found = bench.differences(folder, reference)
    assert {"losses", "rows of metrics.csv", "metrics.loss", "weights.last.bias"} <= set(found)
    assert "samples" not in found
    assert bench.verdict(folder, reference).word == "inexact"
    assert bench.verdict(reference.folder, reference).word == "exact"
    assert bench.verdict(bench.new_folder("empty"), reference) == Outcome("lost", "no result")


def test_run_that_hangs_is_an_outcome(bench):
    run = bench.train("ours", bench.new_folder("slow"), setup=Setup(batches=3, pace=60.0))
    with pytest.raises(tools.HungError):
        run.wait(2)
    assert run.status == -9


def test_script(tmp_path, python):
    page, table = tmp_path / "page.md", tmp_path / "rows.json"
    page.write_text("<!-- fault_suite: start -->\nold\n<!-- fault_suite: end -->\n")
    words = ["--only", "unwritable", "--folder", tmp_path, "--markdown", page, "--json", table]
    script = str(ROOT / "scripts" / "fault_suite")
    done = python.run(script, *map(str, words), env={**tools.os.environ, "AMP_BENCH": "1"})
    assert done.returncode == 0, done.stderr
    assert "| The folder cannot be written | **refused**: before the first batch |" in page.read_text()
    (row,) = json.loads(table.read_text())["rows"]
    assert (row["name"], row["outcomes"]["ours"]["word"]) == ("unwritable", "refused")


# --- the harness ------------------------------------------------------------------------------------------------------


def test_differences_are_those_of_bits():
    one = {"a": torch.tensor([1.0, torch.nan]), "b": [1, {"c": "x"}], "d": float("nan")}
    assert differences(one, {**one, "a": one["a"].clone()}) == []
    assert differences(one, {**one, "a": torch.tensor([1.0000001, torch.nan])}) == [".a"]
    assert differences(torch.tensor(0.0), torch.tensor(-0.0)) == [""]
    assert differences(torch.tensor(0), torch.tensor(0.0)) == [""]
    assert differences(one, {**one, "b": [1, {"c": "y"}]}) == [".b.1.c"]
    assert differences(one, {"a": one["a"], "b": [1]}) == [".b", ".d"]


@pytest.mark.parametrize(
    ("detail", "shown"),
    [
        ("16 of 16, such as 001-a-batch: other weights, losses", "16 of 16"),
        ("7 of 13 runs (14 kills), such as: other metrics", "7 of 13 runs (14 kills)"),
        ("ends with 0; other weights, averages, samples", "ends with 0; other weights, ..."),
        ("other rows of metrics.csv, samples", "other rows of metrics.csv, samples"),
    ],
)
def test_cells_have_no_examples_and_one_of_many_differences(detail, shown):
    row = Row("name", "title", {"ours": Outcome("inexact", detail)})
    assert markdown([row], ["ours"]).splitlines()[-1] == f"| title | inexact: {shown} |"
