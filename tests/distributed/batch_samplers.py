"""Runs with custom batch samplers on several processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as distributed
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from tests.distributed.setups import only_these_warnings
from trainer import Trainer

BATCHES = [[6, 2], [4], [0, 1, 5]]


class Own:
    """A batch sampler that is not like torch's."""

    def __iter__(self) -> Any:
        return iter(BATCHES)

    def __len__(self) -> int:
        return len(BATCHES)


class Seen(LightningModule):
    """Records the numbers in its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen, self.indices = nn.Linear(1, 1), [], []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch.flatten().tolist())
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(batch.flatten().tolist())
        self.log("mean", batch.mean(), batch_size=len(batch), sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch.flatten().tolist())
        self.indices.append([int(index) for index in self.trainer.predict_loop.current_batch_indices])
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Makes(Seen):
    """Makes its dataloader itself."""

    def train_dataloader(self) -> Any:
        return loader_of("shuffled")

    def val_dataloader(self) -> Any:
        return loader_of("in order")

    test_dataloader = predict_dataloader = val_dataloader


def loader_of(kind: str) -> DataLoader[Tensor]:
    numbers = torch.arange(8.0).reshape(8, 1)
    samplers = {
        "list": BATCHES,
        "own": Own(),
        "shuffled": BatchSampler(RandomSampler(numbers), 2, drop_last=False),
        "in order": BatchSampler(SequentialSampler(numbers), 2, drop_last=False),
    }
    return DataLoader(numbers, batch_sampler=samplers[kind])


def run(what: str, kind: str = "list", **arguments: Any) -> tuple[list[Any], Any, Any]:
    """Return the batches of this process, the indices that the predict loop reports, and the metrics."""
    module, given = (Makes(), ()) if kind == "made by the module" else (Seen(), (loader_of(kind),))
    if what == "fit":
        arguments["limit_val_batches"] = 0
    with only_these_warnings():
        trainer = Trainer(
            accelerator="cpu", devices=distributed.get_world_size(), strategy="ddp", max_epochs=1, logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, **arguments,
        )  # fmt: skip
        getattr(trainer, what)(module, *given)
    return module.seen, module.indices, {name: float(value) for name, value in trainer.callback_metrics.items()}
