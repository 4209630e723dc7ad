"""A fit on several processes in which one of them stays in a layer for a while."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.worker import Regression, samples
from trainer import Trainer
from trainer.engine import stalls
from trainer.record.recorder import RunRecorder


class Stuck(nn.Module):
    """Is in no hurry, once, on one process."""

    def __init__(self, rank: int, seconds: float) -> None:
        super().__init__()
        self.rank, self.seconds, self.calls = rank, seconds, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3 and torch.distributed.get_rank() == self.rank:
            time.sleep(self.seconds)
        return x


def fit(folder: Path, rank: int, seconds: float, timeout: float) -> tuple[list[str], float]:
    """What this process has said, and a weight at the end."""
    said: list[str] = []
    before, stalls.say = stalls.say, said.append
    module = Regression()
    module.net.insert(1, Stuck(rank, seconds))
    try:
        trainer: Any = Trainer(
            accelerator="cpu", devices=torch.distributed.get_world_size(), max_epochs=1, logger=False,
            strategy=DDPStrategy(timeout=timedelta(seconds=timeout)), enable_progress_bar=False, limit_val_batches=0,
            enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
            callbacks=[RunRecorder(dirpath=folder)],
        )  # fmt: skip
        trainer.fit(module, DataLoader(samples(), batch_size=2))
    finally:
        stalls.say = before
    return said, float(module.net[0].weight[0, 0].detach())
