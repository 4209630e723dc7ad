"""Collectives and bytes of a step on several ranks, which are independent of the machine."""

import pytest

from scripts import _scale
from tests.support import needs_fsdp2

pytestmark = [pytest.mark.whole, needs_fsdp2]
LAYERS = 4


def test_sharded_step_in_float32_exchanges_nothing_to_update_the_weights(ranks):
    """In 16-mixed: tests/distributed/test_fake_ranks.py. In addition to the loop by hand, a window sums its weights."""
    for rank in ranks.call(_scale.count, "fsdp", "32-true", False):
        assert rank["during"] == {"unscale_": 0, "step": 0, "update": 0}
        expected = {"all-gather": 2 * LAYERS + 1, "reduce-scatter": LAYERS + 1}  # the root is gathered once
        assert rank["by hand"] == expected
        assert rank["counts"] == {**expected, "all-reduce": 1}


def test_replicated_step_exchanges_only_its_gradients(ranks):
    for rank in ranks.call(_scale.count, "ddp", "16-mixed", True):
        assert rank["during"] == dict.fromkeys(("unscale_", "clip_", "step", "update"), 0)
        assert rank["by hand"] == {"all-reduce": 1}
        assert rank["counts"] == {"all-reduce": 2}
        state = rank["state"]
        assert state["optimizer"] == 2 * state["parameters"] == 2 * state["gradients"] > 0
