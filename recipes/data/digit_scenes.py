"""Scenes for segmentation that need no download: scanned digits on pieces of photographs."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from recipes.data.digits import MAX_GREY
from recipes.data.loading import SplitDataModule, make_loader, stratified_split

CLASSES = 11  # the background, and the ten digits
INK = 0.35  # pixels of an enlarged scan, in [0, 1], belong to the digit if they are larger
MOST_DIGITS = 3  # in a scene

# Mean and standard deviation of the pixels of training scenes (seed 0, 64x64) in [0, 1].
MEAN = 0.39
STD = 0.23


class DigitScenes(SplitDataModule):
    """Crops of photographs with one to three scanned digits, and masks with the class of each pixel.

    The digits and the photographs (``china.jpg``, ``flower.jpg``) come with scikit-learn. Every scene has a crop
    of a photograph with a random position, size and contrast; digits of random sizes, positions, colors and contrasts,
    the later ones on top; and noise. Training scenes share no digit and no part of a photograph with other scenes.
    Scenes depend only on ``seed``, their number and their size. They are made in a second, and held in memory.

    A batch to train, validate or test on is ``(images, masks)``: ``images`` is float32 of shape (batch, 3, height,
    width), normalized; ``masks`` is int64 of shape (batch, height, width), 0 for the background and 1 for a digit (or
    1 + d for the digit d, with eleven classes). A batch to predict is ``(images, names)``, from the test scenes.

    Args:
        batch_size: scenes in a batch, on one rank.
        num_workers: processes that prepare batches. 0 is fastest, because there is almost nothing to prepare.
        image_size: height and width of a scene, in pixels; at least 32.
        train_size: scenes to train on.
        val_size: scenes to validate on.
        test_size: scenes to test and predict on.
        num_classes: 2: digit or background; 11: each digit and the background, which is much harder to learn.
        seed: seed of the scenes and of the splits; nothing else uses it.

    Raises:
        ValueError: ``num_classes`` is not 2 or 11, or ``image_size`` is too small.
    """

    def __init__(
        self,
        batch_size: int = 32,
        *,
        num_workers: int = 0,
        image_size: int = 64,
        train_size: int = 1000,
        val_size: int = 200,
        test_size: int = 200,
        num_classes: int = 2,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers, collate_fn=Scenes.collate)
        if num_classes not in (2, CLASSES):
            raise ValueError(f"num_classes is {num_classes}, expected 2 (digit or not) or 11 (which digit).")
        if image_size < 32:
            raise ValueError(f"image_size is {image_size}, expected at least 32 pixels: the digits would be too small.")
        self.image_size = image_size
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}
        self.num_classes = num_classes
        self.seed = seed

    def setup(self, stage: str) -> None:
        """Make the scenes. A second call is a no-op."""
        if self.splits:
            return
        scans, digits = load_digits(return_X_y=True)
        scans = scans.reshape(-1, 8, 8) / MAX_GREY
        photos = load_sample_images().images
        positions = stratified_split(digits, held_out=(270, 270), seed=self.seed)
        for number, (name, chosen) in enumerate(zip(self.sizes, positions, strict=True)):
            draw = np.random.default_rng([self.seed, number])
            parts = [photo[:, :384] if name == "train" else photo[:, 384:] for photo in photos]  # of 640 pixels
            painter = Painter(scans[chosen], digits[chosen], parts, draw)
            images, masks = painter.paint(self.sizes[name], self.image_size)
            if self.num_classes == 2:
                masks = np.minimum(masks, 1)
            names = [f"{name}_{index:04d}" for index in range(len(images))]
            self.splits[name] = Scenes(torch.from_numpy(images), torch.from_numpy(masks), names)

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, list[str]]]:
        """Return the test scenes with their names instead of masks."""
        test = self.splits["test"]
        assert isinstance(test, Scenes)
        named = Scenes(test.images, None, test.names)
        return make_loader(
            named, batch_size=self.batch_size, num_workers=self.num_workers, training=False, **self._options
        )


class Scenes(Dataset[tuple[Tensor, Tensor | str]]):
    """Images with masks or names, read a whole batch at a time.

    Args:
        images: uint8, shape (scenes, 3, height, width).
        masks: uint8, shape (scenes, height, width); None to return the names instead.
        names: names of the scenes.
    """

    def __init__(self, images: Tensor, masks: Tensor | None, names: Sequence[str]) -> None:
        self.images = images
        self.masks = masks
        self.names = names

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor | str]:
        images, others = self.__getitems__([index])
        return images[0], others[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor | list[str]]:
        chosen = torch.as_tensor(indices)
        images = (self.images[chosen] / 255.0 - MEAN) / STD
        if self.masks is None:
            return images, [self.names[index] for index in indices]
        return images, self.masks[chosen].long()

    @staticmethod
    def collate(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the batch unchanged: `__getitems__` has already collated it."""
        return batch


class Painter:
    """Paints scenes.

    Args:
        scans: scans of digits, in [0, 1], shape (digits, 8, 8).
        digits: the digit of each scan, 0 to 9.
        photos: photographs for the backgrounds, uint8, each of shape (height, width, 3).
        draw: the generator of all random numbers.
    """

    def __init__(
        self, scans: np.ndarray, digits: np.ndarray, photos: Sequence[np.ndarray], draw: np.random.Generator
    ) -> None:
        self.scans = scans
        self.digits = digits
        self.photos = photos
        self.draw = draw

    def paint(self, count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ``count`` scenes: images of shape (count, 3, size, size), and masks (count, size, size), all uint8."""
        images = np.empty((count, 3, size, size), dtype=np.uint8)
        masks = np.zeros((count, size, size), dtype=np.uint8)
        for index in range(count):
            image = self._background(size)
            for _ in range(self.draw.integers(1, MOST_DIGITS + 1)):
                self._add_digit(image, masks[index])
            image += self.draw.normal(0.0, self.draw.uniform(0.0, 0.08), image.shape)
            images[index] = (image.clip(0.0, 1.0) * 255.0).round().transpose(2, 0, 1)
        return images, masks

    def _background(self, size: int) -> np.ndarray:
        """Return a detail of a photograph with a random contrast, in [0, 1], shape (size, size, 3)."""
        photo = self.photos[self.draw.integers(len(self.photos))]
        side = int(self.draw.integers(min(size, *photo.shape[:2]) // 2, min(photo.shape[:2]) + 1))
        top, left = (int(self.draw.integers(length - side + 1)) for length in photo.shape[:2])
        detail = Image.fromarray(photo[top : top + side, left : left + side])
        pixels = np.asarray(detail.resize((size, size), Image.Resampling.BILINEAR)) / 255.0
        return pixels.mean() + self.draw.uniform(0.4, 1.0) * (pixels - pixels.mean())

    def _add_digit(self, image: np.ndarray, mask: np.ndarray) -> None:
        """Paint a digit into ``image`` and ``mask``, lighter or darker than the background."""
        index = self.draw.integers(len(self.scans))
        size = len(mask)
        side = int(self.draw.integers(size // 4, size // 2 + 1))
        scan = Image.fromarray(self.scans[index].astype(np.float32))
        ink = np.asarray(scan.resize((side, side), Image.Resampling.BILINEAR))
        top, left = (int(start) for start in self.draw.integers(0, size - side + 1, 2))
        place = slice(top, top + side), slice(left, left + side)
        behind = image[place].mean()
        sign = 1.0 if behind < 0.5 else -1.0
        colour = behind + sign * self.draw.uniform(0.2, 0.5) + self.draw.uniform(-0.2, 0.2, 3)
        image[place] += ink[..., None] * (colour - image[place])
        mask[place][ink > INK] = 1 + self.digits[index]
