"""torch-uncertainty: its Trainer is a subclass with its own test loop and checkpoint callbacks."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_uncertainty import TUTrainer
from torch_uncertainty.callbacks import CompoundCheckpoint, TUClsCheckpoint
from torch_uncertainty.methods import EMA, deep_ensembles
from torch_uncertainty.models.mlp import mlp
from torch_uncertainty.post_processing import TemperatureScaler
from torch_uncertainty.routines import ClassificationRoutine

REQUIRES = (
    "torch-uncertainty==0.13.0",
    "torchvision==0.29.2",
    "scikit-learn==1.6.1",
    "timm==1.0.31",
    "torch==2.15.0",
    "lightning==2.6.6",
)


def case_classification(run: Any) -> None:
    """One network: mixup, out-of-distribution data, the best checkpoint by several metrics; calibrated during a test"""
    saver = CompoundCheckpoint({"val/cls/Acc": 1.0, "val/cls/Brier": -1.0}, dirpath=run.folder / "best", mode="max")
    routine = mixed()
    trainer = build(run, [saver, TUClsCheckpoint()], max_epochs=3, gradient_clip_val=1.0)
    trainer.fit(routine, datamodule=Points())
    run.keep("test", trainer.test(routine, datamodule=Points()))
    run.keep("test of the best", trainer.test(routine, datamodule=Points(), ckpt_path=saver.best_model_path))
    calibrated = routine_of(routine.model, eval_ood=True, post_processing=TemperatureScaler())
    run.keep("test of the calibrated", build(run, []).test(calibrated, datamodule=Points()))
    with run.resume():
        build(run, [], max_epochs=5).fit(mixed(), datamodule=Points(), ckpt_path=saver.best_model_path)


def case_ensemble(run: Any) -> None:
    """Three networks trained one after the other, then tested as one; a weight average within the model"""
    members = []
    for _ in range(3):
        member = EMA(model(), momentum=0.9)
        build(run, [], max_epochs=2).fit(routine_of(member), datamodule=Points())
        members.append(member)
    ensemble = deep_ensembles(members, task="classification")
    routine = routine_of(ensemble, is_ensemble=True, eval_ood=True, ood_criterion="mutual_information")
    run.keep("test", build(run, []).test(routine, datamodule=Points()))


def mixed() -> Any:
    return routine_of(model(), mixup_params={"mixtype": "mixup", "mixup_alpha": 0.3}, eval_ood=True)


def build(run: Any, callbacks: list[Any], **options: Any) -> Any:
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    return TUTrainer(callbacks=callbacks, default_root_dir=run.folder, log_every_n_steps=1, **quiet, **options)


def model() -> Any:
    return mlp(in_features=6, num_outputs=3, hidden_dims=[16, 16])


def routine_of(network: Any, **options: Any) -> Any:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    recipe = {"optimizer": optimizer, "lr_scheduler": schedule}
    return ClassificationRoutine(network, num_classes=3, loss=nn.CrossEntropyLoss(), optim_recipe=recipe, **options)


class Points(LightningDataModule):
    """Three clouds of points. The out-of-distribution points lie elsewhere."""

    def setup(self, stage: str | None = None) -> None:
        draws = torch.Generator().manual_seed(0)
        labels = torch.randint(0, 3, (96,), generator=draws)
        points = torch.randn(96, 6, generator=draws) + 2 * nn.functional.one_hot(labels, 6)
        self.train, self.val = TensorDataset(points[:64], labels[:64]), TensorDataset(points[64:], labels[64:])
        self.test, self.ood = self.val, TensorDataset(torch.randn(32, 6, generator=draws) - 3, labels[:32])

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, 16, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, 32)

    def test_dataloader(self) -> Any:
        return [DataLoader(self.test, 32), DataLoader(self.ood, 32)]

    def postprocess_dataloader(self) -> Any:
        return DataLoader(self.val, 32)
