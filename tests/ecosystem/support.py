"""Run a scenario under Lightning's Trainer and ours, and compare the results as scripts/ecosystem does."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _ecosystem.compare import Difference, differences
from _ecosystem.describe import Describer
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import CSVLogger

from tests.parity import QUIET
from trainer import Trainer


class Rows(CSVLogger):
    """Keeps its rows, and writes no file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.rows: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append(["logger", step, dict(metrics)])

    def log_hyperparams(self, params: Any = None) -> None:
        """They are in the checkpoints."""

    def save(self) -> None:
        """There is nothing to write."""


Scenario = Callable[[type[Any], Path], dict[str, Any]]


def unexpected(scenario: Scenario, tmp_path: Path) -> list[Difference]:
    """Return the differences between ``scenario(trainer_class, folder)`` with our Trainer and Lightning's.

    Differences named in the guide are left out.
    """
    records = []
    for name, trainer_class in (("theirs", LightningTrainer), ("ours", Trainer)):
        folder = tmp_path / name
        folder.mkdir()
        before = os.getcwd()
        os.chdir(folder)
        seed_everything(1, workers=True, verbose=False)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Attribute .* is an instance of `nn.Module`")  # Lightning's advice
                if name == "theirs":
                    warnings.simplefilter("ignore")
                records.append({"results": Describer(str(folder))(scenario(trainer_class, folder))})
        finally:
            os.chdir(before)
    return [one for one in differences(*records) if not one.known]


def quiet(**arguments: Any) -> dict[str, Any]:
    """Return arguments of a Trainer with only the loop, and checkpoints."""
    return {**QUIET, "enable_checkpointing": True, "log_every_n_steps": 1, **arguments}
