"""Load the first batch of a recipe's training data, and measure the speed of the dataloader."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader

from trainer.arguments import describe
from trainer.cli.build import check, make
from trainer.cli.checks import LoadedBatch, Recipe
from trainer.cli.folders import merge_recipes
from trainer.cli.parsing import UsageError
from trainer.cli.targets import Allowlist

_SECONDS = 1.0
_MAX_BATCHES = 200


def draw(recipe: Recipe) -> LoadedBatch:
    """Build the data of a recipe and load batches. Sets ``recipe.data`` and ``recipe.loaded``.

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
        raise UsageError(f"train_dataloader of {name} returns {describe(loader)}, expected a DataLoader.")
    recipe.loaded = load(loader)
    return recipe.loaded


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
    workers = [getattr(one, "num_workers", None) for one in combined.flattened]
    ahead = [getattr(one, "prefetch_factor", None) or 0 for one in combined.flattened]
    ready = max((number or 0) * factor for number, factor in zip(workers, ahead, strict=True))
    begun = clock()
    batches = (batch for batch, *_ in combined)
    try:
        batch = next(batches)
    except StopIteration:
        raise UsageError(
            "Got 0 batches from the training data, expected at least one. Check that the dataset is not empty and, with"
            " drop_last=True, not smaller than a batch."
        ) from None
    first = clock() - begun
    drawn, marks = 0, [clock()]
    for _ in batches:
        drawn += 1
        marks.append(clock())
        if drawn >= most or marks[-1] - marks[0] > seconds:
            break
    skipped = min(ready, drawn // 2)
    timed = drawn - skipped
    known = [number for number in workers if number is not None]
    each_took = (marks[-1] - marks[skipped]) / timed if timed else None
    return LoadedBatch(batch, first, each_took, timed, max(known) if known else None)
