"""Collectives and bytes of a step on several ranks, which are independent of the machine."""

from __future__ import annotations

from typing import Any

import pytest

from scripts import _scale
from tests.distributed.ranks import Ranks
from tests.support import needs_fsdp2

pytestmark = [pytest.mark.whole, needs_fsdp2]
LAYERS = 4


@pytest.fixture(scope="module")
def counted(ranks: Ranks) -> dict[Any, list[dict[str, Any]]]:
    return {
        key: ranks.call(_scale.count, *key)
        for key in (("ddp", "16-mixed", True), ("fsdp", "32-true", False), ("fsdp", "16-mixed", True))
    }


def test_sharded_step_exchanges_once_to_unscale_and_once_to_clip(counted: dict[Any, Any]) -> None:
    for rank in counted["fsdp", "16-mixed", True]:
        assert rank["during"] == {"unscale_": 1, "clip_": 1, "step": 0, "update": 0}
    for rank in counted["fsdp", "32-true", False]:
        assert rank["during"] == {"unscale_": 0, "step": 0, "update": 0}
    for rank in counted["ddp", "16-mixed", True]:
        assert rank["during"] == dict.fromkeys(("unscale_", "clip_", "step", "update"), 0)


def test_collectives_of_a_step_equal_a_hand_written_loop(counted: dict[Any, Any]) -> None:
    """In addition, a window all-reduces its weights. The norm is gathered instead of reduced."""
    for rank in counted["fsdp", "32-true", False]:
        expected = {"all-gather": 2 * LAYERS + 1, "reduce-scatter": LAYERS + 1}  # the root is gathered once
        assert rank["by hand"] == expected
        assert rank["counts"] == {**expected, "all-reduce": 1}
    for rank in counted["fsdp", "16-mixed", True]:
        assert sum(rank["counts"].values()) == sum(rank["by hand"].values()) + 1
    for rank in counted["ddp", "16-mixed", True]:
        assert rank["by hand"] == {"all-reduce": 1}
        assert rank["counts"] == {"all-reduce": 2}


def test_each_of_two_processes_has_half_of_the_parameters_the_gradients_and_the_state(counted: dict[Any, Any]) -> None:
    whole = counted["ddp", "16-mixed", True][0]["state"]
    assert whole["optimizer"] == 2 * whole["parameters"] == 2 * whole["gradients"] > 0
    for rank in counted["fsdp", "16-mixed", True]:
        assert {name: 2 * number for name, number in rank["state"].items()} == whole
