"""Write figures of a run: confusion matrices, and images of samples with their predictions.

The report includes all files in the folder ``figures`` of a run: images (PNG, JPEG), and confusion matrices (JSON).
Modules and callbacks can call these functions, also with Lightning's Trainer. Only rank 0 writes files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.common.files import write_text
from trainer.record.measures import folder_of_run

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import PIL.Image

FOLDER = "figures"
"""Name of the folder."""

_COLUMNS = 8
_SIDES = (72, 256)  # pixels: smaller images are enlarged by an integer factor, larger ones reduced
_MARGIN, _LINE = 6, 16  # pixels: around an image, and the height of a line of its caption


def figures_of(trainer: pl.Trainer) -> Path | None:
    """Create and return the folder for figures of the current run, or return None on ranks above 0 or without a folder.

    Args:
        trainer: ``self.trainer`` in a module.
    """
    folder = folder_of_run(trainer) if trainer.is_global_zero else None
    if folder is None:
        return None
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    return folder / FOLDER


def write_confusion_matrix(
    trainer: pl.Trainer, name: str, counts: Tensor, classes: Sequence[str] | None = None
) -> None:
    """Write a confusion matrix to ``figures/NAME.json``.

    Args:
        trainer: ``self.trainer`` in a module.
        name: such as ``"test"``.
        counts: shape (classes, classes): rows are the true classes and columns the predicted ones, as torchmetrics'
            ``MulticlassConfusionMatrix`` computes them.
        classes: names of the classes. Default: None, numbers.

    Raises:
        ValueError: if ``counts`` is not square, or the number of names differs from the number of classes.
    """
    if counts.dim() != 2 or counts.shape[0] != counts.shape[1]:
        raise ValueError(f"Got counts of shape {tuple(counts.shape)}, expected (classes, classes).")
    if classes is not None and len(classes) != len(counts):
        raise ValueError(f"Got {len(classes)} names for {len(counts)} classes.")
    folder = figures_of(trainer)
    if folder is not None:
        names = [str(name) for name in (range(len(counts)) if classes is None else classes)]
        content = {"kind": "confusion matrix", "classes": names, "counts": counts.tolist()}
        write_text(folder / f"{name}.json", json.dumps(content) + "\n")


def write_pictures(trainer: pl.Trainer, name: str, images: Tensor, captions: Sequence[str] = ()) -> None:
    """Write images to ``figures/NAME.png``, eight in a row.

    Args:
        trainer: ``self.trainer`` in a module.
        name: such as ``"test_samples"``.
        images: shape (count, channels, height, width) with 1 or 3 channels. uint8, or floating point: then each image
            is rescaled from its minimum and maximum.
        captions: a string for each image, with one or several short lines. Default: no captions.

    Raises:
        ValueError: if ``images`` has another shape.
    """
    if images.dim() != 4 or images.shape[1] not in (1, 3):
        expected = "(count, channels, height, width) of 1 or 3 channels"
        raise ValueError(f"Got images of shape {tuple(images.shape)}, expected {expected}.")
    folder = figures_of(trainer)
    if folder is not None and len(images):
        sheet(images, captions).save(folder / f"{name}.png")


def sheet(images: Tensor, captions: Sequence[str] = ()) -> PIL.Image.Image:
    """Return one image with all images, eight in a row. The arguments are those of :func:`write_pictures`."""
    from PIL import Image, ImageDraw, ImageFont

    pixels = _visible(images).expand(-1, 3, -1, -1).permute(0, 2, 3, 1).cpu().numpy()
    side = max(pixels.shape[1:3])
    factor = max(1, -(-_SIDES[0] // side)) if side <= _SIDES[1] else _SIDES[1] / side
    height, width = (max(1, round(length * factor)) for length in pixels.shape[1:3])
    font = ImageFont.load_default()
    lines = [caption.splitlines() for caption in captions]
    widths = [math.ceil(font.getlength(line)) for caption_lines in lines for line in caption_lines]
    step_x = max([width, *widths]) + _MARGIN
    step_y = height + _MARGIN + _LINE * max(map(len, lines), default=0)
    size = min(len(pixels), _COLUMNS) * step_x, -(-len(pixels) // _COLUMNS) * step_y
    whole = Image.new("RGBA", size)  # transparent, for light and dark pages
    draw = ImageDraw.Draw(whole)
    for index, image in enumerate(pixels):
        x, y = index % _COLUMNS * step_x, index // _COLUMNS * step_y
        whole.paste(Image.fromarray(image).resize((width, height), Image.Resampling.NEAREST), (x, y))
        for number, line in enumerate(lines[index] if index < len(lines) else ()):
            draw.text((x, y + height + 2 + number * _LINE), line, fill=(128, 136, 144, 255), font=font)
    return whole


def _visible(images: Tensor) -> Tensor:
    """Return the images as uint8."""
    if images.dtype == torch.uint8:
        return images
    images = images.detach().float().nan_to_num(0, 0, 0)
    flat = images.flatten(1)
    low, high = flat.amin(1)[:, None, None, None], flat.amax(1)[:, None, None, None]
    return ((images - low) / (high - low).clamp(min=1e-6) * 255).round().byte()
