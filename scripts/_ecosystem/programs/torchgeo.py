"""torchgeo: tasks with metrics in collections, a plateau schedule, models made in `configure_models`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchgeo.trainers import ClassificationTask, SemanticSegmentationTask

REQUIRES = ("torchgeo==0.8.1", "requests", "torch==2.15.0", "lightning==2.6.6")
VARIES = (r"version_1/.*/epoch_loop.scheduler_progress/total/",)  # the resumed run: Lightning leaves out a step
COMMON = {"weights": None, "in_channels": 3, "task": "multiclass", "num_classes": 3, "loss": "ce", "lr": 1e-3}


class Noise(Dataset[dict[str, Tensor]]):
    """Pictures of noise with labels, or with masks."""

    def __init__(self, masks: bool) -> None:
        self.masks = masks

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(3, 32, 32, generator=generator)
        target = torch.randint(0, 3, (32, 32) if self.masks else (), generator=generator)
        return {"image": image, "mask" if self.masks else "label": target}


def train(run: Any, task: Callable[[], Any], *, masks: bool) -> None:
    """Fit, test, predict, reload, resume."""
    data = DataLoader(Noise(masks), batch_size=4, shuffle=True), DataLoader(Noise(masks), batch_size=4)

    def trainer(epochs: int) -> Any:
        return run.Trainer(max_epochs=epochs, callbacks=[ModelCheckpoint(monitor="val_loss", save_last=True)])

    module, first = task(), trainer(2)
    first.fit(module, *data)
    path = first.checkpoint_callback.best_model_path
    run.keep("test", first.test(module, data[1], verbose=False))
    run.keep("predicted", first.predict(module, data[1]))
    run.reload(type(module), path)
    with run.resume():
        trainer(3).fit(task(), *data, ckpt_path=path)


def case_classification(run: Any) -> None:
    """resnet18"""
    train(run, lambda: ClassificationTask(model="resnet18", patience=2, **COMMON), masks=False)


def case_segmentation(run: Any) -> None:
    """A U-Net"""
    train(run, lambda: SemanticSegmentationTask(model="unet", backbone="resnet18", **COMMON), masks=True)
