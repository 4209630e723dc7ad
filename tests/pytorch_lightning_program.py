"""Program of test_pytorch_lightning.py that imports everything from ``pytorch_lightning``.

Arguments: "theirs", or "ours" for our Trainer; and a folder for ``result.pt``.
"""

import sys

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if sys.argv[1] == "ours":  # where a sorter of imports puts the line
    import trainer.pytorch_lightning  # noqa: F401

import os
import pickle
import warnings
from collections import UserList
from pathlib import Path
from typing import Any

if sys.argv[1] == "theirs":
    from pytorch_lightning import Trainer
    from pytorch_lightning.demos.boring_classes import BoringModel
else:
    from lightning.pytorch.demos.boring_classes import BoringModel

    from trainer import Trainer

warnings.simplefilter("ignore" if sys.argv[1] == "theirs" else "error")
warnings.filterwarnings("ignore", message=".*does not have many workers|.*LeafSpec|.*callbacks used to create")
FOLDER = Path(sys.argv[2])
QUIET: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "log_every_n_steps": 1}


class Data(pl.LightningDataModule):
    def __init__(self, shuffle: bool = True) -> None:
        super().__init__()
        self.shuffle = shuffle

    def loader(self, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(24, 4, generator=generator)
        dataset = TensorDataset(features, features.sum(1, keepdim=True).sin())
        return DataLoader(dataset, batch_size=4, shuffle=seed == 0 and self.shuffle)

    def train_dataloader(self) -> Any:
        return self.loader(0)

    def val_dataloader(self) -> Any:
        return self.loader(1)

    test_dataloader = predict_dataloader = val_dataloader


class Model(pl.LightningModule):
    def __init__(self, width: int = 5, rate: float = 0.1, noise: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(noise), nn.Linear(width, 1))

    def step(self, name: str, batch: Any) -> Any:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log(name, loss, prog_bar=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step("loss", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step("val_loss", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.step("test_loss", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), self.hparams.rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Watch(pl.Callback):
    def __init__(self) -> None:
        self.calls = UserList[str]()  # our Trainer restores attributes, except those of other packages' classes

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.calls.append(f"batch {batch_idx} {outputs['loss'].item()!r}")

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.calls.append(f"validation {trainer.sanity_checking}")


def fit(name: str, ckpt_path: str | None = None, noise: float = 0.1, **arguments: Any) -> tuple[Any, dict[str, Any]]:
    pl.seed_everything(7, verbose=False)
    watch, module = Watch(), Model(width=6, noise=noise)
    arguments["callbacks"] = [watch, *arguments.get("callbacks", [])]
    trainer = Trainer(default_root_dir=FOLDER / name, **{**QUIET, "logger": False, **arguments})
    trainer.fit(module, datamodule=Data(shuffle=noise > 0), ckpt_path=ckpt_path)
    return trainer, {
        "calls": list(watch.calls),
        "weights": module.state_dict(),
        "metrics": dict(trainer.callback_metrics),
        "steps": [trainer.current_epoch, trainer.global_step],
        "random": torch.get_rng_state(),
    }


def rounded(path: Path) -> list[list[str]]:
    """Round rows of numbers, because the last bit of an epoch's mean may differ."""
    rows = [line.split(",") for line in path.read_text().splitlines()]
    return [rows[0], *([value and f"{float(value):.6g}" for value in row] for row in rows[1:])]


def main() -> dict[str, Any]:
    best = ModelCheckpoint(FOLDER / "best", "{epoch}-{val_loss:.4f}", monitor="val_loss", save_top_k=2, save_last=True)
    stopping = EarlyStopping("val_loss", patience=0, min_delta=0.02)
    loggers = [CSVLogger(FOLDER, "csv"), TensorBoardLogger(str(FOLDER), "tensorboard")]
    callbacks = [best, stopping, LearningRateMonitor()]
    trainer, fitted = fit("fit", max_epochs=8, callbacks=callbacks, logger=loggers)
    seen: dict[str, Any] = {
        "fit": fitted,
        "stopped": stopping.stopped_epoch,
        "files": sorted(path.name for path in (FOLDER / "best").iterdir() if path.suffix == ".ckpt"),
        "csv": rounded(Path(loggers[0].log_dir, "metrics.csv")),
        "hparams": Path(loggers[0].log_dir, "hparams.yaml").read_text(),
        "events": len(list(Path(loggers[1].log_dir).glob("events.*"))),
        "test": trainer.test(datamodule=Data(), ckpt_path="best", verbose=False),
        "validate": trainer.validate(datamodule=Data(), ckpt_path="last", verbose=False),
        "predict": trainer.predict(datamodule=Data(), ckpt_path="last"),
    }
    checkpoint = torch.load(best.best_model_path, weights_only=True)
    seen["checkpoint"] = {key: checkpoint[key] for key in ("state_dict", "hyper_parameters", "epoch", "global_step")}
    loaded = Model.load_from_checkpoint(best.best_model_path, rate=0.2)
    seen["loaded"] = [loaded.state_dict(), dict(loaded.hparams)]
    # without random numbers and earlier metrics: only our Trainer restores those of the checkpoint
    resumed = fit("resumed", best.last_model_path, noise=0.0, max_epochs=8)[1]
    seen["resumed"] = [resumed[name] for name in ("calls", "weights", "steps")]
    seen["strategy"] = fit("strategy", max_epochs=1, strategy=SingleDeviceStrategy("cpu"))[1]

    # pickles contain the class names of that process, and are readable in both
    seen["pickled"] = pickle.loads(b"cpytorch_lightning.callbacks.timer\nTimer\n.") is pl.callbacks.Timer
    seen["boring"] = issubclass(BoringModel, pl.LightningModule)

    sys.argv[1:] = []
    settings = {**QUIET, "max_epochs": 2, "logger": False, "enable_checkpointing": False}
    os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # for a method that LightningCLI calls
    stops = ["--trainer.callbacks=pytorch_lightning.callbacks.EarlyStopping", "--trainer.callbacks.monitor=val_loss"]
    options: dict[str, Any] = {"trainer_defaults": settings, "seed_everything_default": 3, "save_config_callback": None}
    cli = LightningCLI(Model, Data, trainer_class=Trainer, args=["fit", "--model.width=3", *stops], **options)
    assert isinstance(cli.trainer, pl.Trainer)
    assert type(cli.trainer) is Trainer
    seen["cli"] = [cli.model.state_dict(), [type(one).__qualname__ for one in cli.trainer.early_stopping_callbacks]]
    return seen


if __name__ == "__main__":
    result_path = FOLDER / "result.pt"
    torch.save(main(), result_path)
