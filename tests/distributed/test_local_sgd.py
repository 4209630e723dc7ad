"""Post-local SGD (``DDPStrategy(model_averaging_period=...)``) averages weights as torch's own classes do."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.local_sgd import LocalSGD
from tests.distributed.ranks import Ranks


@pytest.mark.parametrize(
    "setup",
    [
        LocalSGD(),
        LocalSGD(warmup=0, period=4, window=2),
        LocalSGD("bf16-mixed", fused=True),
        LocalSGD("16-mixed", window=2, overflows=((1, 5),)),  # on one process: the other one has to skip, too
        LocalSGD("16-mixed", fused=True, overflows=((0, 4), (1, 4), (1, 7))),
        LocalSGD("16-mixed", manual=True, overflows=((0, 1), (1, 6))),
        LocalSGD(manual=True, fused=True),
    ],
    ids=str,
)
def test_averaged_weights_equal_those_of_a_hand_written_loop(ranks: Ranks, setup: LocalSGD) -> None:
    expected = ranks.call("tests.distributed.local_sgd:by_hand", setup)
    found = ranks.call("tests.distributed.local_sgd:fit", setup)
    for mine, by_hand in zip(found, expected, strict=True):
        assert (mine["scale"], mine["skipped"]) == (by_hand["scale"], by_hand["skipped"])
        assert all(torch.equal(a, b) for a, b in zip(mine["weights"], by_hand["weights"], strict=True))
    assert found[0]["skipped"] == len({batch for _, batch in setup.overflows})
    same = [torch.equal(a, b) for a, b in zip(found[0]["weights"], found[1]["weights"], strict=True)]
    steps = setup.batches // setup.window - found[0]["skipped"] - 1  # the number of the last step that happened
    assert all(same) == ((steps - setup.warmup) % setup.period == 0)
