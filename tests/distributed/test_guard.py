"""Memory runs out, or a loss is NaN, on one of two processes: the other one neither waits for ever nor differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import test_ddp
from tests.warm_python import WarmPython

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*does not have many workers")]


@pytest.fixture(scope="module")
def ranks(python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("guard")
    return test_ddp.load(test_ddp.run(python, folder, "own", script=Path(__file__).with_name("guard_worker.py"))[1])


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("32-true", 1e-6), ("window", 1e-6), ("16-mixed", 2e-3), ("weighted", 2e-3), ("weighted window", 2e-3)],
)
def test_one_rank_splits_and_both_learn_the_same(
    ranks: list[dict[str, Any]], name: str, tolerance: float, phase: str
) -> None:
    one, other = (rank[f"{name} {phase}"] for rank in ranks)
    assert one["sizes"] == [4] * 10
    assert other["sizes"] == [4, 2, *[1] * 40]
    for key, value in one["weights"].items():
        assert torch.equal(value, other["weights"][key])
        torch.testing.assert_close(value, ranks[0][name]["weights"][key], rtol=0, atol=tolerance)
    for key in ("global_step", "outcomes"):
        assert one[key] == other[key] == ranks[0][name][key]


def test_both_skip_the_same_step(ranks: list[dict[str, Any]]) -> None:
    one, other = (rank["skip"] for rank in ranks)
    assert one["outcomes"] == other["outcomes"] == [False, False, True, False, False] * 2
    assert one["skipped_steps"] == 2
    for key, value in one["weights"].items():
        assert value.isfinite().all()
        assert torch.equal(value, other["weights"][key])


def test_both_stop_and_name_the_rank(ranks: list[dict[str, Any]]) -> None:
    one, other = (rank["stop"] for rank in ranks)
    assert one == other
    assert (one["step"], one["batch_idx"], one["finite"]) == (2, 2, True)
    assert "batch_idx 2, on rank 1 of 2, loss nan" in one["said"]
