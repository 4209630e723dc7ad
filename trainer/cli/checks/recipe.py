"""The recipe that ``checks`` look at: its config, and what the checks have made of it so far. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainer.cli.arguments import Arguments, UsageError
from trainer.cli.tune import plain
from trainer.cli.validate import validate


class Loaded(NamedTuple):
    """What has come of a dataloader.

    Args:
        batch: the first.
        first: seconds until it was there: workers start, files are opened.
        seconds: for each batch after it; None where there is no other.
        timed: how many these were.
        workers: processes that load; None where the loader does not tell.
    """

    batch: Any
    first: float
    seconds: float | None
    timed: int
    workers: int | None


@dataclass
class Recipe:
    """A recipe.

    Args:
        name: such as ``mine``; ``unnamed`` for a config that the command line has put together.
        settings: its config, resolved, of a short training.
        data: the data module that `loaded` came from, or the module where that has the data itself.
        loaded: a batch, and how long it took.
        peak: bytes that a step takes on one device; None where that could not be predicted.
        operations: floating-point operations of a forward pass; None where they could not be counted.
        failure: why the memory could not be predicted.
    """

    name: str
    settings: dict[str, Any]
    data: Any = None
    loaded: Loaded | None = None
    peak: int | None = None
    operations: int | None = None
    failure: UsageError | None = None


def compose(arguments: Arguments) -> Recipe:
    """The recipe that the command line names.

    Raises:
        UsageError: what ``fit`` would refuse.
    """
    config = validate(arguments)
    return Recipe(config.hydra.runtime.choices.get("recipe") or "unnamed", plain(config, Path("outputs")))
