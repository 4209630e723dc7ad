"""Signals to one or both of two ranks: they stop at the same step, and the saved checkpoint is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_ddp import load, run
from tests.warm_python import WarmPython

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


@pytest.fixture(scope="module")
def ranks(python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("interrupted")
    run(python, folder, "own", script=Path(__file__).with_name("interruption_worker.py"), children=True)
    return load(folder)


@pytest.mark.parametrize("name", ["slow 0", "slow 1"])
def test_signal_to_one_rank_stops_both_at_the_batch_after_it(ranks: list[dict[str, Any]], name: str) -> None:
    assert [rank[name] for rank in ranks] == [{"code": 143, "steps": [3], "saved": 3}] * 2


@pytest.mark.parametrize("name", ["fast 0", "fast 1"])
def test_one_that_comes_between_two_questions_stops_both_soon(ranks: list[dict[str, Any]], name: str) -> None:
    one, other = (rank[name] for rank in ranks)
    assert one == other
    (step,) = one["steps"]
    assert (one["code"], one["saved"]) == (143, step)
    assert 7 <= step <= 10, "an epoch has five batches, and they ask each other before each"


def test_of_two_signals_sigterm_counts_on_both_ranks(ranks: list[dict[str, Any]]) -> None:
    assert [rank["both"] for rank in ranks] == [{"code": 143, "steps": [3], "saved": 3}] * 2


def test_one_during_the_last_batch(ranks: list[dict[str, Any]]) -> None:
    assert [rank["last"] for rank in ranks] == [{"code": 138, "steps": [5], "saved": 5}] * 2


def test_validation_is_broken_off_at_the_same_batch(ranks: list[dict[str, Any]]) -> None:
    assert [rank["validation"] for rank in ranks] == [{"code": 143, "steps": [5], "saved": 5, "validated": 2}] * 2


def test_fit_ends_if_only_one_rank_validates(ranks: list[dict[str, Any]]) -> None:
    expected = {"code": 143, "steps": [5], "saved": 5}
    assert [rank["end of validation"] for rank in ranks] == [expected | {"validated": n} for n in (4, 6)]


def test_without_a_signal_nothing_happens(ranks: list[dict[str, Any]]) -> None:
    assert [rank["nobody"] for rank in ranks] == [{"code": None, "steps": [], "saved": None}] * 2


def test_checkpoint_of_an_interrupted_run_is_resumed(ranks: list[dict[str, Any]]) -> None:
    assert [rank["resumed"] for rank in ranks] == [10, 10]
