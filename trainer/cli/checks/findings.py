"""What the checks look at, and what they have found, as facts and as tables. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.cli.arguments import UsageError
from trainer.terminal import Table

if TYPE_CHECKING:
    import torch


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
        words: the overrides of the command line.
    """

    name: str
    settings: dict[str, Any]
    data: Any = None
    loaded: Loaded | None = None
    peak: int | None = None
    operations: int | None = None
    failure: UsageError | None = None
    words: list[str] = field(default_factory=list)


@dataclass
class Findings:
    """What the checks have found.

    Args:
        seconds: for measuring speed.
        recipe: that is looked at; None for the machine alone.
        devices: that a Trainer can run on; empty where torch cannot be imported.
        facts: everything, as plain containers: what ``checks json`` prints.
        tables: for a person.
    """

    seconds: float = 2.0
    recipe: Recipe | None = None
    devices: list[torch.device] = field(default_factory=list)
    facts: dict[str, Any] = field(
        default_factory=lambda: {
            "versions": {}, "problems": [], "remarks": [], "devices": [], "precisions": {}, "speed": None,
            "batch": None, "loading": None, "layers": None, "float16": None, "memory_of_recipe": None, "missed": {},
            "host_waits": [], "autocast_ops": {}, "verdict": None,
        }
    )  # fmt: skip
    tables: list[Table] = field(default_factory=list)

    def remark(self, text: str) -> None:
        """Something to know."""
        self.facts["remarks"].append(text)

    def problem(self, text: str) -> None:
        """Something that is broken."""
        self.facts["problems"].append(text)
