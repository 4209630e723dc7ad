"""Datasets as LightningDataModules, imported at first use: each needs only its own packages.

Images come in batches ``(images, labels)``: ``images`` is float32 of shape (batch, 3, height, width), normalized;
``labels`` is int64 of shape (batch,). The docstrings of the other data modules describe their batches.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    "ByteText": "text",
    "CIFAR10": "cifar10",
    "Caltech256": "caltech256",
    "DigitScans": "digit_scans",
    "DigitScenes": "digit_scenes",
    "Digits": "digits",
    "Examples": "examples",
    "ImageFolder": "image_folder",
    "PackedText": "packed_text",
    "RandomVectors": "random_vectors",
    "Tabular": "tabular",
    "UnreadableImageError": "image_folder",
}

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
