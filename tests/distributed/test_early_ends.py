"""If the length of dataloaders is an estimate or unknown, all ranks end an epoch together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.ranks import RankError, Ranks
from tests.support import needs_fsdp2

FIT = "tests.distributed.early_ends:fit"


@pytest.mark.parametrize(
    ("engine", "counts", "window", "length"),
    [
        ("ddp", [[5, 5], [5, 5]], 1, 8),
        ("ddp", [[6, 5], [6, 5]], 4, 8),
        ("ddp", [[2, 7], [6, 3]], 2, 8),
        ("ddp", [[8, 2], [3, 1]], 2, 8),
        ("ddp", [[2, 3], [5, 3]], 1, None),
        ("ddp", [[2, 7], [6, 3]], 2, None),
        pytest.param("fsdp", [[6, 5], [6, 5]], 4, 8, marks=needs_fsdp2),
        pytest.param("fsdp", [[2, 7], [6, 3]], 2, 8, marks=needs_fsdp2),
        pytest.param("fsdp", [[2, 7], [6, 3]], 2, None, marks=needs_fsdp2),
    ],
)
def test_all_ranks_end_with_the_last_batch_of_any(
    ranks: Ranks, engine: str, counts: list[list[int]], window: int, length: int | None
) -> None:
    for mine, exact in zip(
        ranks.call(FIT, engine, length, counts, window), ranks.call(FIT, engine, "exact", counts, window), strict=True
    ):
        weights, expected = mine.pop("weights"), exact.pop("weights")
        assert mine == exact
        for name, value in expected.items():
            assert torch.equal(weights[name], value), name


@pytest.mark.parametrize(
    ("length", "module", "named"),
    [
        (8, ("SGD", True), "Manual optimization"),
        (None, ("LBFGS",), "an optimizer that evaluates the loss itself"),
        (None, ("SGD", False, "metric"), "The metric 'mean', with dist_sync_on_step=True,"),
    ],
)
def test_runs_that_need_as_many_batches_in_each_process(
    ranks: Ranks, length: int | None, module: Any, named: str
) -> None:
    with pytest.raises(RankError, match=rf"A process has 2 training batches.*{named}.*limit_train_batches=2\)"):
        ranks.call(FIT, "ddp", length, [[2], [5]], 1, module)
    for rank in ranks.call(FIT, "ddp", length, [[3], [3]], 1, module):
        assert (rank["counts"][-1], len(rank["validations"])) == (3, 1)


@pytest.mark.parametrize("length", [8, None])
def test_epoch_without_a_batch_on_any_rank_is_an_error_on_all(ranks: Ranks, length: int | None) -> None:
    with pytest.raises(RankError) as error:
        ranks.call(FIT, "ddp", length, [[0], [0]])
    assert str(error.value).count("yielded no batch in epoch 0. There is nothing to train on") >= 2
    with pytest.raises(RankError) as error:
        ranks.call(FIT, "ddp", length, [[2, 2], [2, 0]])
    assert str(error.value).count("A process has no training batch in this epoch, and others have some.") >= 2


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=needs_fsdp2)])
def test_window_that_stops_early_is_used(ranks: Ranks, engine: str) -> None:
    stopped = ranks.call(FIT, engine, "exact", [[8], [8]], 4, (), 5)
    for mine, whole in zip(stopped, ranks.call(FIT, engine, "exact", [[6], [6]], 4), strict=True):
        assert mine["counts"] == whole["counts"] == (2, 2, 6)
        for name in ("net.0.weight", "net.1.weight", "net.2.bias"):  # DDP makes buffers equal once more
            assert torch.equal(mine["weights"][name], whole["weights"][name]), name
