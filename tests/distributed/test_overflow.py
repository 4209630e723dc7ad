"""Overflow reports on two ranks if one overflows, with a layer that synchronizes ranks in both passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import test_ddp
from tests.warm_python import WarmPython

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


@pytest.fixture(scope="module")
def launched(python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("overflow")
    return test_ddp.run(python, folder, "own", script=Path(__file__).with_name("overflow_worker.py"))


@pytest.fixture(scope="module")
def ranks(launched: tuple[str, Path]) -> list[dict[str, Any]]:
    return test_ddp.load(launched[1])


def test_all_ranks_report_the_rank_that_overflowed(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        (report,) = rank["first"]["reports"]
        assert (report["step"], report["rank"], report["batch_idx"], report["window"]) == (0, 1, 1, 2)
        assert (report["module"], report["kind"]) == ("net.3", "forward")
        assert (report["fails"], report["largest_scale"], report["error"]) == (True, 0.0, "")
    assert ranks[0]["first"]["reports"] == ranks[1]["first"]["reports"]


def test_batch_of_a_window_is_found_on_the_other_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        (report,) = rank["window"]["reports"]
        assert (report["step"], report["rank"]) == (0, 1)
        assert (report["batch_idx"], report["position"], report["window"]) == (1, 1, 2)
        assert (report["module"], report["error"]) == ("net.3", "")


def test_step_that_does_not_fail(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        (report,) = rank["healthy"]["reports"]
        assert (report["step"], report["fails"], report["error"]) == (1, False, "")
        assert report["largest_scale"] > 1024.0


@pytest.mark.parametrize(("with_reports", "without"), [("window", "without"), ("healthy", "healthy without")])
def test_run_is_the_same(ranks: list[dict[str, Any]], with_reports: str, without: str) -> None:
    for rank in ranks:
        one, other = rank[with_reports], rank[without]
        for name, value in one["weights"].items():
            assert torch.equal(value, other["weights"][name])
        assert str(one["metrics"]) == str(other["metrics"])  # the loss is nan
        assert (one["outcomes"], one["scale"]) == (other["outcomes"], other["scale"])


def test_one_rank_prints_and_writes(launched: tuple[str, Path]) -> None:
    output, folder = launched
    assert output.count("Verdict: forward pass overflows in 16 bits (step 0, batch 1 of rank 1)") >= 1
    text = (folder / "diagnosis_step_0.md").read_text()
    assert "rank 1 |" in text


def test_all_ranks_stop_when_the_scale_collapses(launched: tuple[str, Path], ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["collapse"].startswith("4 optimizer steps in a row were skipped, from step 0 to step 3")
        assert "Verdict: forward pass overflows in 16 bits" in rank["collapse"]
        assert "'net.3' (Overflow)" in rank["collapse"]
    assert (launched[1] / "checkpoints" / "before_collapse.ckpt").exists()
