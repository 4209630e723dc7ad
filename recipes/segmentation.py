"""Segmentation, which classifies each pixel of an image: a UNet, its training, and masks as image files."""

import colorsys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from PIL import Image
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics.classification import MulticlassConfusionMatrix
from torchmetrics.segmentation import DiceScore

from recipes.schedules import with_schedule
from trainer import log_images
from trainer.record.figures import figures_of, write_confusion_matrix, write_pictures


class UNet(nn.Module):
    """A UNet (Ronneberger, Fischer and Brox 2015, https://arxiv.org/abs/1505.04597) with padding and BatchNorm.

    Convolutions are padded, so that masks are as large as images. BatchNorm follows each 3x3 convolution.

    Args:
        num_classes: number of output channels.
        in_channels: channels of the images.
        width: channels of the first level; each level below has twice as many.
        depth: levels below the first; each halves height and width, which must be multiples of ``2 ** depth``.
    """

    def __init__(self, num_classes: int, *, in_channels: int = 3, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.multiple = 2**depth
        self.down = nn.ModuleList(map(_block, [in_channels, *widths], widths))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * channels, channels, kernel_size=2, stride=2) for channels in widths[-2::-1]
        )
        self.merge = nn.ModuleList(_block(2 * channels, channels) for channels in widths[-2::-1])
        self.classify = nn.Conv2d(width, num_classes, kernel_size=1)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (batch, ``num_classes``, height, width).

        Raises:
            ValueError: the height or width cannot be halved ``depth`` times.
        """
        if images.shape[-1] % self.multiple or images.shape[-2] % self.multiple:
            raise ValueError(
                f"The images have {images.shape[-2]}x{images.shape[-1]} pixels, expected multiples of {self.multiple}:"
                " each level halves them. Set data.image_size, or use fewer levels."
            )
        levels: list[Tensor] = []
        for block in self.down:
            images = block(F.max_pool2d(images, 2) if levels else images)
            levels.append(images)
        merged = levels.pop()
        for up, block in zip(self.up, self.merge, strict=True):
            merged = block(torch.cat([levels.pop(), up(merged)], dim=1))
        return self.classify(merged)


def _block(in_channels: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
    )


class Masks(TypedDict):
    """The predictions of ``Segmenter.predict_step`` for a batch.

    Attributes:
        names: names of the images.
        masks: the class of each pixel, uint8, shape (batch, height, width).
    """

    names: Sequence[str]
    masks: Tensor


class Segmenter(L.LightningModule):
    """Trains a network on ``(images, masks)`` with the sum of the cross-entropy and the Dice loss.

    ``images`` is float of shape (batch, 3, height, width), ``masks`` is int64 of shape (batch, height, width), with 0
    for the background. The module logs ``train_loss`` at every step and, over a whole epoch, ``val_loss`` and
    ``val_dice``, ``test_loss`` and ``test_dice``: the Dice score, in [0, 1], is computed for each class over all pixels
    of the epoch, and averaged over the classes without the background. A test also adds to the run's report a confusion
    matrix of the pixels, and the first images, each above its true and its predicted mask.

    Args:
        net: maps images to logits of shape (batch, ``num_classes``, height, width).
        optimizer: called with the parameters and returns the optimizer; in a config, ``_partial_: true``.
        scheduler: called with the optimizer and the number of optimizer steps of the run; returns a schedule that is
            stepped after every optimizer step (see `recipes.schedules`). Default: None, a constant learning rate.
        num_classes: number of classes including the background, at most 256.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        scheduler: Callable[[Optimizer, int], LRScheduler] | None = None,
        *,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.save_hyperparameters("num_classes")
        self.net = net
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.val_dice = _dice_score(num_classes)
        self.test_dice = _dice_score(num_classes)
        self.test_confusion = MulticlassConfusionMatrix(num_classes, validate_args=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (batch, ``num_classes``, height, width)."""
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch, a scalar."""
        images, masks = batch
        loss = segmentation_loss(self(images), masks)
        self.log("train_loss", loss, on_step=True, on_epoch=False, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Log ``val_loss`` and ``val_dice``. Return the predicted ``masks``, int64, of the shape of the true ones."""
        return {"masks": self._evaluate("val", self.val_dice, batch)}

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``test_loss`` and ``test_dice``, and update the confusion matrix of the pixels."""
        images, masks = batch
        predicted = self._evaluate("test", self.test_dice, batch)
        self.test_confusion.update(predicted, masks)
        if batch_idx == 0:
            two = (classes[:8].byte().cpu().numpy() for classes in (masks, predicted))  # host-device synchronization
            columns = np.stack([_column(image, *both) for image, *both in zip(images[:8], *two, strict=True)])
            write_pictures(self.trainer, "test_samples", torch.from_numpy(columns).permute(0, 3, 1, 2))

    def on_test_epoch_end(self) -> None:
        """Write the confusion matrix."""
        write_confusion_matrix(self.trainer, "test", self.test_confusion.compute())
        self.test_confusion.reset()

    def predict_step(self, batch: tuple[Tensor, Sequence[str]], batch_idx: int) -> Masks:
        """Return the most likely class of each pixel, for a batch of images and their names."""
        images, names = batch
        return {"names": names, "masks": self(images).argmax(dim=1).to(torch.uint8)}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer and, if there is one, the schedule, which is stepped once per optimizer step."""
        return with_schedule(self.make_optimizer(self.net.parameters()), self.make_scheduler, self)

    def _evaluate(self, stage: str, dice: DiceScore, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, masks = batch
        logits = self(images)
        predicted = logits.argmax(dim=1)
        dice.update(predicted, masks)
        options = {"on_step": False, "on_epoch": True, "prog_bar": True, "batch_size": len(masks)}
        self.log(f"{stage}_loss", segmentation_loss(logits, masks), sync_dist=True, **options)
        self.log(f"{stage}_dice", dice, **options)
        return predicted


def segmentation_loss(logits: Tensor, masks: Tensor) -> Tensor:
    """Return the cross-entropy, in nats per pixel, plus the Dice loss, in [0, 1]; a scalar, in float32 or better.

    The Dice loss is that of Milletari, Navab and Ahmadi, "V-Net" (2016), with p, not p squared, in the denominator:
    1 - 2 sum(p t) / (sum(p) + sum(t)) for each class over the whole batch, averaged over the classes without the
    background. A class with few pixels has the same weight as the others. The sums are computed in float32: in float16
    they overflow from 65,504 pixels on.

    Args:
        logits: shape (batch, classes, height, width).
        masks: int64, shape (batch, height, width).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # keep float64
    chances = logits.softmax(dim=1)[:, 1:]
    truth = F.one_hot(masks, logits.shape[1]).movedim(-1, 1)[:, 1:]
    over = (0, 2, 3)
    both, either = (chances * truth).sum(over), chances.sum(over) + truth.sum(over)
    dice = (2.0 * both + 1.0) / (either + 1.0)  # 1 for a class that is in neither mask
    return F.cross_entropy(logits, masks) + 1.0 - dice.mean()


def _dice_score(num_classes: int) -> DiceScore:
    return DiceScore(
        num_classes, include_background=False, average="macro", aggregation_level="global", input_format="index"
    )


class MaskWriter(BasePredictionWriter):
    """Writes the masks that `Segmenter` predicts: a PNG for each image, with the class of each pixel as its value.

    The files have a palette: the background is black, and each class has a color. ``numpy.asarray(Image.open(file))``
    returns the classes. ``overview.png`` shows the first images above their masks.

    Args:
        dirpath: folder of the masks; it is created.
        overview: images in ``overview.png``; 0 for none.

    Attributes:
        written: number of masks written by this process.
    """

    def __init__(self, dirpath: str | Path, overview: int = 8) -> None:
        super().__init__(write_interval="batch")
        self.dirpath = Path(dirpath)
        self.overview = overview
        self.written = 0
        self._shown: list[np.ndarray] = []

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Create the folder."""
        self.written = 0
        self._shown = []
        self.dirpath.mkdir(parents=True, exist_ok=True)

    def write_on_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        prediction: Masks,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the masks of a batch.

        Raises:
            ValueError: the name of an image contains a folder.
        """
        # Host-device synchronization: the masks are fetched from the device.
        for index, (name, mask) in enumerate(zip(prediction["names"], prediction["masks"].cpu().numpy(), strict=True)):
            if Path(name).name != name:
                raise ValueError(
                    f"Got the image name {name!r}, expected a name without folders: masks are saved under it."
                )
            coloured(mask).save(self.dirpath / f"{name}.png")
            self.written += 1
            if len(self._shown) < self.overview:
                self._shown.append(_column(batch[0][index], mask))

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the overview, and log the folder of the masks."""
        if trainer.is_global_zero and self._shown:
            overview = Image.fromarray(np.concatenate(self._shown, axis=1))
            overview.save(self.dirpath / "overview.png")
            if (figures := figures_of(trainer)) is not None:
                overview.save(figures / "predicted_masks.png")
        self._shown = []
        rank_zero_info(f"The masks are in {self.dirpath}")


class MaskPictures(L.Callback):
    """Logs the first images of each validation to TensorBoard, W&B and MLflow, above their true and predicted masks.

    Args:
        count: number of images of the first batch; 0 for none.
    """

    def __init__(self, count: int = 4) -> None:
        self.count = count

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: tuple[Tensor, Tensor],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Log the images of the first batch."""
        if batch_idx or not self.count or trainer.sanity_checking or not trainer.is_global_zero:
            return
        images, *masks = (
            tensor[: self.count].cpu() for tensor in (*batch, outputs["masks"])
        )  # host-device synchronization
        columns = [
            _column(image, *both) for image, *both in zip(images, *(m.byte().numpy() for m in masks), strict=True)
        ]
        log_images(trainer, "val_masks", torch.from_numpy(np.stack(columns)).permute(0, 3, 1, 2))


def coloured(mask: np.ndarray) -> Image.Image:
    """Return an image with a palette and the values of ``mask``, uint8 of shape (height, width)."""
    image = Image.fromarray(mask)
    image.putpalette([channel for number in range(256) for channel in _colour(number)])
    return image


def _colour(number: int) -> tuple[int, int, int]:
    """Return black for 0, otherwise a color that differs clearly from those of nearby numbers."""
    if number == 0:
        return 0, 0, 0
    red, green, blue = colorsys.hsv_to_rgb(number * 0.618034 % 1.0, 0.65, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def _column(image: Tensor, *masks: np.ndarray) -> np.ndarray:
    """Return an image above its masks, uint8 of shape (height, width, 3)."""
    return np.concatenate([_visible(image), *(np.asarray(coloured(mask).convert("RGB")) for mask in masks)])


def _visible(image: Tensor) -> np.ndarray:
    """Return an image of shape (3, height, width) as uint8 of shape (height, width, 3), scaled to 0 to 255."""
    pixels = image.float().cpu()
    pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp(min=1e-6)
    return (pixels * 255.0).round().to(torch.uint8).permute(1, 2, 0).numpy()
