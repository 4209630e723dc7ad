"""Shared by the data modules: a reproducible split, and the construction of a DataLoader."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class ImageTensors(Dataset[tuple[Tensor, Tensor]]):
    """Images held in memory, read a whole batch at a time: one indexing operation instead of one per image.

    Args:
        images: float32, shape (samples, channels, height, width).
        labels: int64, shape (samples,).
        augment: called with a batch of images, returns one of the same shape. None: images as they are.
    """

    def __init__(self, images: Tensor, labels: Tensor, augment: Callable[[Tensor], Tensor] | None = None) -> None:
        self.images = images
        self.labels = labels
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices)
        images = self.images[chosen]
        return (images if self.augment is None else self.augment(images)), self.labels[chosen]

    @staticmethod
    def collate(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the batch unchanged: `__getitems__` has already collated it."""
        return batch


class SplitDataModule(L.LightningDataModule):
    """The loaders of three splits. A subclass fills ``splits`` in its ``setup``.

    Args:
        batch_size: samples in a batch, on one rank.
        num_workers: processes that prepare batches; 0 prepares them in the training process.
        **loader: further options of every DataLoader.

    Attributes:
        splits: the data by name: ``"train"``, ``"val"`` and ``"test"``.
    """

    def __init__(self, batch_size: int, num_workers: int, **loader: Any) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.splits: dict[str, Dataset[Any]] = {}
        self._options = loader

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled batches of ``batch_size``; the few samples left over after the last are dropped."""
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[Any]:
        """Every validation sample once, in order."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """Every test sample once, in order."""
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """The test samples."""
        return self._loader("test")

    def _loader(self, split: str) -> DataLoader[Any]:
        return make_loader(
            self.splits[split],
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            training=split == "train",
            **self._options,
        )


def stratified_split(labels: Sequence[int], held_out: Sequence[int], seed: int) -> list[list[int]]:
    """Disjoint lists of positions: those to train on, then one list for every size in ``held_out``.

    Each has the classes in the proportions of the whole. The outcome depends on the arguments alone: no
    global random state is read or changed.

    Args:
        labels: class of every sample.
        held_out: how many samples to hold out, for each split besides the first.
        seed: of the split, and of nothing else.

    Returns:
        ``1 + len(held_out)`` ascending lists that together hold every position once.
    """
    from sklearn.model_selection import train_test_split  # not needed by data sets that are split in another way

    labels = np.asarray(labels)
    rest = np.arange(len(labels))
    splits = []
    for size in held_out:
        rest, split = train_test_split(rest, test_size=size, random_state=seed, stratify=labels[rest])
        splits.append(sorted(split.tolist()))
    return [sorted(rest.tolist()), *splits]


def make_loader(
    dataset: Dataset[Any], *, batch_size: int, num_workers: int, training: bool, **options: Any
) -> DataLoader[Any]:
    """A DataLoader: for training shuffled and without a short last batch, otherwise in order and complete.

    The short last batch is left out because BatchNorm cannot normalise over a single image. Shuffling and
    augmentation draw from torch's own generator, so ``seed_everything`` decides them and a checkpoint of the
    random state restores them.

    Args:
        dataset: has a length.
        batch_size: images in a batch, on one rank.
        num_workers: processes that prepare batches; 0 prepares them in the training process.
        training: shuffle, and drop a short last batch.
        options: passed on to the DataLoader.

    Raises:
        ValueError: ``training``, and a process has less than one full batch of the data.
    """
    processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    size = math.ceil(len(dataset) / processes)  # type: ignore[arg-type]  # shared out by the Trainer
    if training and size < batch_size:
        each = f" for each of {processes} processes" if processes > 1 else ""
        advice = f"Set data.batch_size to at most {size}." if size else "Check the source of the data."
        raise ValueError(
            f"batch_size is {batch_size}, but there are {size} training samples{each}, not a full batch. {advice}"
        )
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=training,
        drop_last=training,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=torch.cuda.is_available(),
        **options,
    )


def check_num_classes(given: int, found: int, source: str) -> None:
    """Raise a ValueError when the configured number of classes is not the one the data has."""
    if given != found:
        raise ValueError(f"num_classes is {given}, but {source} has {found} classes. Set data.num_classes={found}.")
