"""Modules around models, optimizers and schedules of transformers and timm, without knowledge of a Trainer."""

from __future__ import annotations

import math
from collections import OrderedDict
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LearningRateMonitor
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.ecosystem.support import Rows, quiet, unexpected


class Output(OrderedDict[str, Any]):
    """The output of such a model: a dict with attributes, without the keys that are None."""

    def __init__(self, **values: Any) -> None:
        super().__init__({key: value for key, value in values.items() if value is not None})
        for key, value in values.items():
            object.__setattr__(self, key, value)


class Words(Dataset[dict[str, Tensor]]):
    """Items are dicts."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(20, (6,), generator=generator)
        return {"input_ids": words, "labels": words[0] % 2}


class Network(nn.Module):
    """Computes its own loss if labels are given; input and output share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(20, 8), nn.Dropout(0.1), nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.LayerNorm(8)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        hidden = torch.utils.checkpoint.checkpoint(self.norm, self.drop(self.embed(input_ids)), use_reentrant=False)
        logits = self.head(hidden.mean(1))
        return Output(loss=None if labels is None else nn.functional.cross_entropy(logits, labels), logits=logits)


class Cosine:
    """A custom schedule: it is stepped with an epoch, and has its own updates."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.base = optimizer, [group["lr"] for group in optimizer.param_groups]
        self.stepped: list[int] = []
        self.step(0)

    def step(self, epoch: int, metric: Any = None) -> None:
        self.stepped.append(epoch)
        for group, rate in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = rate * (1 + math.cos(math.pi * epoch / 5)) / 2

    def state_dict(self) -> dict[str, Any]:
        return {"stepped": list(self.stepped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stepped = list(state["stepped"])


class Model(LightningModule):
    """Keeps its own average, updated before gradients are cleared."""

    def __init__(self, schedule: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = Network()
        self.average = deepcopy(self.network)
        self.averaged = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Output:
        output: Output = self.network(**batch)
        self.log("loss", output.loss, on_step=True, on_epoch=True)
        return output

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Output:
        for name, network in (("plain", self.network), ("average", self.average)):
            self.log(f"val/{name}", network(**batch).loss)
        return self.network(**batch)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.averaged += 1
        with torch.no_grad():
            for mine, theirs in zip(self.average.parameters(), self.network.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.network.parameters() if p.ndim > 1]
        plain = [p for p in self.network.parameters() if p.ndim == 1]
        optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": plain}], lr=0.02)
        if self.hparams.schedule == "cosine":
            return [optimizer], [{"scheduler": Cosine(optimizer), "interval": "epoch"}]
        total = self.trainer.estimated_stepping_batches
        warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 3, 1 - step / total))
        return [optimizer], [{"scheduler": warm, "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.hparams.schedule == "cosine":
            scheduler.step(epoch=self.current_epoch + 1, metric=metric)
        else:
            super().lr_scheduler_step(scheduler, metric)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("schedule", ["cosine", "warm-up"])
def test_outputs_schedules_averages(tmp_path, schedule, precision):
    """Dicts as batches and outputs, a custom schedule, accumulation, clipping."""

    def scenario(trainer_class: Any, folder: Path) -> dict[str, Any]:
        data = DataLoader(Words(), batch_size=4, shuffle=True), DataLoader(Words(), batch_size=4)
        limits = {"max_epochs": 3, "gradient_clip_val": 1.0, "accumulate_grad_batches": 2, "val_check_interval": 3}
        options = quiet(
            logger=Rows(folder), callbacks=[LearningRateMonitor("step")], precision=precision, default_root_dir=folder
        )
        model, trainer = Model(schedule), trainer_class(**options, **limits)
        trainer.fit(model, *data)
        scheduler = trainer.lr_scheduler_configs[0].scheduler
        file = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
        return {
            "rows": trainer.logger.rows,
            "weights": model.state_dict(),
            "averaged": model.averaged,
            "schedule": scheduler.state_dict() if schedule == "cosine" else scheduler.get_last_lr(),
            "file": {key: file[key] for key in ("state_dict", "lr_schedulers", "optimizer_states", "epoch")},
            "random": torch.rand(()),
        }

    assert unexpected(scenario, tmp_path) == []
