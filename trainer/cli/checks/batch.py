"""Load a batch and describe it: shapes, dtypes, ranges, labels, suspicious values, and its images as a picture.

The speed of the dataloader is measured, too.
"""

from __future__ import annotations

import reprlib
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn

from trainer import arguments
from trainer.cli.build import check, make
from trainer.cli.checks import LoadedBatch, Recipe
from trainer.cli.folders import merge_recipes
from trainer.cli.parsing import UsageError
from trainer.cli.targets import Allowlist
from trainer.data.samples import PLAIN, leaves_in, named_tensors_in
from trainer.errors import join_first
from trainer.record.figures import sheet

_SECONDS = 1.0
_MAX_BATCHES = 200
_MOST_COUNTED = 12  # largest number of labels that are listed with their counts
_MOST_IMAGES = 32
_SMALLEST_IMAGE = 8
_IGNORED = (-100, -1)
"""Labels that losses ignore: torch's default, and one that many datasets use."""


def draw(recipe: Recipe) -> LoadedBatch:
    """Build the data of a recipe, set ``recipe.data``, and load batches.

    Raises:
        UsageError: if the config cannot be built, or there is no training data or no batch.
        Exception: any exception of the user's code.
    """
    settings = recipe.settings
    merge_recipes()
    allowlist = Allowlist.of(settings)
    check({name: settings[name] for name in ("precision", "callbacks", "data", "model")}, "", allowlist)
    name = "model" if settings["data"] is None else "data"
    recipe.data = make(settings[name], name, allowlist)
    recipe.data.prepare_data()
    recipe.data.setup("fit")
    loader = recipe.data.train_dataloader()
    if not hasattr(loader, "__iter__"):
        raise UsageError(f"train_dataloader of {name} returns {arguments.describe(loader)}, expected a DataLoader.")
    return load(loader)


def load(
    loader: Any, seconds: float = _SECONDS, most: int = _MAX_BATCHES, clock: Callable[[], float] = time.perf_counter
) -> LoadedBatch:
    """Load batches, and return the first one with the speed of the dataloader.

    Batches that workers prefetched before the first one was returned are not timed, up to half of the batches.

    Args:
        loader: return value of ``train_dataloader``. If it has several dataloaders, all are used.
        seconds: time limit for the batches after the first.
        most: largest number of batches after the first.
        clock: returns the time in seconds.

    Raises:
        UsageError: if there is no batch.
    """
    combined = CombinedLoader(loader)
    loaders = combined.flattened
    ready = max(getattr(loader, "num_workers", 0) * (getattr(loader, "prefetch_factor", 0) or 0) for loader in loaders)
    marks = [clock()]
    batches = (batch for batch, *_ in combined)
    if (first := next(batches, None)) is None:
        advice = "Check that the dataset is not empty and, with drop_last=True, not smaller than a batch."
        raise UsageError(f"Got 0 batches from the training data, expected at least one. {advice}")
    marks.append(clock())
    for _ in islice(batches, most):
        marks.append(clock())
        if marks[-1] - marks[1] > seconds:
            break
    start, *ends = marks[1:]
    skipped = min(ready, len(ends) // 2)
    timed = len(ends) - skipped
    each_took = (marks[-1] - marks[1 + skipped]) / timed if timed else None
    workers = [loader.num_workers for loader in loaders if hasattr(loader, "num_workers")]
    return LoadedBatch(first, start - marks[0], each_took, timed, max(workers, default=None))


class Entry(NamedTuple):
    """An item of a batch, such as a tensor.

    Args:
        name: the expression for it, such as ``batch[0]['image']``.
        shape: shape of a tensor; length of a list of strings or numbers.
        dtype: dtype of a tensor; otherwise the class.
        range: the smallest and the largest finite number.
        content: counts of labels, mean and standard deviation of other numbers, or the text of a string.
        not_finite: number of NaN and inf elements, as a string.
    """

    name: str
    shape: str
    dtype: str
    range: str = ""
    content: str = ""
    not_finite: str = ""


def describe(batch: Any) -> list[Entry]:
    """Return the items of a batch in order."""
    return [_entry(name, value) for name, value in leaves_in(batch, "batch")]


def suspicious(batch: Any) -> list[str]:
    """Return sentences about suspicious values in a batch."""
    tensors = _strided(batch)
    if not tensors:
        return ["The batch has no tensor. Convert its items to tensors in a collate_fn or in training_step."]
    sentences = []
    for name, tensor in tensors:
        if count := _not_finite(tensor):
            sentences.append(f"{name} has {count} among {tensor.numel():,} elements.")
        if tensor.numel() > 1 and tensor.dtype is not torch.bool and bool((tensor == tensor.flatten()[0]).all()):
            value = _number(tensor.flatten()[0].item())
            if _is_labels(tensor):
                sentences.append(f"All labels in {name} are {value}. Check that the training data is shuffled.")
            elif tensor.is_floating_point():
                sentences.append(f"All elements of {name} are {value}, so the model cannot learn from it.")
    return sentences


def labels_out_of_range(batch: Any, classes: int | None) -> str:
    """Return a sentence about labels out of range; "" if all are valid or the labels cannot be identified.

    Args:
        batch: a batch on the host.
        classes: number of classes of the module; None if it is unknown.
    """
    labels = [(name, tensor) for name, tensor in _strided(batch) if _is_labels(tensor) and tensor.numel()]
    if classes is None or len(labels) != 1:
        return ""
    name, tensor = labels[0]
    seen = [label for label in torch.unique(tensor).tolist() if label not in _IGNORED and not 0 <= label < classes]
    expected = f"expected labels from 0 to {classes - 1}, because the model has {classes} classes"
    return f"{name} has the label{'s' * (len(seen) > 1)} {join_first(seen, 5)}, {expected}." if seen else ""


def classes_of(module: nn.Module) -> int | None:
    """Return ``num_classes`` of the module, its parts, metrics and hyperparameters; None if missing or ambiguous."""
    named = [getattr(submodule, "num_classes", None) for submodule in module.modules()]
    named.append(getattr(module, "hparams", {}).get("num_classes"))
    numbers = {number for number in named if isinstance(number, int) and number > 1}
    return numbers.pop() if len(numbers) == 1 else None


def images_in(batch: Any) -> Tensor | None:
    """Return the first images of a batch, of shape (number, 3 or 1, height, width); None if it has no images."""
    for _, tensor in _strided(batch):
        if tensor.dim() != 4 or not len(tensor) or not (tensor.is_floating_point() or tensor.dtype is torch.uint8):
            continue
        images = tensor[:_MOST_IMAGES].detach().cpu().float()
        if images.shape[1] not in (1, 3) and images.shape[3] in (1, 3):
            images = images.permute(0, 3, 1, 2)
        if images.shape[1] in (1, 3) and min(images.shape[2:]) >= _SMALLEST_IMAGE:
            return images
    return None


def save_images(batch: Any, file: Path) -> bool:
    """Write the images of a batch as one picture. Each image is scaled to its own smallest and largest value.

    Returns:
        Whether a picture was written: False if the batch has no images or Pillow is missing.

    Raises:
        OSError: if the picture cannot be written.
    """
    images = images_in(batch)
    if images is None or find_spec("PIL") is None:
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet(images).save(file)
    return True


def _strided(batch: Any) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, tensor in named_tensors_in(batch, "batch") if tensor.layout is torch.strided]


def _entry(name: str, value: Any) -> Entry:
    if isinstance(value, Tensor):
        shape = " x ".join(map(str, value.shape)) or "one number"
        dtype = str(value.dtype).removeprefix("torch.")
        if value.layout is not torch.strided:
            return Entry(name, shape, dtype, content=str(value.layout).removeprefix("torch."))
        return Entry(name, shape, dtype, *_statistics(value), _not_finite(value))
    content = reprlib.repr(value[0] if isinstance(value, (list, tuple)) and value else value)
    if isinstance(value, (list, tuple)):
        kinds = " and ".join(sorted({type(item).__name__ for item in value}))
        return Entry(name, str(len(value)), f"list of {kinds}" if kinds else "list", content=f"the first: {content}")
    return Entry(name, "", type(value).__name__, content=content if isinstance(value, PLAIN) else "not described")


def _is_labels(tensor: Tensor) -> bool:
    """Return whether the tensor has one integer per sample."""
    return tensor.dim() == 1 and not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _statistics(tensor: Tensor) -> tuple[str, str]:
    """Return two strings: the range of the finite numbers, and the counts of labels or mean and standard deviation."""
    if tensor.is_complex() or not tensor.numel():
        return "", ""
    values = tensor.detach()
    if values.is_floating_point():
        values = values.double()
        values = values[values.isfinite()]
        if not values.numel():
            return "", ""
        content = f"mean {_number(values.mean().item())}, std {_number(values.std(correction=0).item())}"
    else:
        labels, counts = torch.unique(values, return_counts=True)
        pairs = zip(labels.tolist(), counts.tolist(), strict=True)
        content = ", ".join(f"{str(label).lower()}: {count:,}" for label, count in pairs)
        if len(labels) > _MOST_COUNTED:
            content = f"{len(labels)} different values"
    if values.dtype is torch.bool:
        return "", content
    return f"{_number(values.min().item())} to {_number(values.max().item())}", content


def _not_finite(tensor: Tensor) -> str:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return ""
    nans, infs = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    return " and ".join(f"{number:,} {word}" for number, word in ((nans, "NaN"), (infs, "inf")) if number)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
