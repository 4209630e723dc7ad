"""A fit of ``test_weights.py`` that starts with the weights of a file or folder."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from tests.distributed.sharded import whole
from tests.distributed.worker import BATCH, Shard, samples
from tests.distributed.worker import Regression as Plain
from trainer import FSDP2Strategy, Trainer
from trainer.engine.sharding.state_dicts import gathered


class Net(Plain):
    """Parameters of uneven shards, a buffer, and a head; with ``late`` made on the meta device by the run.

    Args:
        seed: of the weights.
        outputs: of the head, which are averaged.
        late: whether ``configure_model`` makes the layers.
    """

    def __init__(self, seed: int = 0, outputs: int = 2, late: bool = False) -> None:
        super().__init__()
        self.seed, self.outputs = seed, outputs
        self.net: Any = None
        if not late:
            self._make()

    def _make(self) -> None:
        torch.manual_seed(self.seed)
        self.net = nn.Sequential(
            nn.Linear(6, 16), nn.Tanh(), nn.BatchNorm1d(16, momentum=0.0), nn.Linear(16, self.outputs)
        )

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self._make()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, target = batch
        return nn.functional.mse_loss(self.net(features).mean(1, keepdim=True), target[:, :1])


class Beginning(Callback):
    """Records the whole weights and buffers at the start of training, and those of the average."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.weights = whole(pl_module) | {name: buffer.clone() for name, buffer in pl_module.named_buffers()}
        self.average = {}
        for callback in trainer.callbacks:
            if isinstance(callback, EMAWeightAveraging):
                average = gathered(dict(callback._average_model.module.state_dict()), True)
                self.average = {name: value.clone() for name, value in average.items()}


def fit(path: str, strategy: str, late: bool = False, outputs: int = 2, averaged: bool = False) -> dict[str, Any]:
    """Return the weights at the start, the report on loading, and the weights after a few steps."""
    beginning = Beginning()
    averaging = [EMAWeightAveraging(update_starting_at_epoch=9)] if averaged else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy=FSDP2Strategy() if strategy == "fsdp" else strategy, max_epochs=1,
            limit_train_batches=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, limit_val_batches=0, use_distributed_sampler=False,
            callbacks=[beginning, *averaging], default_root_dir=Path(path).parent,
        )  # fmt: skip
        module = Net(seed=torch.distributed.get_rank() + 5, late=late, outputs=outputs)
        data = DataLoader(samples(), batch_size=BATCH // 2, sampler=Shard(2))
        trainer.fit(module, data, weights=path)
    assert trainer.loaded_weights is not None
    return {
        "begun": beginning.weights,
        "average": beginning.average,
        "facts": trainer.loaded_weights.facts,
        "end": {name: value.clone() for name, value in module.state_dict().items()},
    }
