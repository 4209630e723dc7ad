"""Tables of numbers: classification or regression with a small multilayer perceptron."""

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MeanAbsoluteError, Metric, R2Score
from torchmetrics.classification import MulticlassAccuracy

from recipes.mlp import mlp
from recipes.schedules import with_schedule


class TabularMLP(L.LightningModule):
    """Trains an `mlp` on ``(features, targets)``: classes with the cross-entropy loss, numbers with the squared error.

    ``features`` is float of shape (batch, ``num_features``), ``targets`` has shape (batch,): int64 classes, or float
    numbers in any unit. The module logs ``train_loss`` at every step and, over an epoch, for validation and test:

    - classification: ``val_loss`` in nats per row, and ``val_acc`` in [0, 1];
    - regression: ``val_loss``, the squared error divided by the variance of the training targets; ``val_mae``, the mean
      absolute error in the targets' unit; ``val_r2``, the share of the targets' variance that is explained, at most 1.

    A regression takes the mean and the standard deviation of the training targets from the data module's
    ``target_mean`` and ``target_std``, if it has them, and stores them in checkpoints.

    Args:
        optimizer: called with the parameters and returns the optimizer, such as
            ``functools.partial(torch.optim.SGD, lr=0.1)``; in a config, ``_partial_: true``.
        scheduler: called with the optimizer and the number of optimizer steps of the run; returns a schedule that is
            stepped after every optimizer step (see `recipes.schedules`). Default: None, a constant learning rate.
        num_features: number of features in a row.
        num_classes: number of classes; None for regression.
        width: size of the hidden vectors.
        layers: number of linear layers.
        dropout: probability that a hidden value is set to zero in training.
    """

    target_mean: Tensor
    target_std: Tensor

    def __init__(
        self,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        scheduler: Callable[[Optimizer, int], LRScheduler] | None = None,
        *,
        num_features: int,
        num_classes: int | None,
        width: int = 64,
        layers: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters("num_features", "num_classes", "width", "layers", "dropout")
        self.is_regression = num_classes is None
        self.net = mlp(num_features, num_classes or 1, width=width, layers=layers, dropout=dropout)
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.register_buffer("target_mean", torch.tensor(0.0))
        self.register_buffer("target_std", torch.tensor(1.0))
        for stage in ("val", "test"):
            for name, metric in _metrics(num_classes).items():
                setattr(self, f"{stage}_{name}", metric)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (batch, ``num_classes``) or, for regression, numbers (batch,) in the targets' unit."""
        outputs = self.net(features)
        if not self.is_regression:
            return outputs
        # Leave 16 bits first, because float16 ends at 65,504, and bfloat16 has no value between 150 and 151.
        return outputs.squeeze(1).to(self.target_std.dtype) * self.target_std + self.target_mean

    def on_fit_start(self) -> None:
        """Read the mean and standard deviation of the targets from the data module, if it has them."""
        data = getattr(self.trainer, "datamodule", None)
        self.target_mean.fill_(getattr(data, "target_mean", self.target_mean))
        self.target_std.fill_(getattr(data, "target_std", self.target_std))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch, a scalar."""
        features, targets = batch
        loss = self._loss(self(features), targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``val_loss`` and the metrics."""
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``test_loss`` and the metrics."""
        self._evaluate("test", batch)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return probabilities (batch, ``num_classes``) or, for regression, numbers (batch,), in float32."""
        outputs = self(batch[0]).float()
        return outputs if self.is_regression else outputs.softmax(dim=1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer and, if there is one, the schedule, which is stepped once per optimizer step."""
        return with_schedule(self.make_optimizer(self.net.parameters()), self.make_scheduler, self)

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.is_regression:
            return F.mse_loss(outputs / self.target_std, targets / self.target_std)
        return F.cross_entropy(outputs, targets)

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        features, targets = batch
        outputs = self(features)
        options = {"prog_bar": True, "on_step": False, "on_epoch": True, "batch_size": len(targets)}
        self.log(f"{stage}_loss", self._loss(outputs, targets), sync_dist=True, **options)
        for name in ("mae", "r2") if self.is_regression else ("acc",):
            metric = getattr(self, f"{stage}_{name}")
            metric.update(outputs, targets)
            self.log(f"{stage}_{name}", metric, **options)


def _metrics(num_classes: int | None) -> dict[str, Metric]:
    if num_classes is None:
        return {"mae": MeanAbsoluteError(), "r2": R2Score()}
    # The checks of arguments would synchronize host and device in each batch.
    return {"acc": MulticlassAccuracy(num_classes, average="micro", validate_args=False)}
