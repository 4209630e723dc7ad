"""What W&B and MLflow are told of a run of the command line beside what it logs: its settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger


class Tracked(Callback):
    """Logs the settings of a run as hyper-parameters in W&B and MLflow; notes in ``run.json`` which run it is there.

    Args:
        settings: plain containers, without secrets; {} to log none.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._ids: dict[str, str] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Log the settings; on one process."""
        for logger in trainer.loggers if trainer.is_global_zero else ():
            if isinstance(logger, WandbLogger):
                self._ids["wandb"] = str(logger.version)
                logger.log_hyperparams(dict(self._settings))
            elif isinstance(logger, MLFlowLogger):
                self._ids["mlflow"] = str(logger.run_id)
                logger.log_hyperparams(not_there_yet(logger, dict(_flat(self._settings))))

    def run_facts(self) -> dict[str, Any]:
        """The ids of the run, by where."""
        return {"tracking": self._ids}


def not_there_yet(logger: MLFlowLogger, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``parameters``, by full name, that the run does not have: MLflow refuses to change one."""
    known = logger.experiment.get_run(logger.run_id).data.params
    return {name: value for name, value in parameters.items() if name not in known}


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value
