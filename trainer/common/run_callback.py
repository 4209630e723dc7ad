"""Callbacks that change something during a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch import Callback, LightningModule

from trainer.errors import UnsupportedError


def refuse_other_trainers(callback: Callback, trainer: pl.Trainer) -> None:
    """Raise an error in Lightning's Trainer, which lacks the hooks or the engine that a callback uses.

    Raises:
        UnsupportedError: if the Trainer is not a ``trainer.Trainer``.
    """
    if not hasattr(trainer, "engine"):
        given = f"Got {type(callback).__name__} in a {type(trainer).__module__}.{type(trainer).__name__}"
        raise UnsupportedError(f"{given}, expected a trainer.Trainer: write `from trainer import Trainer`.")


class RunCallback(Callback):
    """A callback that stores or changes something during a run, and drops or restores it at the end.

    Copies are detached from any run.

    Attributes:
        reset_in_copies: the attributes of a copy that differ from the original's, by name.
    """

    reset_in_copies: ClassVar[Mapping[str, Any]] = {}

    def _omit(self, hook: Callable[..., None]) -> None:
        """Omit an unused hook of the class, so that it adds nothing to a step, unless a subclass overrides it."""
        if getattr(type(self), hook.__name__) is hook:
            vars(self)[hook.__name__] = None

    def _clean_up(self, trainer: pl.Trainer) -> None:
        """Undo the changes, if there are any. Called when a run is over, possibly twice."""

    def on_exception(self, trainer: pl.Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undo the changes, because the run has failed."""
        self._clean_up(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo the changes, because the run is over."""
        self._clean_up(trainer)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), **deepcopy(self.reset_in_copies)}
