"""Data sets as LightningDataModules.

Images come in batches ``(images, labels)``: ``images`` is float32 of shape (batch, 3, height, width), normalised;
``labels`` is int64 of shape (batch,). What the others give is in their docstrings.
"""

from recipes.data.caltech256 import Caltech256
from recipes.data.cifar10 import CIFAR10
from recipes.data.digit_scans import DigitScans
from recipes.data.digit_scenes import DigitScenes
from recipes.data.digits import Digits
from recipes.data.examples import Examples
from recipes.data.image_folder import ImageFolder, UnreadableImageError
from recipes.data.packed_text import PackedText
from recipes.data.random_vectors import RandomVectors
from recipes.data.tabular import Tabular
from recipes.data.text import ByteText

__all__ = [
    "ByteText",
    "CIFAR10",
    "Caltech256",
    "DigitScans",
    "DigitScenes",
    "Digits",
    "Examples",
    "ImageFolder",
    "PackedText",
    "RandomVectors",
    "Tabular",
    "UnreadableImageError",
]
