"""Caltech-256: photographs of 256 kinds of things, in the layout in which Caltech publishes them."""

import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, Subset
from torchvision.transforms import InterpolationMode, v2

from recipes.data.image_folder import MEAN, STD, image_to_tensor, read_image
from recipes.data.loading import SplitDataModule, check_num_classes, stratified_split

FOLDER = "256_ObjectCategories"
ARCHIVE = f"{FOLDER}.tar"
ADDRESS = "https://data.caltech.edu/records/nyy15-4j048"
MD5 = "67b4f42ca05d46448c6bb8ecd2220f6d"  # of the archive, as that page says
CLUTTER = "257.clutter"


class Caltech256(SplitDataModule):
    """Photographs of 256 kinds of things, in ``root/256_ObjectCategories/001.ak47/001_0001.jpg`` and so on.

    The folder ``257.clutter`` is left out: it is no class. So are files that are not named as JPEGs, of which the
    original has a few. Grey-scale photographs become colour images of three equal channels. A stratified tenth
    of the images is held out to validate on; it is what ``test`` and ``predict`` see, too.

    Every image is squeezed to ``image_size``, whatever its proportions. Those trained on are mirrored, turned, shifted
    and scaled at random, each within the limits below; what comes in from outside is black.

    Args:
        root: folder that holds ``256_ObjectCategories``, or ``256_ObjectCategories.tar``, which is unpacked then.
        batch_size: images in a batch, on one rank.
        num_workers: processes that prepare batches; 0 prepares them in the training process.
        augment: change the training images at random.
        image_size: height and width of the images the model sees, in pixels.
        flip: probability that an image is mirrored.
        degrees: largest angle by which an image is turned, either way.
        shift: largest shift as a fraction of the image's side, along each axis and either way.
        scale: largest relative change of size, either way.
        mean: subtracted from each channel in [0, 1]; ImageNet's by default.
        std: each channel is divided by.
        split_seed: of the split, which is stratified and depends on nothing else.
        num_classes: of the model; must be the number of class folders, which is 256.
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
    ) -> None:
        super().__init__(batch_size, num_workers)
        self.root = Path(root).expanduser()
        self.split_seed = split_seed
        self.num_classes = num_classes
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

    @property
    def folder(self) -> Path:
        """Where the class folders are."""
        return self.root / FOLDER

    def prepare_data(self) -> None:
        """Unpack the archive unless that was done.

        Raises:
            FileNotFoundError: there is neither folder nor archive; says where to get it and where to put it.
            ValueError: an archive that is damaged, or holds something else.
        """
        if self.folder.is_dir():
            return
        archive = self.root / ARCHIVE
        if not archive.is_file():
            raise FileNotFoundError(
                f"Caltech-256 is not in {self.root.resolve()}: expected the folder {FOLDER} or the file {ARCHIVE} in"
                f" it. Fetch that file (1.2 GB, MD5 {MD5}) from {ADDRESS} and save it as {archive.resolve()}; it is"
                " unpacked on the next run. Or set data.root to a folder that has it. For images of your own:"
                " data=imagefolder data.root=... data.num_classes=..."
            )
        unpack(archive, FOLDER)

    def setup(self, stage: str) -> None:
        """List and split the images; a second stage finds it done.

        Raises:
            ValueError: the number of classes is not ``num_classes``, or there are too few images to split.
        """
        if self.splits:
            return
        classes = class_folders(self.folder)
        check_num_classes(self.num_classes, len(classes), str(self.folder))
        samples = [(file, label) for label, folder in enumerate(classes) for file in jpegs(folder)]
        labels = [label for _, label in samples]
        counts = Counter(labels)
        few = [folder.name for label, folder in enumerate(classes) if counts[label] < 2]
        if few:
            raise ValueError(
                f"There are fewer than two JPEGs in {', '.join(few[:10])} of {self.folder}: expected one to train on"
                " and one to validate. Add some, or take the folder away and set data.num_classes."
            )
        size = max(len(samples) // 10, len(classes))
        train, val = stratified_split(labels, held_out=[size], seed=self.split_seed)
        self.splits = {
            "train": Subset(Photographs(samples, self.training), train),
            "val": (held_out := Subset(Photographs(samples, self.evaluation), val)),
            "test": held_out,
        }


class Photographs(Dataset[tuple[Tensor, int]]):
    """Image files, each read when it is asked for.

    Args:
        samples: file and class of each.
        transform: from an RGB image to what the model sees.
    """

    def __init__(self, samples: Sequence[tuple[Path, int]], transform: Callable[[Image.Image], Tensor]) -> None:
        self.samples = samples
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file, label = self.samples[index]
        return self.transform(read_image(file)), label


def class_folders(folder: Path) -> list[Path]:
    """The folders of the classes in ``folder``, without the clutter, by their numbers."""
    return sorted(child for child in folder.iterdir() if child.is_dir() and child.name != CLUTTER)


def jpegs(folder: Path) -> list[Path]:
    """The files directly in ``folder`` that are named as JPEGs, in alphabetical order; hidden ones left out."""
    named = (file for file in folder.iterdir() if file.suffix.lower() in (".jpg", ".jpeg"))
    return sorted(file for file in named if file.is_file() and not file.name.startswith("."))


_FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Python 3.11.4 has brought it: modes and owners of an archive are not taken over. What leads elsewhere we refuse."""


def unpack(archive: Path, name: str) -> None:
    """Unpack the folder ``name`` of a tar archive beside it, whole or not at all.

    Raises:
        ValueError: the archive is damaged, does not hold the folder, or has files that would land elsewhere.
    """
    with TemporaryDirectory(dir=archive.parent, prefix=f".{name}.") as folder:
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(folder, members=_harmless(tar), **_FILTER)
            (Path(folder) / name).rename(archive.parent / name)
        except (tarfile.TarError, EOFError, FileNotFoundError) as error:
            raise ValueError(
                f"{archive.resolve()} cannot be unpacked ({type(error).__name__}: {error}). Expected a tar archive that"
                f" holds the folder {name}. Fetch it anew."
            ) from error


def _harmless(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members of an archive, as long as each is a file or a folder that lands where it is unpacked."""
    for member in tar:
        path = PurePosixPath(member.name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or ":" in member.name or not (member.isfile() or member.isdir()):
            raise tarfile.TarError(f"{member.name!r} would land elsewhere, or is no file")
        yield member
