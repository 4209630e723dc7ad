"""Signals to one or both of two ranks: they stop at the same step, and the saved checkpoint is complete."""

import os
import signal
import time
import warnings

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from tests.distributed.worker import Regression, Shard, fit, samples
from tests.support import make_trainer

SLOW = 0.15
"""Seconds of a batch, so that ranks agree after every batch."""


class Silent(Regression):
    """Logs nothing, because logging synchronizes the ranks."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    validation_step = training_step


class Signalled(Callback):
    """Sends a signal to itself at configured ranks and batches. The ranks have different speeds."""

    def __init__(self, positions, seconds, in_validation):
        self.positions, self.seconds, self.in_validation = positions, seconds, in_validation
        self.validated = 0
        self.steps = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if (number := self.positions.get((trainer.global_rank, trainer.global_step))) is not None:
            os.kill(os.getpid(), number)
        time.sleep(self.seconds * (1 + trainer.global_rank))

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        self.validated = batch_idx + 1
        if self.in_validation == (trainer.global_rank, batch_idx):
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self.seconds * (1 + trainer.global_rank))

    def on_exception(self, trainer, module, exception):
        self.steps.append(trainer.global_step)


def interrupted(folder, positions, seconds, arguments=(), in_validation=None, val_batches=(0, 0)):
    """Return the results of this rank for an interrupted fit."""
    signalled = Signalled(positions, seconds, in_validation)
    code = None
    trainer = make_trainer(
        folder, devices=2, strategy="ddp", callbacks=[signalled, ModelCheckpoint(folder, save_top_k=0)],
        enable_checkpointing=True, num_sanity_val_steps=0, limit_train_batches=5, use_distributed_sampler=False,
        **{"limit_val_batches": 0, "max_epochs": 40} | dict(arguments),
    )  # fmt: skip
    train, val = DataLoader(samples(), batch_size=4, sampler=Shard(2)), None
    if count := val_batches[torch.distributed.get_rank()]:
        val = DataLoader(samples(4 * count), batch_size=4)
    with warnings.catch_warnings(action="ignore"):
        try:
            trainer.fit(Silent(), train, val)
        except SystemExit as end:
            code = end.code
    saved = torch.load(folder / "interrupted.ckpt", weights_only=True)["global_step"]
    return {"code": code, "steps": signalled.steps, "saved": saved, "validated": signalled.validated}


def test_signal_to_one_rank_stops_both_at_the_batch_after_it(ranks, tmp_path):
    """The run is resumed from the checkpoint."""
    found = ranks.call(interrupted, tmp_path, {(1, 1): signal.SIGTERM}, SLOW)
    assert found == [{"code": 143, "steps": [3], "saved": 3, "validated": 0}] * 2
    resumed = ranks.call(fit, Regression(), {"ckpt_path": tmp_path / "interrupted.ckpt"})
    assert [rank["global_step"] for rank in resumed] == [10, 10]


def test_signal_between_two_synchronizations_stops_both_soon(ranks, tmp_path):
    one, other = ranks.call(interrupted, tmp_path, {(0, 6): signal.SIGTERM}, 0.0)
    assert one == other
    (step,) = one["steps"]
    assert (one["code"], one["saved"]) == (143, step)
    assert 7 <= step <= 10, "an epoch has five batches, and the ranks synchronize before each"


@pytest.mark.parametrize(
    ("positions", "seconds", "max_epochs", "code", "step"),
    [
        ({(0, 1): signal.SIGUSR1, (1, 1): signal.SIGTERM}, SLOW, 40, 143, 3),
        ({(1, 4): signal.SIGUSR1}, 0.0, 1, 138, 5),
    ],
    ids=["SIGTERM wins", "last batch"],
)
def test_signals_of_both_ranks_and_in_the_last_batch(ranks, tmp_path, positions, seconds, max_epochs, code, step):
    found = ranks.call(interrupted, tmp_path, positions, seconds, {"max_epochs": max_epochs})
    assert found == [{"code": code, "steps": [step], "saved": step, "validated": 0}] * 2


@pytest.mark.parametrize(("batch_idx", "validated"), [(0, (2, 2)), (5, (4, 6))], ids=["both", "one rank"])
def test_validation_ends_at_the_same_batch(ranks, tmp_path, batch_idx, validated):
    """One rank has two batches more than the other."""
    found = ranks.call(interrupted, tmp_path, {}, SLOW, {"limit_val_batches": 1.0}, (1, batch_idx), (4, 6))
    assert found == [{"code": 143, "steps": [5], "saved": 5, "validated": number} for number in validated]
