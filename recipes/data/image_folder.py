"""Your own images, in folders named after their classes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate
from torchvision import datasets
from torchvision.transforms import v2

from recipes.data.loading import SplitDataModule, check_num_classes

# Of ImageNet's training images in [0, 1], per channel: what torchvision's pretrained weights expect.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

SPLITS_OF_STAGE = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("test",)}


SHOWN = 10
"""Names of unreadable images in a message, before the rest is only counted."""


class UnreadableImageError(ValueError):
    """A file with the name of an image that is none: cut short, empty, or of another kind."""


class ImageFolder(SplitDataModule):
    """Images in ``root/train/<class>/``, ``root/val/<class>/`` and, for tests, ``root/test/<class>/``.

    Classes are numbered in the alphabetical order of their folders. Training images are cropped at random and
    mirrored; the others are resized and cropped at the centre.

    Args:
        root: folder that holds ``train`` and ``val``.
        num_classes: of the model; must be the number of class folders.
        batch_size: images in a batch, on one rank.
        num_workers: processes that prepare batches; 0 prepares them in the training process.
        augment: crop at random and mirror the training images; otherwise they are treated like the others.
        resize_size: length of the shorter side before the centre crop, in pixels.
        crop_size: height and width of the images the model sees, in pixels.
        mean: subtracted from each channel in [0, 1].
        std: each channel is divided by.
        on_error: what to do about a file that cannot be read as an image. ``"raise"`` ends the run with an
            :class:`UnreadableImageError` that names it. ``"skip"`` leaves it out: its batch is smaller by one; at
            the end of each epoch a warning says how many and which, over all workers and processes. A batch
            of nothing else raises all the same. Files that the system cannot read (missing, no permission) are errors
            always.

    Raises:
        ValueError: an unknown ``on_error``.
    """

    def __init__(
        self,
        root: str | Path,
        num_classes: int,
        batch_size: int = 64,
        *,
        num_workers: int = 2,
        augment: bool = True,
        resize_size: int = 256,
        crop_size: int = 224,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        on_error: Literal["raise", "skip"] = "raise",
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f"Got on_error={on_error!r}, expected 'raise' or 'skip'.")
        super().__init__(batch_size, num_workers, **({"collate_fn": collate_readable} if on_error == "skip" else {}))
        self.on_error = on_error
        self.root = Path(root).expanduser()
        self.num_classes = num_classes
        to_tensor = image_to_tensor(mean, std)
        evaluation = v2.Compose([v2.Resize(resize_size), v2.CenterCrop(crop_size), to_tensor])
        training = v2.Compose([v2.RandomResizedCrop(crop_size), v2.RandomHorizontalFlip(), to_tensor])
        self.transforms = {
            "train": training if augment else evaluation,
            "val": evaluation,
            "test": evaluation,
        }

    def setup(self, stage: str) -> None:
        """List the images of the splits that ``stage`` reads.

        Raises:
            FileNotFoundError: a split's folder is missing, or a class without images.
            ValueError: the number of classes is not ``num_classes``, or two splits have different classes.
        """
        for split in SPLITS_OF_STAGE[stage]:
            if split not in self.splits:
                self.splits[split] = self._read(split)
        callbacks: list[Any] = getattr(self.trainer, "callbacks", [])
        is_told = any(isinstance(callback, _SayUnreadable) and callback.data is self for callback in callbacks)
        if self.on_error == "skip" and not is_told:
            callbacks.append(_SayUnreadable(self))  # a data module has no hook at the end of an epoch

    def _read(self, split: str) -> "Images":
        folder = self.root / split
        if not folder.is_dir():
            raise FileNotFoundError(
                f"There is no folder {folder.resolve()}. Expected {self.root}/{split}/<class>/<images>, and "
                "likewise train and val (test only for test and predict). "
                "Set data.root to the folder that holds them."
            )
        try:
            dataset = Images(folder, self.transforms[split], skips=self.on_error == "skip")
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{folder.resolve()} has no images of some class. {error}") from error
        self._check_classes(split, dataset.classes)
        return dataset

    def _check_classes(self, split: str, classes: list[str]) -> None:
        # Classes are numbered by position, so one folder too few would shift all labels after it, in silence.
        train = self.root / "train"
        if train.is_dir():
            expected, _ = datasets.folder.find_classes(train)
            if classes != expected:
                raise ValueError(
                    f"The classes in {self.root / split} are not those in {train}: "
                    f"missing {sorted(set(expected) - set(classes))}, "
                    f"not known {sorted(set(classes) - set(expected))}. "
                    "Every split needs the same class folders."
                )
        check_num_classes(self.num_classes, len(classes), str(self.root / split))


class Images(datasets.ImageFolder):
    """torchvision's, which names the files that it cannot read.

    Args:
        root: folder of the class folders.
        transform: from an image to what the model sees.
        skips: return None for an image that cannot be read, in the place of raising.

    Attributes:
        unreadable: for each image, 1 if it was to be read and could not; shared with the workers. uint8.
    """

    def __init__(self, root: Path, transform: Callable[[Any], Tensor], *, skips: bool) -> None:
        super().__init__(root, transform)
        self.skips = skips
        self.unreadable = torch.zeros(len(self.samples), dtype=torch.uint8).share_memory_()

    def __getitem__(self, index: int) -> tuple[Tensor, int] | None:  # type: ignore[override]
        """The image and its class; None for one that is left out.

        Raises:
            UnreadableImageError: with its name.
        """
        path, label = self.samples[index]
        try:
            image = read_image(path)
        except UnreadableImageError:
            self.unreadable[index] = 1
            if self.skips:
                return None
            raise
        return self.transform(image), label

    def take_unreadable(self) -> Tensor:
        """``unreadable``, as it was up to now; from here on it starts anew."""
        taken = self.unreadable.clone()
        self.unreadable.zero_()
        return taken


def read_image(path: str | Path) -> Image.Image:
    """The image in a file, with three channels of 8 bits.

    Grey ones are repeated, a palette is looked up, alpha is dropped, of 16 bits the upper 8 are taken, and of an
    animation the first picture.

    Raises:
        UnreadableImageError: it is none, or its pixels are numbers of no known range; names the file.
        OSError: the system cannot read the file.
    """
    try:
        with Image.open(path) as image:
            if image.mode.startswith("I;16"):  # convert would make everything above 255 white
                return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
            if image.mode in ("I", "F"):
                raise ValueError(f"pixels of 32 bits, mode {image.mode!r}, of which nobody knows what is white")
            return image.convert("RGB")
    except Exception as error:  # a damaged file breaks a decoder in any way
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
            raise  # the system's, not the file's
        raise UnreadableImageError(
            f"{path} cannot be read as an image ({type(error).__name__}: {error}). Mend it or take it away; or, with"
            " data=imagefolder, set data.on_error=skip, which leaves such files out and says which."
        ) from error


def collate_readable(samples: list[tuple[Tensor, int] | None]) -> Any:
    """A batch of the samples that are not None.

    Raises:
        UnreadableImageError: all of them are.
    """
    readable = [sample for sample in samples if sample is not None]
    if not readable:
        raise UnreadableImageError(
            f"None of the {len(samples)} files of a batch can be read as an image, so there is no batch without them."
            " Set data.on_error=raise to see the first, or take a larger data.batch_size."
        )
    return default_collate(readable)


class _SayUnreadable(L.Callback):
    """Says at the end of an epoch which images were left out of it.

    Args:
        data: whose images.
    """

    def __init__(self, data: ImageFolder) -> None:
        self.data = data

    def on_train_epoch_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self._say(trainer, "train", f" of epoch {trainer.current_epoch}")

    def on_validation_epoch_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self._say(trainer, "val", f" of epoch {trainer.current_epoch}" if trainer.state.fn == "fit" else "")

    def on_test_epoch_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self._say(trainer, "test", "")

    def on_predict_epoch_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self._say(trainer, "test", "")

    def _say(self, trainer: Any, split: str, where: str) -> None:
        images = self.data.splits.get(split)
        if not isinstance(images, Images):
            return
        unreadable = images.take_unreadable()
        if trainer.world_size > 1:
            counts = trainer.strategy.reduce(unreadable.to(trainer.strategy.root_device, torch.int32), reduce_op="sum")
            unreadable = counts.cpu()
        names = [images.samples[index][0] for index in unreadable.nonzero().flatten().tolist()]
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            rank_zero_warn(
                f"{len(names)} of {len(images)} images cannot be read and were left out of {split}{where}:"
                f" {', '.join(names[:SHOWN])}{more}."
            )


def image_to_tensor(mean: Sequence[float], std: Sequence[float]) -> v2.Compose:
    """Return the transform from a PIL image to a float32 tensor of shape (3, height, width), scaled and normalized."""
    return v2.Compose([v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])
