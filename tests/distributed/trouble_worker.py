"""Fits on several ranks with one that stays in a layer, or has a loss spike."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.worker import Regression, samples
from tests.support import native_fp16
from trainer import CheckpointFiles, DeepSpeedStrategy, Trainer
from trainer.callbacks import RollBackOnLossSpike
from trainer.callbacks.run_recorder import RunRecorder
from trainer.engine import stalls


class Stuck(nn.Module):
    """Blocks once, on one rank, until the file reports its position."""

    def __init__(self, rank: int, file: Path) -> None:
        super().__init__()
        self.rank, self.file, self.calls = rank, file, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3 and torch.distributed.get_rank() == self.rank:
            for _ in range(600):
                if self.file.exists() and "net.1" in self.file.read_text():
                    break
                time.sleep(0.1)
        return x


def stall(folder: Path, engine: str, rank: int, timeout: float) -> tuple[list[str], float]:
    """Return the output of this rank, and a weight at the end."""
    said: list[str] = []
    before, stalls.write_stderr = stalls.write_stderr, said.append
    module = Regression()
    module.net.insert(1, Stuck(rank, folder / "stall.txt"))
    strategy: Any = DDPStrategy if engine == "ddp" else DeepSpeedStrategy
    try:
        trainer: Any = Trainer(
            accelerator="cpu", devices=torch.distributed.get_world_size(), max_epochs=1, logger=False,
            strategy=strategy(timeout=timedelta(seconds=timeout)), enable_progress_bar=False, limit_val_batches=0,
            enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
            callbacks=[RunRecorder(dirpath=folder)],
        )  # fmt: skip
        trainer.fit(module, DataLoader(samples(), batch_size=2))
    finally:
        stalls.write_stderr = before
    return said, float(module.net[0].weight[0, 0].detach())


def spike(folder: Path, engine: str, left_out: tuple[int, int] | None) -> tuple[list[Any], list[Tensor], int]:
    """Return the roll-back, and the weights and the step at the end. ``left_out`` omits these batches and the spike."""
    rank, callbacks = torch.distributed.get_rank(), list[Any]()
    generator = torch.Generator().manual_seed(rank)
    batches = [[torch.randn(4, 6, generator=generator), torch.randn(4, 2, generator=generator)] for _ in range(16)]
    if left_out is None:
        batches[11][1] += 30.0 * rank  # the other rank has no spike
        callbacks = [RollBackOnLossSpike(threshold=5.0, window=4)]
    else:
        del batches[slice(*left_out)]
    saver = ModelCheckpoint(folder / f"{engine}_{left_out}", every_n_train_steps=4, save_top_k=-1, filename="{step}")
    module, precision = Regression(), "32-true" if engine == "fsdp" else native_fp16(init_scale=64.0, growth_interval=3)
    trainer: Any = Trainer(
        accelerator="cpu", devices=torch.distributed.get_world_size(), max_epochs=1, logger=False, strategy=engine,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[*callbacks, saver], precision=precision,
        plugins=[CheckpointFiles(sharded=engine == "fsdp")], use_distributed_sampler=False, default_root_dir=folder,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(batches, batch_size=None))
    done = callbacks[0].rollbacks if callbacks else []
    return done, [parameter.detach().clone() for parameter in module.parameters()], trainer.global_step
