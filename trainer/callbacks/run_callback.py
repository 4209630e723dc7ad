"""Callbacks that change something while a run lasts."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule


class RunCallback(Callback):
    """A callback that keeps or changes something for a run, until it is over, however it ends. A copy is of no run.

    Attributes:
        of_no_run: by name, the attributes of a copy that are not the original's.
    """

    of_no_run: ClassVar[Mapping[str, Any]] = {}

    def _let_go(self, trainer: Any) -> None:
        """Put it back, where there is something. Called when a run is over, perhaps twice."""

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """The run is over."""
        self._let_go(trainer)

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """The run is over."""
        self._let_go(trainer)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), **deepcopy(self.of_no_run)}
