"""CIFAR-10, downloaded by torchvision."""

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, Subset
from torchvision import datasets
from torchvision.transforms import v2

from recipes.data.image_folder import image_to_tensor
from recipes.data.loading import SplitDataModule, check_num_classes, stratified_split

# Mean and standard deviation per channel of the training images in [0, 1].
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)

SIZE = 32  # pixels, height and width


class CIFAR10(SplitDataModule):
    """60,000 color images of 3x32x32: 45,000 to train on, 5,000 to validate, 10,000 to test.

    The validation images are taken from the 50,000 training images. Training images are randomly shifted by up to four
    pixels and mirrored. All images can be enlarged, for networks that expect larger ones.

    Args:
        root: folder of the data; 170 MB are downloaded into it if it does not contain them yet.
        batch_size: images in a batch, on one rank.
        num_workers: processes that prepare batches; 0 prepares them in the training process.
        augment: whether to shift and mirror the training images, before they are enlarged.
        resize_size: enlarge the images to this height and width, in pixels. Default: None, no change.
        crop_size: height and width of the center crop, in pixels. Default: None, no crop.
        mean: mean of each channel in [0, 1], which is subtracted. Default: CIFAR-10's.
        std: standard deviation of each channel; the channel is divided by it. Default: CIFAR-10's.
        limit: number of training images to use, from the first on. Default: None, all that are not held out.
        val_size: number of validation images, taken from the training images after the first ``limit``. Default: None,
            a tenth of all training images.
        split_seed: seed of the validation split, which is stratified; no other seed affects it.
        num_classes: number of classes of the model; must be 10.
        check_md5: whether to compare the files with the original's checksums, and download those that differ. False
            reads custom files in the same format, without a network.

    Raises:
        ValueError: ``num_classes`` is not 10.
    """

    def __init__(
        self,
        root: str | Path = "data",
        batch_size: int = 128,
        *,
        num_workers: int = 2,
        augment: bool = True,
        resize_size: int | None = None,
        crop_size: int | None = None,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        limit: int | None = None,
        val_size: int | None = None,
        split_seed: int = 0,
        num_classes: int = 10,
        check_md5: bool = True,
    ) -> None:
        super().__init__(batch_size, num_workers)
        check_num_classes(num_classes, 10, "CIFAR-10")
        self.root = Path(root).expanduser()
        self.limit = limit
        self.val_size = val_size
        self.split_seed = split_seed
        self.check_md5 = check_md5
        sizes: list[Any] = [] if resize_size is None else [v2.Resize((resize_size, resize_size))]
        sizes += [] if crop_size is None else [v2.CenterCrop(crop_size)]
        shifts = [v2.RandomCrop(SIZE, padding=4), v2.RandomHorizontalFlip()] if augment else []
        to_tensor = image_to_tensor(mean, std)
        self.evaluation = v2.Compose([*sizes, to_tensor])
        self.training = v2.Compose([*shifts, *sizes, to_tensor])

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return self.root / datasets.CIFAR10.base_folder

    def prepare_data(self) -> None:
        """Download the data if it does not exist.

        Raises:
            FileNotFoundError: the archive does not exist and cannot be downloaded. The message contains its address.
        """
        if not self.check_md5:
            self._check_files()
            return
        try:
            datasets.CIFAR10(self.root, download=True)
        except (OSError, RuntimeError) as error:  # no network, a proxy's page instead of the archive, or no permission
            archive = self.root.resolve() / datasets.CIFAR10.filename
            raise FileNotFoundError(
                f"CIFAR-10 is not in {self.root.resolve()} and could not be downloaded from "
                f"{datasets.CIFAR10.url} ({type(error).__name__}: {error}). "
                f"Without a network, download that file on another machine and save it as {archive} "
                f"(MD5 {datasets.CIFAR10.tgz_md5}); the next run extracts it. "
                "Or set data.root to a folder that has it, or use data=digits, which needs no download."
            ) from error

    def setup(self, stage: str) -> None:
        """Read and split the data. A second call is a no-op.

        Raises:
            ValueError: ``limit`` and ``val_size`` exceed the number of images, or a file is not in CIFAR-10's
                format.
        """
        if self.splits:
            return
        images, labels = read_batches(self.folder, [name for name, _ in datasets.CIFAR10.train_list])
        train, val = self._split(labels)
        self.splits = {
            "train": Subset(Pictures(images, labels, self.training), train),
            "val": Subset(Pictures(images, labels, self.evaluation), val),
            "test": Pictures(
                *read_batches(self.folder, [name for name, _ in datasets.CIFAR10.test_list]), self.evaluation
            ),
        }

    def _split(self, labels: list[int]) -> tuple[list[int], list[int]]:
        """Return the positions of the training and of the validation images."""
        first = self.limit or 0
        val_size = len(labels) // 10 if self.val_size is None else self.val_size
        if first < 0 or val_size < 1 or first + val_size > len(labels):
            raise ValueError(
                f"limit is {self.limit} and val_size is {val_size}, but there are only {len(labels)} training images in"
                f" {self.folder} for both. Set data.limit and data.val_size to smaller numbers."
            )
        if first + val_size == len(labels):
            return list(range(first)), list(range(first, len(labels)))
        rest, val = stratified_split(labels[first:], held_out=[val_size], seed=self.split_seed)
        train = rest if self.limit is None else range(first)
        return list(train), [first + position for position in val]

    def _check_files(self) -> None:
        for name, _ in datasets.CIFAR10.train_list + datasets.CIFAR10.test_list:
            if not (self.folder / name).is_file():
                raise FileNotFoundError(
                    f"There is no file {(self.folder / name).resolve()}. Set data.root to the folder that contains"
                    f" {datasets.CIFAR10.base_folder}, or data.check_md5=true to download CIFAR-10."
                )


class Pictures(Dataset[tuple[Tensor, int]]):
    """Images in memory, each transformed when it is indexed.

    Args:
        data: uint8, shape (images, height, width, 3).
        targets: class of each image.
        transform: maps a PIL image to a tensor.
    """

    def __init__(self, data: np.ndarray, targets: list[int], transform: Callable[[Image.Image], Tensor]) -> None:
        self.data = data
        self.targets = targets
        self.transform = transform

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.data[index])), self.targets[index]


def read_batches(folder: Path, names: Sequence[str]) -> tuple[np.ndarray, list[int]]:
    """Read files of CIFAR-10's python version, one after the other.

    The files are pickles. Only arrays and plain containers are unpickled, because a file with another checksum than the
    original's is not trusted.

    Returns:
        Images, uint8 of shape (images, 32, 32, 3), and the class of each.

    Raises:
        ValueError: a file does not have this format.
    """
    images, labels = [], []
    for name in names:
        try:
            with (folder / name).open("rb") as file:
                content = _ArraysOnly(file, encoding="latin1").load()
            images.append(np.asarray(content["data"], dtype=np.uint8).reshape(-1, 3, SIZE, SIZE))
            labels += [int(label) for label in content["labels"]]
        except (pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"{folder / name} is not a file of CIFAR-10's python version ({type(error).__name__}: {error})."
                " Expected a pickled dict with 'data', uint8 of shape (images, 3072), and 'labels'."
            ) from error
    return np.concatenate(images).transpose(0, 2, 3, 1), labels


class _ArraysOnly(pickle.Unpickler):
    """Unpickle NumPy arrays, with the names that NumPy 1 and 2 use, and Python containers."""

    NAMES = frozenset(
        [
            ("_codecs", "encode"),
            ("numpy", "dtype"),
            ("numpy", "ndarray"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy._core.numeric", "_frombuffer"),
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy.core.numeric", "_frombuffer"),
        ]
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.NAMES:
            raise pickle.UnpicklingError(f"it requests {module}.{name}")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)
