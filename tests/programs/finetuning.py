"""Finetuning: a network that knows the digits 0 to 4 learns 5 to 9, first its head, later its backbone."""

from pathlib import Path

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint, ModelSummary
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


def digits(first, last, *, train):
    """Batches of the digits from ``first`` to ``last``; the labels begin at 0."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    images, labels = images[chosen := (labels >= first) & (labels <= last)], labels[chosen] - first
    part = slice(0, 600) if train else slice(600, None)
    # not shuffled, which they are already: a resumed run of Lightning's would shuffle them in another order than ours
    return DataLoader(TensorDataset(images[part], labels[part]), batch_size=50)


def backbone():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    )  # fmt: skip


class Classifier(LightningModule):
    def __init__(self, pretrained=None, learning_rate=0.01):
        super().__init__()
        self.save_hyperparameters(ignore="pretrained")
        self.backbone = backbone()
        self.head = nn.Linear(64, 5)
        self.accuracy = MulticlassAccuracy(5, average="micro")
        if pretrained is not None:
            self.backbone.load_state_dict(pretrained)

    def forward(self, images):
        return self.head(self.backbone(images))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.accuracy(self(images), labels)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=self.hparams.learning_rate, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [3], gamma=0.5)]


def main(folder):
    seed_everything(5)
    options = {"accelerator": "cpu", "devices": 1, "default_root_dir": folder, "logger": False}

    known = Classifier(learning_rate=0.05)
    trainer = Trainer(max_epochs=2, enable_checkpointing=False, **options)
    trainer.fit(known, digits(0, 4, train=True), digits(0, 4, train=False))

    learned = Classifier(pretrained=known.backbone.state_dict())
    unfreezing = BackboneFinetuning(unfreeze_backbone_at_epoch=2, backbone_initial_ratio_lr=0.1, verbose=True)
    saving = ModelCheckpoint(folder, monitor="val_accuracy", mode="max", save_last=True)
    trainer = Trainer(max_epochs=2, callbacks=[unfreezing, saving, ModelSummary(max_depth=2)], **options)
    trainer.fit(learned, digits(5, 9, train=True), digits(5, 9, train=False))

    # a later session resumes, and unfreezes the backbone soon
    resumed = Classifier()
    unfreezing = BackboneFinetuning(unfreeze_backbone_at_epoch=2, backbone_initial_ratio_lr=0.1)
    trainer = Trainer(max_epochs=5, callbacks=[unfreezing, saving], **options)
    trainer.fit(resumed, digits(5, 9, train=True), digits(5, 9, train=False), ckpt_path=saving.last_model_path)
    return {
        "weights": resumed.state_dict(),
        "accuracy": trainer.callback_metrics["val_accuracy"].item(),
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "steps": trainer.global_step,
        "best": Path(saving.best_model_path).name,
    }
