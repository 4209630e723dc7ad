"""A multilayer perceptron: linear layers with ReLU between them, and its training with the squared error.

With the defaults of ``conf/recipe/mlp.yaml``, this is the benchmark of the article "Automatic Mixed Precision" of torch
for R: three linear layers, 4096 wide, 50 batches of 512 random rows, random targets, mean squared error, plain SGD with
a learning rate of 0.1, 3 epochs.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import lightning as L
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recipes.schedules import with_schedule


def mlp(in_features: int, out_features: int, *, width: int, layers: int, dropout: float = 0.0) -> nn.Sequential:
    """Build linear layers with ReLU between them, and with dropout if it is above 0.

    Args:
        in_features: size of the input vectors.
        out_features: size of the output vectors.
        width: size of the hidden vectors.
        layers: number of linear layers, at least 1.
        dropout: probability that a hidden value is set to zero in training.

    Raises:
        ValueError: ``layers`` is below 1.
    """
    if layers < 1:
        raise ValueError(f"layers is {layers}, expected at least 1 linear layer.")
    sizes = [in_features, *[width] * (layers - 1), out_features]
    parts: list[nn.Module] = []
    for size, following in pairwise(sizes):
        parts.append(nn.Linear(size, following))
        parts.append(nn.ReLU())
        if dropout > 0:
            parts.append(nn.Dropout(dropout))
    while not isinstance(parts[-1], nn.Linear):
        parts.pop()
    return nn.Sequential(*parts)


class MLPRegressor(L.LightningModule):
    """Trains an `mlp` on ``(inputs, targets)`` with the mean squared error.

    ``inputs`` is float of shape (batch, ``in_features``), ``targets`` of shape (batch, ``out_features``). The mean is
    over all elements. The module logs ``train_loss`` at every step. There is no validation: a benchmark only trains.

    Args:
        optimizer: called with the parameters and returns the optimizer, such as
            ``functools.partial(torch.optim.SGD, lr=0.1)``; in a config, ``_partial_: true``.
        scheduler: called with the optimizer and the number of optimizer steps of the run; returns a schedule that is
            stepped after every optimizer step (see `recipes.schedules`). Default: None, a constant learning rate.
        in_features: size of the input vectors.
        out_features: size of the target vectors.
        width: size of the hidden vectors.
        layers: number of linear layers.
    """

    def __init__(
        self,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        scheduler: Callable[[Optimizer, int], LRScheduler] | None = None,
        *,
        in_features: int,
        out_features: int,
        width: int,
        layers: int,
    ) -> None:
        super().__init__()
        self.save_hyperparameters("in_features", "out_features", "width", "layers")
        self.net = mlp(in_features, out_features, width=width, layers=layers)
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs of shape (batch, ``out_features``)."""
        return self.net(inputs)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch, a scalar."""
        inputs, targets = batch
        loss = F.mse_loss(self(inputs), targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer and, if there is one, the schedule, which is stepped once per optimizer step."""
        return with_schedule(self.make_optimizer(self.parameters()), self.make_scheduler, self)
