"""Your own images, in folders named after their classes."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from recipes.data.loading import SplitDataModule, check_num_classes, stratified_split

# Mean and standard deviation per channel of ImageNet's training images in [0, 1], as pretrained weights expect.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

SHOWN = 10
"""Number of file or class names that a message lists."""

_SPLITS_OF_STAGE = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}

Samples = list[tuple[str, int]]
"""The path and the class number of each image."""


class UnreadableImageError(ValueError):
    """A file with the extension of an image that cannot be decoded: truncated, empty, or of another kind."""


class ImageFolder(SplitDataModule):
    """Images in ``root/<class>/``, or in ``root/train/<class>/`` with, optionally, ``root/val`` and ``root/test``.

    Classes are numbered in the alphabetical order of their folders. A folder may contain further folders. Hidden files
    and folders are ignored. Without ``root/val``, a stratified fraction of the training images is held out for
    validation; in the layout ``root/<class>/``, a test uses the held-out images, too. `predict` uses all images below
    ``root/test``, or below ``root`` if there is no such folder. Images for `predict` need no class folders.

    Training images are cropped at random and mirrored; the others are resized and cropped at the center.

    Args:
        root: the folder.
        num_classes: number of class folders, for a check. Default: None, any number.
        batch_size: images in a batch, on one rank. Default: 64.
        val_fraction: fraction of the training images to hold out if there is no ``root/val``, in (0, 1). At least as
            many images as there are classes are held out. Default: 0.1.
        split_seed: seed of that split; no other seed affects it. Default: 42.
        num_workers: processes that prepare batches; 0 prepares them in the training process. Default: 2.
        augment: whether to crop at random and mirror the training images. Default: True.
        resize_size: length of the shorter side before the center crop, in pixels. Default: 256.
        crop_size: height and width of the images in a batch, in pixels. Default: 224.
        mean: mean of each channel in [0, 1], which is subtracted. Default: ImageNet's.
        std: standard deviation of each channel; the channel is divided by it. Default: ImageNet's.
        on_error: ``"raise"`` (default) stops the run with an :class:`UnreadableImageError` at a file that cannot be
            decoded. ``"skip"`` leaves such files out, so that a batch has fewer images; a warning at the end of an
            epoch counts new ones and lists the first ten. A file that the system cannot read (missing, no permission)
            is always an error.

    Attributes:
        classes: the names of the classes; empty before ``setup``, and in `predict`.

    Raises:
        ValueError: ``on_error`` is unknown, or ``val_fraction`` is outside (0, 1).
    """

    def __init__(
        self,
        root: str | Path,
        num_classes: int | None = None,
        batch_size: int = 64,
        *,
        val_fraction: float = 0.1,
        split_seed: int = 42,
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
        if not 0 < val_fraction < 1:
            raise ValueError(f"Got val_fraction={val_fraction!r}, expected a number between 0 and 1, such as 0.1.")
        super().__init__(batch_size, num_workers, **({"collate_fn": collate_readable} if on_error == "skip" else {}))
        self.on_error = on_error
        self.root = Path(root).expanduser()
        self.num_classes = num_classes
        self.val_fraction = val_fraction
        self.split_seed = split_seed
        self.classes: list[str] = []
        to_tensor = image_to_tensor(mean, std)
        self.evaluation = v2.Compose([v2.Resize(resize_size), v2.CenterCrop(crop_size), to_tensor])
        self.training = v2.Compose([v2.RandomResizedCrop(crop_size), v2.RandomHorizontalFlip(), to_tensor])
        if not augment:
            self.training = self.evaluation

    def setup(self, stage: str) -> None:
        """List the images that ``stage`` uses.

        Raises:
            FileNotFoundError: ``root`` or a split's folder is missing, or it contains no images.
            ValueError: the number of classes is not ``num_classes``, two splits have different classes, or a class has
                too few images to split them.
        """
        if not self.root.is_dir():
            raise FileNotFoundError(f"There is no folder {self.root.resolve()}. {_EXPECTED}")
        for split in _SPLITS_OF_STAGE[stage]:
            if split not in self.splits:
                transform = self.training if split == "train" else self.evaluation
                self.splits[split] = Images(self._samples(split), transform, skips=self.on_error == "skip")
        callbacks: list[Any] = getattr(self.trainer, "callbacks", [])
        if self.on_error == "skip" and not any(getattr(callback, "data", None) is self for callback in callbacks):
            callbacks.append(_UnreadableReport(self))  # data modules have no hook at the end of an epoch

    def predict_dataloader(self) -> Any:
        """Return batches ``(images, positions)`` of all images in order, with positions in ``splits["predict"]``."""
        return self._loader("predict")

    @property
    def has_splits(self) -> bool:
        """Whether ``train``, ``val`` or ``test`` in ``root`` contain folders; if not, they are class folders."""
        return any((self.root / split).is_dir() and _folders(self.root / split) for split in ("train", "val", "test"))

    def class_names(self, folder: Path) -> list[str]:
        """Return the names of the class folders in ``folder``."""
        return _folders(folder)

    def files(self, folder: Path) -> list[str]:
        """Return the paths of the images below ``folder``."""
        return _images_below(folder)

    def _samples(self, split: str) -> Samples:
        if split == "predict":
            return self._unlabeled()
        if self.has_splits and (split == "test" or (self.root / "val").is_dir()):
            return self._labeled(self.root / split)
        train, val = self._split(self._labeled(self.root / "train" if self.has_splits else self.root))
        return train if split == "train" else val

    def _split(self, samples: Samples) -> tuple[Samples, Samples]:
        """Return the samples to train on, and those that are held out."""
        labels = [label for _, label in samples]
        few = [self.classes[label] for label, count in Counter(labels).items() if count < 2]
        if few:
            raise ValueError(
                f"There are fewer than two images of {_listed(few)} in {self.root}: expected one for training and one"
                " for validation. Add images, or remove these folders."
            )
        size = max(int(len(samples) * self.val_fraction), len(self.classes))
        split = stratified_split(labels, held_out=[size], seed=self.split_seed)
        train, val = ([samples[position] for position in positions] for positions in split)
        return train, val

    def _labeled(self, folder: Path) -> Samples:
        if not folder.is_dir():
            raise FileNotFoundError(f"There is no folder {folder.resolve()}. {_EXPECTED}")
        names = self.class_names(folder)
        train = self.root / "train"
        expected = self.class_names(train) if self.has_splits and train.is_dir() else names
        if names != expected:
            # Classes are numbered by position, so a missing folder would shift the labels of all later classes.
            raise ValueError(
                f"The classes in {folder} differ from those in {train}: missing"
                f" {sorted(set(expected) - set(names))}, unknown {sorted(set(names) - set(expected))}. Every split"
                " needs the same class folders."
            )
        files = [self.files(folder / name) for name in names]
        if not names or not all(files):
            empty = [name for name, images in zip(names, files, strict=True) if not images]
            reason = f"no images of {_listed(empty)}" if names else "no class folders"
            raise FileNotFoundError(
                f"{folder.resolve()} has {reason}. {_EXPECTED} An image has one of the extensions"
                f" {', '.join(IMG_EXTENSIONS)}."
            )
        if self.num_classes is not None:
            check_num_classes(self.num_classes, len(names), str(folder))
        self.classes = names
        return [(file, label) for label, images in enumerate(files) for file in images]

    def _unlabeled(self) -> Samples:
        folder = self.root / "test" if self.has_splits and (self.root / "test").is_dir() else self.root
        files = _images_below(folder)
        if not files:
            raise FileNotFoundError(f"{folder.resolve()} has no images. Set data.root to a folder of images.")
        return [(file, number) for number, file in enumerate(files)]


_EXPECTED = (
    "Expected ROOT/<class>/<images>, or ROOT/train/<class>/<images> and, optionally, the same classes in ROOT/val and"
    " ROOT/test. Set data.root to that folder."
)


class Images(Dataset[tuple[Tensor, int]]):
    """Image files, each read when it is indexed.

    Args:
        samples: path and class number of each image.
        transform: maps an RGB image to a tensor.
        skips: whether to return None for an image that cannot be decoded. Default: False, an error.

    Attributes:
        unreadable: 1 for each image that could not be decoded, shared with the workers. uint8, shape (images,).
    """

    def __init__(self, samples: Samples, transform: Callable[[Any], Tensor], *, skips: bool = False) -> None:
        self.samples = samples
        self.transform = transform
        self.skips = skips
        self.unreadable = torch.zeros(len(samples), dtype=torch.uint8).share_memory_()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int] | None:  # type: ignore[override]
        """Return the image and its class number, or None if it is skipped.

        Raises:
            UnreadableImageError: the file cannot be decoded.
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


def read_image(path: str | Path) -> Image.Image:
    """Return the image in a file, with three channels of 8 bits.

    Gray values are repeated, a palette is applied, and alpha is dropped. A 16-bit value keeps its upper 8 bits, and
    an animation keeps its first picture.

    Raises:
        UnreadableImageError: the file cannot be decoded, or the range of its pixel values is unknown.
        OSError: the system cannot read the file.
    """
    try:
        with Image.open(path) as image:
            if image.mode.startswith("I;16"):  # `convert` would make all values above 255 white
                return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
            if image.mode in ("I", "F"):
                raise ValueError(f"pixels of 32 bits, mode {image.mode!r}, of unknown range")
            return image.convert("RGB")
    except Exception as error:  # a decoder may raise any exception for a damaged file
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
            raise  # an error of the system, not of the file
        raise UnreadableImageError(
            f"{path} cannot be read as an image ({type(error).__name__}: {error}). Replace or remove it; or, with"
            " data=imagefolder, set data.on_error=skip to skip such files with a warning."
        ) from error


def collate_readable(samples: list[tuple[Tensor, int] | None]) -> Any:
    """Return a batch of the samples that are not None.

    Raises:
        UnreadableImageError: all of them are None.
    """
    readable = [sample for sample in samples if sample is not None]
    if not readable:
        raise UnreadableImageError(
            f"None of the {len(samples)} files of a batch can be read as an image, so the batch would be empty. Set"
            " data.on_error=raise to see the first error, or increase data.batch_size."
        )
    return default_collate(readable)


class _UnreadableReport(L.Callback):
    """Warns at the end of an epoch about the images that were skipped, once in a run about each image.

    Args:
        data: the data module.
    """

    def __init__(self, data: ImageFolder) -> None:
        self.data = data
        self._reported: set[str] = set()

    def on_train_epoch_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self._report(trainer)

    def on_validation_epoch_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._report(trainer)

    def on_test_epoch_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self._report(trainer)

    def on_predict_epoch_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self._report(trainer)

    def _report(self, trainer: Any) -> None:
        skipped, total = [], 0
        for images in self.data.splits.values():
            assert isinstance(images, Images)
            unreadable = images.unreadable
            if trainer.world_size > 1:
                unreadable = unreadable.to(trainer.strategy.root_device, torch.int32)
                unreadable = trainer.strategy.reduce(unreadable, reduce_op="sum").cpu()
            skipped += [images.samples[index][0] for index in unreadable.nonzero().flatten().tolist()]
            total += len(images)
        new = [path for path in skipped if path not in self._reported]
        self._reported.update(new)
        if new:
            rank_zero_warn(f"{len(new)} of {total} images cannot be read and are skipped: {_listed(new)}.")


def image_to_tensor(mean: Sequence[float], std: Sequence[float]) -> v2.Compose:
    """Return the transform from a PIL image to a float32 tensor of shape (3, height, width), scaled and normalized."""
    return v2.Compose([v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])


def _folders(root: Path) -> list[str]:
    return sorted(child.name for child in root.iterdir() if child.is_dir() and not child.name.startswith("."))


def _images_below(folder: Path) -> list[str]:
    paths = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        named = (name for name in sorted(names) if name.lower().endswith(IMG_EXTENSIONS))
        paths += [os.path.join(parent, name) for name in named if not name.startswith(".")]
    return paths


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
