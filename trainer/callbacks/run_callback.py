"""Callbacks that change something during a run."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule


class RunCallback(Callback):
    """A callback that stores or changes something during a run, and restores it at the end.

    Copies are detached from any run.

    Attributes:
        of_no_run: the attributes of a copy that differ from the original's, by name.
    """

    of_no_run: ClassVar[Mapping[str, Any]] = {}

    def _let_go(self, trainer: Any) -> None:
        """Restore the changes, if there are any. Called when a run is over, possibly twice."""

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the changes, because the run has failed."""
        self._let_go(trainer)

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Restore the changes, because the run is over."""
        self._let_go(trainer)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), **deepcopy(self.of_no_run)}
