"""An autoencoder of handwritten digits: a DataModule, a logger, checkpoints, early stopping, and a picture code."""

from pathlib import Path

import torch
from lightning import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Digits(LightningDataModule):
    def __init__(self, batch_size=64):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        load_digits()  # in place of a download

    def setup(self, stage):
        images = torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 16
        parts = random_split(TensorDataset(images), [1200, 300, 297], torch.Generator().manual_seed(42))
        self.train_set, self.val_set, self.test_set = parts

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test_set, batch_size=self.hparams.batch_size)

    def predict_dataloader(self):
        return self.test_dataloader()


class AutoEncoder(LightningModule):
    def __init__(self, hidden=32, code=3, learning_rate=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, code))
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.ReLU(), nn.Linear(hidden, 64))

    def forward(self, images):
        return self.encoder(images)

    def training_step(self, batch, batch_idx):
        return self.reconstruction(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.reconstruction(batch, "val")

    def test_step(self, batch, batch_idx):
        self.reconstruction(batch, "test")

    def predict_step(self, batch, batch_idx):
        (images,) = batch
        return self(images)

    def reconstruction(self, batch, stage):
        (images,) = batch
        loss = nn.functional.mse_loss(self.decoder(self.encoder(images)), images)
        self.log(f"{stage}_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def main(folder):
    seed_everything(7)
    best = ModelCheckpoint(dirpath=Path(folder) / "checkpoints", monitor="val_loss", filename="{epoch}-{val_loss:.4f}")
    trainer = Trainer(
        max_epochs=6,
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        logger=CSVLogger(folder),
        callbacks=[best, EarlyStopping("val_loss", patience=2), LearningRateMonitor("epoch")],
        log_every_n_steps=5,
        gradient_clip_val=1.0,
    )
    digits = Digits()
    trainer.fit(AutoEncoder(), datamodule=digits)
    (tested,) = trainer.test(ckpt_path="best", datamodule=digits)
    codes = torch.cat(trainer.predict(datamodule=digits, ckpt_path="best"))
    reloaded = AutoEncoder.load_from_checkpoint(best.best_model_path)
    return {
        "tested": tested,
        "codes": codes,
        "weights": reloaded.state_dict(),
        "best": Path(best.best_model_path).name,
        "steps": trainer.global_step,
    }
