"""Image classification with any network that maps images to logits."""

import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import BasePredictionWriter
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

    ``images`` is float of shape (batch, 3, height, width), ``labels`` is int64 of shape (batch,). The module logs
    ``train_loss`` at every step and, over a whole epoch, ``val_loss`` and ``val_acc``, ``test_loss`` and
    ``test_acc``: losses in nats per image (with label smoothing only in training), accuracies in [0, 1]. A test also
    adds a confusion matrix, and the first images with their predicted classes, to the run's report. Both show the
    names of the classes if the data module has an attribute ``classes``; checkpoints store these names.

    Args:
        net: maps images to logits of shape (batch, ``num_classes``).
        optimizer: called with the parameters (or with parameter groups) and returns the optimizer, such as
            ``functools.partial(torch.optim.SGD, lr=0.1)``; in a config, ``_partial_: true``.
        scheduler: called with the optimizer and the number of optimizer steps of the run; returns a schedule that is
            stepped after every optimizer step (see `recipes.schedules`). Default: None, a constant learning rate.
        num_classes: number of classes. Default: None, the number of ``classes`` of the data module or the checkpoint;
            this requires a network with a method ``set_num_classes``, such as `TransferNet`.
        classes: names of the classes. Default: None, those of the data module or the checkpoint.
        label_smoothing: share of each training target that is spread evenly over all classes, in [0, 1].
        channels_last: lay out weights and images as (batch, height, width, channels) in memory, which is
            faster on Tensor Cores. Values and shapes do not change.
        decay_norm_and_bias: False exempts every parameter of fewer than two dimensions (biases and the
            weights of normalization layers) from the optimizer's ``weight_decay``.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        scheduler: Callable[[Optimizer, int], LRScheduler] | None = None,
        *,
        num_classes: int | None = None,
        classes: Sequence[str] | None = None,
        label_smoothing: float = 0.0,
        channels_last: bool = False,
        decay_norm_and_bias: bool = True,
    ) -> None:
        super().__init__()
        # Save only values that `torch.load(..., weights_only=True)` accepts.
        self.save_hyperparameters("num_classes", "label_smoothing", "channels_last", "decay_norm_and_bias")
        self.classes: list[str] | None = None
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.net = net
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.decay_norm_and_bias = decay_norm_and_bias
        self.train_loss = nn.CrossEntropyLoss(label_smoothing=label_smoothing)
        if num_classes is not None:
            self._set_num_classes(num_classes)
        elif not hasattr(net, "set_num_classes"):
            raise ValueError(
                f"num_classes is None, but {type(net).__name__} has no method `set_num_classes`. Set model.num_classes."
            )
        if classes is not None:
            self.set_classes(classes)

    def set_classes(self, classes: Sequence[str]) -> None:
        """Set the names of the classes, and their number unless it is known.

        Raises:
            ValueError: the names or their number differ from those of the model.
        """
        names = list(classes)
        if self.classes is not None and names != self.classes:
            raise ValueError(f"The model has the classes {self.classes}, but got {names}. Use data with its classes.")
        number = self.hparams["num_classes"]
        if number is None:
            self.net.set_num_classes(len(names))
            self._set_num_classes(len(names))
        elif number != len(names):
            raise ValueError(f"num_classes is {number}, but got {len(names)} classes: {names}.")
        self.classes = names
        self.hparams.update(num_classes=len(names), classes=names)

    def _set_num_classes(self, number: int) -> None:
        self.net = self.net.to(memory_format=self.memory_format)
        # The checks of arguments would synchronize host and device in each batch.
        self.val_acc = MulticlassAccuracy(number, average="micro", validate_args=False)
        self.test_acc = MulticlassAccuracy(number, average="micro", validate_args=False)
        self.test_confusion = MulticlassConfusionMatrix(number, validate_args=False)

    def configure_model(self) -> None:
        """Use the classes of the data module.

        Raises:
            ValueError: the classes differ from those of the model, or their number is unknown.
        """
        classes = getattr(getattr(self._trainer, "datamodule", None), "classes", None)
        if classes:
            self.set_classes(classes)
        elif self.hparams["num_classes"] is None and self.trainer.ckpt_path is None and not self.trainer.predicting:
            raise ValueError(
                "num_classes is None, and the data module has no `classes`. Set model.num_classes, or use a data module"
                " with the names of the classes in this attribute, such as ImageFolder."
            )

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Use the classes of a checkpoint.

        Raises:
            ValueError: the classes differ from those of the data.
        """
        classes = checkpoint.get("hyper_parameters", {}).get("classes")
        if classes:
            self.set_classes(classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (batch, ``num_classes``)."""
        return self.net(images.contiguous(memory_format=self.memory_format))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch, a scalar."""
        images, labels = batch
        loss = self.train_loss(self(images), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=False, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``val_loss`` and ``val_acc``."""
        self._evaluate("val", self.val_acc, batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``test_loss`` and ``test_acc``, and update the confusion matrix."""
        images, labels = batch
        predicted = self._evaluate("test", self.test_acc, batch).argmax(dim=1)
        self.test_confusion.update(predicted, labels)
        if batch_idx == 0:
            both = zip(labels[:_SAMPLES].tolist(), predicted[:_SAMPLES].tolist(), strict=True)  # synchronizes once
            names = [(self.name_of(true), self.name_of(guess)) for true, guess in both]
            captions = [true if true == guess else f"true {true},\npredicted {guess}" for true, guess in names]
            write_pictures(self.trainer, "test_samples", images[:_SAMPLES], captions)

    def on_test_epoch_end(self) -> None:
        """Write the confusion matrix."""
        write_confusion_matrix(self.trainer, "test", self.test_confusion.compute(), self.classes)
        self.test_confusion.reset()

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the probabilities of the classes, float32 of shape (batch, ``num_classes``)."""
        images, _ = batch
        return self(images).float().softmax(dim=1)

    def name_of(self, number: int) -> str:
        """Return the name of a class, or its number if the classes have no names."""
        return str(number) if self.classes is None else self.classes[number]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer and, if there is one, the schedule, which is stepped once per optimizer step.

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


class PredictionTable(BasePredictionWriter):
    """Writes ``predictions.csv`` with the most probable class of each predicted image.

    The columns are ``path``, ``class`` and ``probability``. If the data module is not an `ImageFolder`, ``path`` is the
    index of the image in the dataset.

    Args:
        dirpath: folder of the file.
    """

    def __init__(self, dirpath: str) -> None:
        super().__init__(write_interval="batch")
        self.path = Path(dirpath) / "predictions.csv"
        self._rows: list[tuple[int, str, float]] = []
        self._samples: Sequence[tuple[str, Any]] | None = None  # of an ImageFolder

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin a new table."""
        splits = getattr(getattr(trainer, "datamodule", None), "splits", {})
        self._rows, self._samples = [], getattr(splits.get("predict"), "samples", None)

    def write_on_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        prediction: Tensor,
        batch_indices: Sequence[int] | None,
        batch: tuple[Tensor, Tensor],
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Add the rows of a batch. This is a host-device synchronization."""
        best = prediction.max(dim=1)
        name_of: Callable[[int], str] = getattr(pl_module, "name_of", str)
        # the batches of an ImageFolder contain the numbers of their images, and leave out those that cannot be read
        has_numbers = self._samples is not None or batch_indices is None
        numbers = batch[1].tolist() if has_numbers else batch_indices
        columns = (numbers, map(name_of, best.indices.tolist()), best.values.tolist())
        self._rows += zip(*columns, strict=True)

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the table of all processes, in the order of the images, and print its path."""
        tables: list[Any] = [self._rows]
        if trainer.world_size > 1:
            tables = [None] * trainer.world_size
            dist.all_gather_object(tables, self._rows)
        if not trainer.is_global_zero:
            return
        samples = self._samples
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            table.writerow(["path", "class", "probability"])
            for number, name, probability in sorted(row for rows in tables for row in rows):
                table.writerow([number if samples is None else samples[number][0], name, f"{probability:.4f}"])
        print(f"Predictions: {self.path}")
