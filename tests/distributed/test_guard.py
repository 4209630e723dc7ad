"""A loss is NaN on one of two ranks: the other rank neither waits forever nor differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import test_ddp
from tests.warm_python import WarmPython

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


@pytest.fixture(scope="module")
def ranks(python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("guard")
    return test_ddp.load(test_ddp.run(python, folder, "own", script=Path(__file__).with_name("guard_worker.py"))[1])


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
    assert "(step 2, batch 2 of rank 1)" in one["said"]
