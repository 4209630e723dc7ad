"""The handwritten digits that come with scikit-learn: real scans, and no download."""

import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

from recipes.data.loading import ImageTensors, SplitDataModule, check_num_classes, stratified_split

MAX_GREY = 16.0  # the scans have 17 gray levels, 0 to 16

# Mean and standard deviation of the training pixels (split_seed 0, 32x32) in [0, 1].
MEAN = 0.3055
STD = 0.3239


class Digits(SplitDataModule):
    """1,797 scanned digits of 8x8 pixels as 3x32x32 images: 1,257 to train on, 270 to validate, 270 to test.

    This is the test set of the UCI data set "Optical Recognition of Handwritten Digits", which is included in
    scikit-learn. The images are scaled to [0, 1], enlarged bilinearly, normalized to mean 0 and standard
    deviation 1, and repeated over three channels. They are held in memory.

    Args:
        batch_size: images in a batch, on one rank.
        num_workers: processes that prepare batches. 0 is fastest, because there is almost nothing to prepare.
        augment: whether to rotate, scale and shift every training image slightly (`random_affine`).
        image_size: height and width of the images, in pixels.
        split_seed: seed of the three splits, which are stratified; no other seed affects them.
        num_classes: number of classes of the model; must be 10.

    Raises:
        ValueError: ``num_classes`` is not 10.
    """

    def __init__(
        self,
        batch_size: int = 64,
        *,
        num_workers: int = 0,
        augment: bool = True,
        image_size: int = 32,
        split_seed: int = 0,
        num_classes: int = 10,
    ) -> None:
        super().__init__(batch_size, num_workers, collate_fn=ImageTensors.collate)
        check_num_classes(num_classes, 10, "Digits")
        self.augment = augment
        self.image_size = image_size
        self.split_seed = split_seed

    def setup(self, stage: str) -> None:
        """Load and split the data. A second call is a no-op."""
        if self.splits:
            return
        scans, targets = load_digits(return_X_y=True)
        labels = torch.from_numpy(targets).long()
        images = torch.from_numpy(scans).float().view(-1, 1, 8, 8) / MAX_GREY
        images = F.interpolate(images, size=(self.image_size, self.image_size), mode="bilinear")
        images = ((images - MEAN) / STD).expand(-1, 3, -1, -1)
        positions = stratified_split(targets, held_out=(270, 270), seed=self.split_seed)
        for name, chosen in zip(("train", "val", "test"), positions, strict=True):
            augment = random_affine if self.augment and name == "train" else None
            self.splits[name] = ImageTensors(images[chosen], labels[chosen], augment)


def random_affine(images: Tensor, *, degrees: float = 10.0, scale: float = 0.1, shift: float = 0.125) -> Tensor:
    """Rotate, scale and shift each image by random amounts, uniformly distributed; border pixels fill the empty area.

    Draws from torch's default generator.

    Args:
        images: float, shape (batch, channels, height, width).
        degrees: largest angle, in either direction.
        scale: largest relative change of size, in either direction.
        shift: largest shift in either direction along each axis, as a fraction of half the image's side.

    Returns:
        New images of the same shape and dtype.
    """
    turn, zoom, right, down = (torch.rand(4, len(images)) * 2.0 - 1.0).unbind()
    angle = math.radians(degrees) * turn
    size = 1.0 + scale * zoom
    cosine, sine = size * angle.cos(), size * angle.sin()
    matrices = torch.stack([cosine, -sine, shift * right, sine, cosine, shift * down], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(matrices, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)
