"""Image data sets as LightningDataModules. Every batch is ``(images, labels)``.

``images`` is float32 of shape (batch, 3, height, width), normalised; ``labels`` is int64 of shape (batch,).
"""

from recipes.data.cifar10 import CIFAR10
from recipes.data.digits import Digits
from recipes.data.image_folder import ImageFolder, UnreadableImageError

__all__ = ["CIFAR10", "Digits", "ImageFolder", "UnreadableImageError"]
