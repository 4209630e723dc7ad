"""Image classification with any network that maps images to logits."""

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from recipes.schedules import with_schedule
from trainer.record.figures import write_confusion_matrix, write_pictures

_SAMPLES = 16


class ImageClassifier(L.LightningModule):
    """Trains a network on ``(images, labels)`` with the cross-entropy loss.

    ``images`` is float of shape (batch, 3, height, width), ``labels`` is int64 of shape (batch,). Logged are
    ``train_loss`` at every step and, over a whole epoch, ``val_loss`` and ``val_acc``, ``test_loss`` and
    ``test_acc``: losses in nats per image (label smoothing counts in training only), accuracies in [0, 1]. A test also
    leaves a confusion matrix, and the first images with what was predicted of them, in the run's report.

    Args:
        net: maps images to logits of shape (batch, ``num_classes``).
        optimizer: called with the parameters (or with parameter groups) and returns the optimizer, such as
            ``functools.partial(torch.optim.SGD, lr=0.1)``; in a config, ``_partial_: true``.
        scheduler: called with the optimizer and the number of optimizer steps of the run, returns a schedule
            that is stepped after every optimizer step (see `recipes.schedules`). None: the rate stays.
        num_classes: number of classes.
        label_smoothing: share of each training target that is spread evenly over all classes, in [0, 1].
        channels_last: lay out weights and images as (batch, height, width, channels) in memory, as Tensor
            Cores want it. Values and shapes stay as they are.
        decay_norm_and_bias: False exempts every parameter of fewer than two dimensions (biases and the
            weights of normalisation layers) from the optimizer's ``weight_decay``.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        scheduler: Callable[[Optimizer, int], LRScheduler] | None = None,
        *,
        num_classes: int,
        label_smoothing: float = 0.0,
        channels_last: bool = False,
        decay_norm_and_bias: bool = True,
    ) -> None:
        super().__init__()
        # Only what a checkpoint may hold when it is loaded with weights_only=True: numbers, no objects.
        self.save_hyperparameters("num_classes", "label_smoothing", "channels_last", "decay_norm_and_bias")
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.net = net.to(memory_format=self.memory_format)
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.decay_norm_and_bias = decay_norm_and_bias
        self.train_loss = nn.CrossEntropyLoss(label_smoothing=label_smoothing)
        # Without checking its arguments, which would stall a GPU at every batch.
        self.val_acc = MulticlassAccuracy(num_classes, average="micro", validate_args=False)
        self.test_acc = MulticlassAccuracy(num_classes, average="micro", validate_args=False)
        self.test_confusion = MulticlassConfusionMatrix(num_classes, validate_args=False)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (batch, ``num_classes``)."""
        return self.net(images.contiguous(memory_format=self.memory_format))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch, a scalar."""
        images, labels = batch
        loss = self.train_loss(self(images), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=False, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``val_loss`` and ``val_acc``."""
        self._evaluate("val", self.val_acc, batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``test_loss`` and ``test_acc``, and count which class was taken for which."""
        images, labels = batch
        predicted = self._evaluate("test", self.test_acc, batch).argmax(dim=1)
        self.test_confusion.update(predicted, labels)
        if batch_idx == 0:
            both = zip(labels[:_SAMPLES].tolist(), predicted[:_SAMPLES].tolist(), strict=True)  # waits for a GPU, once
            captions = [f"{true}" if true == found else f"{true}, not {found}" for true, found in both]
            write_pictures(self.trainer, "test_samples", images[:_SAMPLES], captions)

    def on_test_epoch_end(self) -> None:
        """Write the confusion matrix."""
        write_confusion_matrix(self.trainer, "test", self.test_confusion.compute())
        self.test_confusion.reset()

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Probabilities of the classes, float32 of shape (batch, ``num_classes``)."""
        images, _ = batch
        return self(images).float().softmax(dim=1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer and, if there is one, the schedule, stepped once per optimizer step.

        Raises:
            ValueError: there is a schedule and the run has no end.
        """
        return with_schedule(self.make_optimizer(self._trainable_parameters()), self.make_scheduler, self)

    def _evaluate(self, stage: str, accuracy: MulticlassAccuracy, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        logits = self(images)
        accuracy.update(logits, labels)
        options = {"on_step": False, "on_epoch": True, "prog_bar": True, "batch_size": len(labels)}
        self.log(f"{stage}_loss", F.cross_entropy(logits, labels), sync_dist=True, **options)
        self.log(f"{stage}_acc", accuracy, **options)
        return logits

    def _trainable_parameters(self) -> list[nn.Parameter] | list[dict[str, Any]]:
        parameters = [parameter for parameter in self.net.parameters() if parameter.requires_grad]
        if self.decay_norm_and_bias:
            return parameters
        return [
            {"params": [parameter for parameter in parameters if parameter.ndim >= 2]},
            {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
        ]
