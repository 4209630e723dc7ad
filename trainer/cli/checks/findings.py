"""The input and the results of checks, as facts and as tables. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.terminal import Table

if TYPE_CHECKING:
    import torch


class LoadedBatch(NamedTuple):
    """The first batch of a dataloader, and its speed.

    Args:
        batch: the first batch.
        first: seconds until the first batch, including the start of workers.
        seconds: mean seconds per timed batch; None if there is only one batch.
        timed: number of timed batches: those after the first, except batches that workers had already prefetched.
        workers: number of workers; None if it is unknown.
    """

    batch: Any
    first: float
    seconds: float | None
    timed: int
    workers: int | None


@dataclass
class Recipe:
    """The recipe to check, and the results of earlier checks that later ones need.

    Args:
        name: name of the recipe; ``unnamed`` for a config without a recipe.
        settings: its resolved config, changed to a short run.
        data: the data module of `loaded`, or the module if it has the dataloaders.
        loaded: the first batch, and the speed of its dataloader.
        peak: predicted peak memory of a step on one device, in bytes; None if it could not be predicted.
        operations: floating-point operations of a forward pass; None if they could not be counted.
        words: the overrides of the command line.
    """

    name: str
    settings: dict[str, Any]
    data: Any = None
    loaded: LoadedBatch | None = None
    peak: int | None = None
    operations: int | None = None
    words: list[str] = field(default_factory=list)


@dataclass
class Findings:
    """The results of checks.

    Args:
        recipe: the recipe to check; None to check only the machine.
        devices: devices that a Trainer can use; empty if torch cannot be imported.
        facts: all results, as plain containers. ``checks json`` prints them.
        tables: tables for the terminal.
    """

    recipe: Recipe | None = None
    devices: list[torch.device] = field(default_factory=list)
    facts: dict[str, Any] = field(
        default_factory=lambda: {
            "versions": {}, "problems": [], "remarks": [], "devices": [], "precisions": {}, "speed": None,
            "batch": None, "loading": None, "layers": None, "float16": None, "memory_of_recipe": None, "missed": {},
            "synchronizations": [], "autocast_ops": {}, "verdict": None,
        }
    )  # fmt: skip
    tables: list[Table] = field(default_factory=list)

    def remark(self, text: str) -> None:
        """Add a remark."""
        self.facts["remarks"].append(text)

    def problem(self, text: str) -> None:
        """Add a problem, which makes the exit status 1."""
        self.facts["problems"].append(text)
