"""A resumed run of two processes against the run that was never interrupted: every value that is reachable, by rank."""

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as distributed
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests import census
from tests.support import needs_fsdp2
from tests.test_census import Case, Points, nested, plateau, train
from trainer import CheckpointFiles
from trainer.callbacks import OverflowReport, ScaleMonitor


class DrawsForItsRank(Sampler):
    """Shuffles with a generator that differs between ranks, and counts epochs."""

    def __init__(self):
        self.epochs = 0
        self.generator = torch.Generator().manual_seed(20 + distributed.get_rank())

    def __len__(self):
        return 8

    def __iter__(self):
        self.epochs += 1
        return iter(torch.randperm(8, generator=self.generator).tolist())


CASES = {
    "ddp, 16-mixed, after an overflow, inside a window": Case(
        loader=lambda: DataLoader(Points(), 2, sampler=DrawsForItsRank()),
        optimizer=nested, callbacks=lambda: [ScaleMonitor(), OverflowReport(after=None)],
        overflows=(2, 3), places=("batch 3", "batch 5"),
        arguments={
            "strategy": "ddp", "precision": "16-mixed", "accumulate_grad_batches": 3, "use_distributed_sampler": False,
        },
    ),
    "ddp, bf16-mixed": Case(
        loader=lambda: DataLoader(Points(16), 2, shuffle=True), validation=lambda: DataLoader(Points(8), 2),
        optimizer=plateau, places=("inside validation 4", "epoch 4"),
        arguments={"strategy": "ddp", "precision": "bf16-mixed"},
    ),
    "ddp, stateful, divided": Case(
        loader=lambda: StatefulDataLoader(Points(16), 2, shuffle=True), places=("epoch 4",),
        arguments={"strategy": "ddp"},
    ),
    "fsdp, sharded checkpoint": Case(
        loader=lambda: DataLoader(Points(16), 2, shuffle=True), optimizer=nested,
        callbacks=lambda: [EMAWeightAveraging(decay=0.9)], places=("batch 3", "epoch 8"),
        arguments={
            "strategy": "fsdp", "precision": "32-true", "accumulate_grad_batches": 2,
            "plugins": partial(CheckpointFiles, sharded=True),
        },
    ),
    "fsdp, 16-mixed": Case(
        optimizer=plateau, overflows=(2,), places=("batch 3",),
        callbacks=lambda: [OverflowReport(after=None), EMAWeightAveraging(decay=0.9)],
        arguments={"strategy": "fsdp", "precision": "16-mixed"},
    ),
}  # fmt: skip


def compare(name, folder):
    """Train without interruption, and resumed from each checkpoint. Return the values that differ on this rank."""
    case, root, rank = CASES[name], Path(folder), distributed.get_rank()
    case.arguments["devices"] = distributed.get_world_size()
    with warnings.catch_warnings(action="ignore"):
        whole = train(case, root / "whole", 10 * rank)
        found = []
        for place in case.places:
            for moment, taken in train(case, root / place, 10 * rank + 1, root / "whole" / f"{place}.ckpt").items():
                lines = census.differences(whole[moment], taken)
                found += [f"resumed after {place}, {moment}: {line}" for line in lines]
    return found


@pytest.mark.parametrize("name", [pytest.param(name, marks=[needs_fsdp2] * name.startswith("fsdp")) for name in CASES])
def test_state_is_equal_after_a_resume(ranks, name, tmp_path):
    found = ranks.call(compare, name, str(tmp_path))
    assert found == [[], []], "\n".join(f"rank {rank}, {line}" for rank, lines in enumerate(found) for line in lines)
