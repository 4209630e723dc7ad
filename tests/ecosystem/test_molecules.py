"""Models like chemprop: parts with their classes among the hyperparameters, read by `torch.load`."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torchmetrics import Metric

from tests.ecosystem.support import Rows, quiet, unexpected


class Seeded(Sampler[int]):
    """Shuffles its own array with its own generator, in place."""

    def __init__(self, count: int) -> None:
        self.order, self.random = np.arange(count), np.random.default_rng(4)

    def __iter__(self) -> Iterator[int]:
        self.random.shuffle(self.order)
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


class Weighted(Metric):
    """A metric that is the criterion, too; `task_weights` is a buffer."""

    full_state_update = False

    def __init__(self, task_weights: Any = 1.0) -> None:
        super().__init__()
        self.register_buffer("task_weights", torch.as_tensor(task_weights).view(1, -1))
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, predicted: Tensor, target: Tensor) -> None:
        self.total = self.total + ((predicted - target).abs() * self.task_weights).sum()
        self.count = self.count + target.numel()

    def compute(self) -> Tensor:
        return self.total / self.count


class Head(nn.Module):
    """Stores its own arguments: its class is among the hyperparameters."""

    def __init__(self, size: int = 4, criterion: Metric | None = None) -> None:
        super().__init__()
        self.criterion = criterion or Weighted()
        self.hparams = {"cls": type(self), "size": size, "criterion": self.criterion}
        self.net = nn.Sequential(nn.Linear(3, size), nn.ReLU(), nn.Linear(size, 2))


class Model(LightningModule):
    """Logs a metric without updating it, has its own evaluation mode, and reads its files itself."""

    def __init__(self, head: Head, metrics: list[Metric] | None = None, rate: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["head"])
        self.hparams["head"] = head.hparams
        self.head = head
        self.metrics = nn.ModuleList([*(metrics or []), head.criterion.clone()])
        self.normalize = nn.BatchNorm1d(3)

    def forward(self, features: Tensor) -> Tensor:
        return self.head.net(self.normalize(features))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, target = batch
        loss = self.head.criterion(self(features), target)
        self.log("train_loss", self.head.criterion, batch_size=len(target), prog_bar=True, on_epoch=True)
        return loss

    def on_validation_model_eval(self) -> None:
        self.eval()
        self.normalize.train()

    def validation_step(self, batch: Any, batch_idx: int = 0) -> None:
        self.evaluate(batch, "val")
        self.log("val_loss", self.metrics[-1], batch_size=len(batch[1]), prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int = 0) -> None:
        self.evaluate(batch, "test")

    def evaluate(self, batch: Any, name: str) -> None:
        predicted = self(batch[0])
        for number, metric in enumerate(self.metrics):
            metric.update(predicted, batch[1])
            if number < len(self.metrics) - 1:
                self.log(f"{name}/{number}", metric, batch_size=len(batch[1]))

    def predict_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), self.hparams.rate)
        if self.trainer.train_dataloader is None:
            _ = self.trainer.estimated_stepping_batches  # loads it: only then there is a number of batches
        steps = self.trainer.num_training_batches * 5  # of the resumed run, too, which would have another schedule
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (steps + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @classmethod
    def load_from_checkpoint(cls, path: Any, **options: Any) -> Model:
        """Builds the parts from the file, writes it again to memory, and lets Lightning read that."""
        contents = torch.load(path, weights_only=False)
        parts = contents["hyper_parameters"]
        head = parts["head"].pop("cls")(**parts.pop("head"))
        buffer = io.BytesIO()
        torch.save(contents, buffer)
        buffer.seek(0)
        return super().load_from_checkpoint(buffer, weights_only=False, head=head, **options)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:Loading .* with weights_only=False")  # documented in the guide
def test_parts_and_metrics_are_restored_and_the_run_resumed(tmp_path):
    """Classes and metrics among hyperparameters, predictions of the best file, a resume with the same sampler."""

    def scenario(trainer_class: Any, folder: Path) -> dict[str, Any]:
        features = torch.randn(30, 3)
        values = torch.stack([features.sum(1), features[:, 0]], 1)
        sampler = Seeded(18)
        train = DataLoader(TensorDataset(features[:18], values[:18]), batch_size=4, sampler=sampler, drop_last=True)
        val = DataLoader(TensorDataset(features[18:], values[18:]), batch_size=5)

        def make(epochs: int) -> Any:
            saver = ModelCheckpoint(folder / "checkpoints", monitor="val_loss", save_top_k=2, save_last=True)
            callbacks = [saver, EarlyStopping("val_loss", patience=epochs)]
            limits = {"gradient_clip_val": 1.0, "max_epochs": epochs}
            return trainer_class(**quiet(logger=Rows(folder), callbacks=callbacks, **limits))

        model = Model(Head(5, Weighted([1.0, 2.0])), [Weighted()])
        trainer = make(3)
        trainer.fit(model, train, val)
        best = trainer.checkpoint_callback.best_model_path
        again = Model.load_from_checkpoint(best)
        tested = trainer.test(model, val, weights_only=False)
        predicted = trainer.predict(dataloaders=val, ckpt_path="best", weights_only=False)
        last = folder / "checkpoints" / "last.ckpt"
        file = torch.load(last, weights_only=False)
        further, resumed = make(5), Model(Head(5, Weighted([1.0, 2.0])), [Weighted()])
        further.fit(resumed, train, val, ckpt_path=last, weights_only=False)
        return {
            "rows": trainer.logger.rows,
            "weights": model.state_dict(),
            "again": again.state_dict(),
            "hyperparameters": dict(again.hparams),
            "criterion": again.head.criterion,
            "tested": tested,
            "predicted": predicted,
            "file": {key: file[key] for key in ("hyper_parameters", "state_dict", "lr_schedulers", "optimizer_states")},
            "names": sorted(path.name for path in folder.rglob("*.ckpt")),
            "order": sampler.order,
            "resumed": resumed.state_dict(),
            "resumed rows": further.logger.rows,
        }

    assert unexpected(scenario, tmp_path) == []
