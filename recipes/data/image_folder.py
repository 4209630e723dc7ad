"""Your own images, in folders named after their classes."""

from collections.abc import Sequence
from pathlib import Path

from torchvision import datasets
from torchvision.transforms import v2

from recipes.data.loading import SplitDataModule, check_num_classes, image_to_tensor

# Of ImageNet's training images in [0, 1], per channel: what torchvision's pretrained weights expect.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

SPLITS_OF_STAGE = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("test",)}


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
    ) -> None:
        super().__init__(batch_size, num_workers)
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

    def _read(self, split: str) -> datasets.ImageFolder:
        folder = self.root / split
        if not folder.is_dir():
            raise FileNotFoundError(
                f"There is no folder {folder.resolve()}. Expected {self.root}/{split}/<class>/<images>, and "
                "likewise train and val (test only for test and predict). "
                "Set data.root to the folder that holds them."
            )
        dataset = datasets.ImageFolder(folder, self.transforms[split])
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
