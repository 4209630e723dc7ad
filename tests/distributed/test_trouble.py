"""Failures on several ranks: one does not join a collective; the loss of one spikes."""

import re
import time
import warnings
from datetime import timedelta

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from tests.distributed.worker import Regression, samples
from tests.support import loader_of, make_trainer, native_fp16, needs_deepspeed, needs_fsdp2
from trainer import CheckpointFiles, DeepSpeedStrategy
from trainer.callbacks import RollBackOnLossSpike
from trainer.distributed import stalls
from trainer.distributed.stalls import RankState, missing_ranks
from trainer.record.run_recorder import RunRecorder


class Stuck(nn.Module):
    """Blocks once, on one rank, until the file reports its position."""

    def __init__(self, rank, file):
        super().__init__()
        self.rank, self.file, self.calls = rank, file, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3 and torch.distributed.get_rank() == self.rank:
            for _ in range(600):
                if self.file.exists() and "net.1" in self.file.read_text():
                    break
                time.sleep(0.1)
        return x


def stall(folder, engine, rank, timeout):
    """Return the output of this rank, and a weight at the end."""
    output = []
    before, stalls.write_stderr = stalls.write_stderr, output.append
    module = Regression()
    module.net.insert(1, Stuck(rank, folder / "stall.txt"))
    strategy = DDPStrategy if engine == "ddp" else DeepSpeedStrategy
    try:
        trainer = make_trainer(
            folder, devices=torch.distributed.get_world_size(), strategy=strategy(timeout=timedelta(seconds=timeout)),
            limit_val_batches=0, callbacks=[RunRecorder(dirpath=folder)],
        )  # fmt: skip
        trainer.fit(module, DataLoader(samples(), batch_size=2))
    finally:
        stalls.write_stderr = before
    return output, float(module.net[0].weight[0, 0].detach())


def spike(folder, engine, left_out):
    """Return the roll-back, and the weights and the step at the end. ``left_out`` omits these batches and the spike."""
    rank, callbacks = torch.distributed.get_rank(), []
    generator = torch.Generator().manual_seed(rank)
    batches = [[torch.randn(4, 6, generator=generator), torch.randn(4, 2, generator=generator)] for _ in range(16)]
    if left_out is None:
        batches[11][1] += 30.0 * rank  # the other rank has no spike
        callbacks = [RollBackOnLossSpike(threshold=5.0, window=4)]
    else:
        del batches[slice(*left_out)]
    saver = ModelCheckpoint(folder / f"{engine}_{left_out}", every_n_train_steps=4, save_top_k=-1, filename="{step}")
    module, precision = Regression(), "32-true" if engine == "fsdp" else native_fp16(init_scale=64.0, growth_interval=3)
    trainer = make_trainer(
        folder, devices=torch.distributed.get_world_size(), strategy=engine, callbacks=[*callbacks, saver],
        precision=precision, plugins=[CheckpointFiles(sharded=engine == "fsdp")], use_distributed_sampler=False,
        enable_checkpointing=True,
    )  # fmt: skip
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(module, loader_of(batches))
    rollbacks = callbacks[0].rollbacks if callbacks else []
    return rollbacks, [parameter.detach().clone() for parameter in module.parameters()], trainer.global_step


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=needs_fsdp2)])
def test_all_ranks_roll_back_when_the_loss_of_one_spikes(ranks, tmp_path, engine):
    """Under DDP in 16-mixed with its scaler, and under FSDP from a sharded checkpoint."""
    found = ranks.call(spike, tmp_path, engine, None)
    expected = ranks.call(spike, tmp_path, engine, (8, 12))
    for (rollbacks, *results), (_, *without) in zip(found, expected, strict=True):
        (rollback,) = rollbacks
        assert [rollback[key] for key in ("step", "to_step", "first", "last")] == [11, 8, [0, 8], [0, 11]]
        assert results[1] == 12
        torch.testing.assert_close(results, without, rtol=0, atol=0)


@pytest.mark.parametrize("engine", ["ddp", pytest.param("deepspeed", marks=[needs_deepspeed, pytest.mark.nightly])])
def test_missing_rank_is_named_with_its_layer(request, tmp_path, engine):
    ranks = request.getfixturevalue("ranks_with_deepspeed" if engine == "deepspeed" else "ranks")
    (output, weight), (other_output, other_weight) = ranks.call(stall, tmp_path, engine, 1, 9.0)
    # the set-up may take longer than the timeout, too
    (text,) = [one for one in output + other_output if "net.1" in one]
    first, late, *stack, other, file = text.splitlines()
    assert re.fullmatch(r"The run has not moved for \d+ s\.", first)
    assert late.startswith("Rank 1 (process ")
    assert "has not reached the collective of the others. It has been in the forward pass, in net.1 (Stuck), " in late
    assert "at step 2, " in late
    assert re.search(r"batch_idx 2 of epoch 0 \(train_dataloader\), for \d+ s; the last collective", late)
    assert stack[-1] == "    time.sleep(0.1)"
    assert other.startswith("Rank 0: in ")
    assert ", waiting in " in other or "the backward pass" in other
    assert file == f"The stacks of all are in {tmp_path / 'stall.txt'}."
    stacks = (tmp_path / "stall.txt").read_text()
    assert all(part in stacks for part in ("training_step", "Rank 0:\n", "Rank 1:\n"))
    assert weight == other_weight


def state_of(rank, **begun):
    return RankState(rank, "node", rank, 600.0, "", "", {group: (number, "") for group, number in begun.items()}, [])


def test_blamed_rank_is_the_one_that_waits_for_no_other():
    # rank 3 does not join its shard group with rank 2, so that rank 2 does not join its replica group with rank 0
    assert missing_ranks(
        [state_of(0, copies=6), state_of(1), state_of(2, shards=11, copies=5), state_of(3, shards=10)]
    ) == [3]
    assert missing_ranks([state_of(rank, world=121 - (rank == 700)) for rank in range(1024)]) == [700]
    assert missing_ranks([state_of(rank, world=121) for rank in range(8)]) == []
    # each rank has started a collective that the other has not: two orders
    assert missing_ranks([state_of(0, one=2, other=1), state_of(1, one=1, other=2)]) == [0, 1]
