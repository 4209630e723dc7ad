"""Failures on several ranks: one does not join a collective; the loss of one spikes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.distributed.ranks import Ranks
from tests.support import needs_deepspeed, needs_fsdp2
from trainer.engine.stalls import Place, missing_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=needs_fsdp2)])
def test_all_ranks_roll_back_when_the_loss_of_one_spikes(ranks: Ranks, tmp_path: Path, engine: str) -> None:
    """Under DDP in 16-mixed with its scaler, and under FSDP from a sharded checkpoint."""
    found = ranks.call("tests.distributed.trouble_worker:spike", tmp_path, engine, None)
    oracle = ranks.call("tests.distributed.trouble_worker:spike", tmp_path, engine, (8, 12))
    for (done, weights, step), (nothing, without, steps) in zip(found, oracle, strict=True):
        assert [(one["step"], one["to_step"], one["first"], one["last"]) for one in done] == [(11, 8, [0, 8], [0, 11])]
        assert nothing == []
        assert step == steps == 12
        for mine, other in zip(weights, without, strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("engine", ["ddp", pytest.param("deepspeed", marks=needs_deepspeed)])
def test_missing_rank_is_named_with_its_layer(ranks: Ranks, tmp_path: Path, engine: str) -> None:
    (said, weight), (more, same) = ranks.call("tests.distributed.trouble_worker:stall", tmp_path, engine, 1, 9.0)
    (text,) = [one for one in said + more if "net.1" in one]  # a set-up may take longer than the patience, too
    first, late, *stack, other, file = text.splitlines()
    assert re.fullmatch(r"The run has not moved for \d+ s\.", first)
    assert late.startswith("Rank 1 (process ")
    assert (
        "has not reached the collective of the others. It is in the forward pass, in net.1 (Stuck), at step 2, " in late
    )
    assert re.search(r"batch_idx 2 of epoch 0 \(train_dataloader\), since \d+ s; the last collective", late)
    assert stack[-1] == "    time.sleep(0.1)"
    assert other.startswith("Rank 0: it is in ")
    assert ", waiting in " in other or "the backward pass" in other
    assert file == f"The stacks of all are in {tmp_path / 'stall.txt'}."
    stacks = (tmp_path / "stall.txt").read_text()
    assert stacks.count("training_step") >= 1
    assert "Rank 0:\n" in stacks
    assert "Rank 1:\n" in stacks
    assert weight == same


def place(rank: int, **begun: int) -> Place:
    return Place(rank, "node", rank, 600.0, "", "", {group: (number, "") for group, number in begun.items()}, [])


def test_blamed_rank_is_the_one_that_waits_for_no_other() -> None:
    # rank 3 does not join its shard group with rank 2, so that rank 2 does not join its replica group with rank 0
    assert missing_ranks([place(0, copies=6), place(1), place(2, shards=11, copies=5), place(3, shards=10)]) == [3]
    assert missing_ranks([place(rank, world=121 - (rank == 700)) for rank in range(1024)]) == [700]
    assert missing_ranks([place(rank, world=121) for rank in range(8)]) == []
    # each rank has started a collective that the other has not: two orders
    assert missing_ranks([place(0, one=2, other=1), place(1, one=1, other=2)]) == [0, 1]
