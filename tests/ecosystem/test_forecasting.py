"""Models like pytorch-forecasting: made from a dataset, objects as hyperparameters, their own `log`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping, LearningRateMonitor
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from tests.ecosystem.support import Rows, quiet, unexpected


class Quantiles(Metric):
    """A loss that is a metric with its own arguments."""

    full_state_update = False

    def __init__(self, quantiles: list[float]) -> None:
        super().__init__()
        self.quantiles = quantiles
        self.add_state("losses", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def loss(self, predicted: Tensor, target: Tensor) -> Tensor:
        errors = target[:, None] - predicted
        return torch.stack([torch.max(q * errors[:, i], (q - 1) * errors[:, i]) for i, q in enumerate(self.quantiles)])

    def update(self, predicted: Tensor, target: Tensor) -> None:
        self.losses = self.losses + self.loss(predicted, target).sum()
        self.count = self.count + target.numel()

    def compute(self) -> Tensor:
        return self.losses / self.count


class Series(Dataset[Any]):
    """Windows of a sine, shifted by a random number at access (as those libraries do)."""

    def __init__(self, count: int) -> None:
        self.count, self.steps = count, {"encoder": 6, "target": "volume"}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        shift = torch.rand(()) * 0.1
        steps = torch.arange(7) / 2 + index
        return {"history": torch.sin(steps[:6]) + shift}, (torch.sin(steps[6]), None)


def collate(items: list[Any]) -> Any:
    return {"history": torch.stack([x["history"] for x, _ in items])}, (torch.stack([y[0] for _, y in items]), None)


class BaseModel(LightningModule):
    """Adds prefixes to logged names and batch sizes, and collects outputs for the epoch."""

    def __init__(self, dataset_parameters: dict[str, Any], loss: Any = None, metrics: Any = None, rate: float = 0.01):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.loss = loss
        self.logging_metrics = nn.ModuleList(metrics or [])
        self.outputs: list[Tensor] = []
        self.net = nn.Linear(dataset_parameters["encoder"], len(loss.quantiles))

    @classmethod
    def from_dataset(cls, dataset: Series, **arguments: Any) -> BaseModel:
        return cls(dataset_parameters=dict(dataset.steps), **{"loss": Quantiles([0.1, 0.5, 0.9]), **arguments})

    @property
    def current_stage(self) -> str:
        if self.trainer.sanity_checking:
            return "sanity"
        return "train" if self.trainer.training else "val"

    def log(self, name: str, value: Any, *arguments: Any, **options: Any) -> None:
        options.setdefault("batch_size", self.batch_size)
        super().log(name, value, *arguments, **options)

    def step(self, batch: Any) -> Tensor:
        x, (y, _) = batch
        self.batch_size = len(y)
        predicted = self.net(x["history"])
        loss = self.loss.loss(predicted, y).mean()
        self.log(f"{self.current_stage}_loss", loss, on_step=self.training, on_epoch=True, prog_bar=True)
        for metric in self.logging_metrics:
            metric(predicted, y)
            self.log(f"{self.current_stage}_{type(metric).__name__}", metric, on_step=self.training, on_epoch=True)
        self.outputs.append(predicted.detach())
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.step(batch), "n_samples": self.batch_size}

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.step(batch)}

    def on_after_backward(self) -> None:
        for name, parameter in self.named_parameters():
            self.log(f"gradient/{name}", parameter.grad.norm())

    def on_train_epoch_end(self) -> None:
        if self.outputs:  # a validation has just taken them
            self.log(f"{self.current_stage}_spread", torch.cat(self.outputs).std())
        self.outputs.clear()

    on_validation_epoch_end = on_train_epoch_end

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]["history"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.rate)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        watched = {"scheduler": plateau, "monitor": "val_loss", "interval": "epoch", "frequency": 1, "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": watched}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["of the library"] = {"parameters": self.hparams.dataset_parameters}


class Writer(BasePredictionWriter):
    """Collects predictions, as `predict` of a model does."""

    def __init__(self) -> None:
        super().__init__("batch")
        self.written: list[Any] = []

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *_: Any) -> None:
        self.written.append([prediction, batch_indices])


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")  # one object for two stages, in both
@pytest.mark.parametrize("clipping", ["norm", "value"])
def test_clipped_reloaded_predicted_trained_further(tmp_path, clipping):
    """An override of `log`, clipping, and a loss among the hyperparameters of `from_dataset`."""

    def scenario(trainer_class: Any, folder: Path) -> dict[str, Any]:
        train, val = Series(22), Series(7)
        train = DataLoader(train, batch_size=4, shuffle=True, collate_fn=collate)
        val = DataLoader(val, batch_size=4, collate_fn=collate)

        def make(epochs: int) -> Any:
            callbacks = [EarlyStopping("val_loss", patience=3), LearningRateMonitor()]
            limits = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": clipping, "max_epochs": epochs}
            return trainer_class(**quiet(logger=Rows(folder), callbacks=callbacks, default_root_dir=folder, **limits))

        model = BaseModel.from_dataset(train.dataset, metrics=[Quantiles([0.5, 0.6, 0.7])], rate=0.05)
        trainer = make(3)
        trainer.fit(model, train, val)
        path = trainer.checkpoint_callback.best_model_path
        again = BaseModel.load_from_checkpoint(path, weights_only=False)
        writer = Writer()
        predictor = trainer_class(**quiet(callbacks=[writer], inference_mode=False))
        predictor.predict(again, val, return_predictions=False)
        further = make(4)
        states = torch.load(path, weights_only=False)
        further.fit(BaseModel.load_from_checkpoint(path, weights_only=False), train, val)
        return {
            "rows": trainer.logger.rows,
            "weights": model.state_dict(),
            "hyperparameters": dict(again.hparams),
            "loss": again.loss,
            "file": {key: states[key] for key in ("hyper_parameters", "of the library", "callbacks", "state_dict")},
            "written": writer.written,
            "further": further.logger.rows,
        }

    assert unexpected(scenario, tmp_path) == []


@pytest.mark.filterwarnings("ignore:Attribute .* is an instance of `nn.Module`")
def test_loss_is_restored_with_its_arguments(tmp_path):
    """The library would use the default of `__init__` without an error."""
    from trainer import Trainer

    data = DataLoader(Series(8), batch_size=4, collate_fn=collate)
    trainer = Trainer(**quiet(default_root_dir=tmp_path, max_epochs=1))
    trainer.fit(BaseModel.from_dataset(data.dataset, loss=Quantiles([0.2, 0.8])), data, data)
    again = BaseModel.load_from_checkpoint(trainer.checkpoint_callback.best_model_path, weights_only=False)
    assert type(again.loss) is Quantiles
    assert again.loss.quantiles == [0.2, 0.8]
