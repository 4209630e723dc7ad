"""Caltech-256: photographs of 256 kinds of objects, in the layout that Caltech publishes."""

import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, Literal

from torchvision.transforms import InterpolationMode, v2

from recipes.data.image_folder import MEAN, STD, ImageFolder, Samples, image_to_tensor

FOLDER = "256_ObjectCategories"
ARCHIVE = f"{FOLDER}.tar"
ADDRESS = "https://data.caltech.edu/records/nyy15-4j048"
MD5 = "67b4f42ca05d46448c6bb8ecd2220f6d"  # of the archive, published on that page
CLUTTER = "257.clutter"


class Caltech256(ImageFolder):
    """Photographs of 256 kinds of objects, in ``root/256_ObjectCategories/001.ak47/001_0001.jpg`` and so on.

    The folder ``257.clutter``, which is not a class, and the few files that are not JPEGs are left out. A tenth of the
    images, stratified by class, is held out; validation, `test` and `predict` use these images.

    Every image is resized to ``image_size``, without preserving its aspect ratio. Training images are randomly
    mirrored, rotated, shifted and scaled within the limits below; areas outside the original image become black.

    Args:
        root: folder with ``256_ObjectCategories``, or with ``256_ObjectCategories.tar``, which is then unpacked.
        batch_size: images in a batch, on one rank.
        num_workers: processes that prepare batches; 0 prepares them in the training process.
        augment: whether to change the training images at random.
        image_size: height and width of the images in a batch, in pixels.
        flip: probability that an image is mirrored.
        degrees: largest rotation in either direction, in degrees.
        shift: largest shift in either direction along each axis, as a fraction of the image's side.
        scale: largest relative change of size, in either direction.
        mean: mean of each channel in [0, 1], which is subtracted. Default: ImageNet's.
        std: standard deviation of each channel; the channel is divided by it. Default: ImageNet's.
        split_seed: seed of the split; no other seed affects it.
        num_classes: number of classes of the model; must be the number of class folders, which is 256.
        on_error: see `ImageFolder`.
    """

    def __init__(
        self,
        root: str | Path = "data",
        batch_size: int = 64,
        *,
        num_workers: int = 2,
        augment: bool = True,
        image_size: int = 224,
        flip: float = 0.5,
        degrees: float = 15.0,
        shift: float = 0.0625,
        scale: float = 0.1,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        split_seed: int = 42,
        num_classes: int = 256,
        on_error: Literal["raise", "skip"] = "raise",
    ) -> None:
        super().__init__(
            Path(root) / FOLDER,
            num_classes,
            batch_size,
            split_seed=split_seed,
            num_workers=num_workers,
            on_error=on_error,
        )
        resize, to_tensor = v2.Resize((image_size, image_size)), image_to_tensor(mean, std)
        move = v2.RandomAffine(
            degrees,
            translate=(shift, shift),
            scale=(1.0 - scale, 1.0 + scale),
            interpolation=InterpolationMode.BILINEAR,
        )
        self.evaluation = v2.Compose([resize, to_tensor])
        self.training = v2.Compose([resize, v2.RandomHorizontalFlip(flip), move, to_tensor])
        if not augment:
            self.training = self.evaluation

    def prepare_data(self) -> None:
        """Unpack the archive if the folder does not exist.

        Raises:
            FileNotFoundError: neither the folder nor the archive exists. The message contains the archive's address.
            ValueError: the archive is damaged, or does not contain the folder.
        """
        if self.root.is_dir():
            return
        home = self.root.parent
        archive = home / ARCHIVE
        if not archive.is_file():
            raise FileNotFoundError(
                f"Caltech-256 is not in {home.resolve()}: expected the folder {FOLDER} or the file {ARCHIVE} in it."
                f" Download that file (1.2 GB, MD5 {MD5}) from {ADDRESS} and save it as {archive.resolve()}; the next"
                " run extracts it. Or set data.root to a folder that has it. For your own images: +recipe=images"
                " data.root=FOLDER"
            )
        unpack(archive, FOLDER)

    def class_names(self, folder: Path) -> list[str]:
        """Return the names of the class folders in ``folder``, without the clutter."""
        return [name for name in super().class_names(folder) if name != CLUTTER]

    def files(self, folder: Path) -> list[str]:
        """Return the paths of the JPEGs directly in ``folder``."""
        named = (file for file in folder.iterdir() if file.suffix.lower() in (".jpg", ".jpeg"))
        return sorted(str(file) for file in named if file.is_file() and not file.name.startswith("."))

    def _samples(self, split: str) -> Samples:
        if split != "predict":
            return super()._samples(split)
        return [(file, number) for number, (file, _) in enumerate(super()._samples("val"))]


_FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""The filter, new in Python 3.11.4, ignores modes and owners. `_harmless` refuses paths outside the folder."""


def unpack(archive: Path, name: str) -> None:
    """Extract the folder ``name`` of a tar archive next to the archive, completely or not at all.

    Raises:
        ValueError: the archive is damaged, does not contain the folder, or has files that would be extracted elsewhere.
    """
    with TemporaryDirectory(dir=archive.parent, prefix=f".{name}.") as folder:
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(folder, members=_harmless(tar), **_FILTER)
            (Path(folder) / name).rename(archive.parent / name)
        except (tarfile.TarError, EOFError, FileNotFoundError) as error:
            raise ValueError(
                f"{archive.resolve()} cannot be extracted ({type(error).__name__}: {error}). Expected a tar archive"
                f" with the folder {name}. Download it again."
            ) from error


def _harmless(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an archive. Raise an error at one that is not a file or folder below the target folder."""
    for member in tar:
        path = PurePosixPath(member.name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or ":" in member.name or not (member.isfile() or member.isdir()):
            raise tarfile.TarError(f"{member.name!r} would be extracted outside the folder, or is not a file")
        yield member
