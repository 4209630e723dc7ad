"""Code shared by the data modules: a reproducible split, and the construction of a DataLoader."""

import math
import warnings
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
        augment: called with a batch of images, returns a batch of the same shape. Default: None, no augmentation.
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
        """Return shuffled batches of ``batch_size`` samples. A shorter last batch is dropped."""
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[Any]:
        """Return every validation sample once, in order."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """Return every test sample once, in order."""
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return the test samples."""
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
    """Return disjoint lists of positions: those to train on, then one list for each size in ``held_out``.

    Each list has the classes in the same proportions as ``labels``. The result depends only on the arguments: no
    global random state is read or changed.

    Args:
        labels: class of every sample.
        held_out: number of samples to hold out, for each split after the first.
        seed: seed of the split.

    Returns:
        ``1 + len(held_out)`` ascending lists that together hold every position once.
    """
    from sklearn.model_selection import train_test_split  # other data sets do not need it

    labels = np.asarray(labels)
    rest = np.arange(len(labels))
    splits = []
    for size in held_out:
        rest, split = train_test_split(rest, test_size=size, random_state=seed, stratify=labels[rest])
        splits.append(sorted(split.tolist()))
    return [sorted(rest.tolist()), *splits]


def fold_of(strata: Sequence[int], test: Sequence[int], seed: int, *, fold: int, folds: int) -> list[list[int]]:
    """Return the positions to train on and to validate in one fold of a stratified cross-validation.

    Args:
        strata: class of every sample.
        test: positions that are in no fold.
        seed: seed of the folds. No global random state is read or changed.
        fold: number of the fold to validate, from 0.
        folds: number of folds.

    Raises:
        ValueError: there is no such fold.
    """
    from sklearn.model_selection import StratifiedKFold

    if not 0 <= fold < folds:
        raise ValueError(f"fold is {fold}, expected 0 to {folds - 1}, because data.folds is {folds}.")
    rest = np.setdiff1d(np.arange(len(strata)), test)
    splits = StratifiedKFold(folds, shuffle=True, random_state=seed).split(rest, np.asarray(strata)[rest])
    return [rest[places].tolist() for places in list(splits)[fold]]


def make_loader(
    dataset: Dataset[Any], *, batch_size: int, num_workers: int, training: bool, **options: Any
) -> DataLoader[Any]:
    """Build a DataLoader: for training, shuffled and without a short last batch; otherwise in order and complete.

    The short last batch is left out because BatchNorm cannot normalize over a single image. Shuffling and
    augmentation draw from torch's default generator, so they are reproducible with ``seed_everything``, and a
    checkpoint of the random state restores them.

    Args:
        dataset: a dataset with a length.
        batch_size: samples in a batch, on one rank. If there are fewer training samples, a batch has all of them.
        num_workers: processes that prepare batches; 0 prepares them in the training process.
        training: whether to shuffle, and drop a short last batch.
        options: passed to the DataLoader.

    Raises:
        ValueError: ``training`` is True, and there are no samples.
    """
    processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    size = math.ceil(len(dataset) / processes)  # type: ignore[arg-type]  # the Trainer divides the data
    if training and not size:
        raise ValueError("There are no training samples. Check the source of the data.")
    if training and size < batch_size:
        each = f" for each of {processes} processes" if processes > 1 else ""
        warnings.warn(
            f"data.batch_size is {batch_size}, but there are only {size} training samples{each}: an epoch is one batch"
            f" of {size}. Set data.batch_size={size} to remove this warning.",
            stacklevel=2,
        )
        batch_size = size
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


def check_num_classes(given: int, actual: int, source: str) -> None:
    """Raise a ValueError if the configured number of classes differs from that of the data."""
    if given != actual:
        raise ValueError(f"num_classes is {given}, but {source} has {actual} classes. Set data.num_classes={actual}.")
