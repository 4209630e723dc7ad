"""The logger that ``Trainer(logger=True)`` stands for."""

from __future__ import annotations

from typing import Any

from lightning.fabric.loggers.csv_logs import CSVLogger
from lightning.pytorch.loggers import TensorBoardLogger


class DefaultLogger(TensorBoardLogger):
    """Lightning's TensorBoard logger, which writes its rows into a ``metrics.csv`` in the same folder, too.

    Args:
        save_dir: rows go to ``<save_dir>/lightning_logs/version_<n>``, with the first ``n`` that is free when
            somebody asks for it.

    Raises:
        ModuleNotFoundError: neither ``tensorboard`` nor ``tensorboardX`` is installed.
    """

    def __init__(self, save_dir: str) -> None:
        super().__init__(save_dir)
        self._rows: CSVLogger | None = None

    @property
    def rows(self) -> CSVLogger:
        """What writes ``metrics.csv``."""
        if self._rows is None:
            self._rows = CSVLogger(self.save_dir, name=self.name, version=self.version)
        return self._rows

    @property
    def experiment(self) -> Any:
        """TensorBoard's ``SummaryWriter``."""
        _ = self.rows.experiment  # the first of the two: it expects an empty folder
        return super().experiment

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Record numbers at one step."""
        super().log_metrics(metrics, step)
        if metrics != {"hp_metric": -1}:  # TensorBoard's own, which says that there is no number
            self.rows.log_metrics(metrics, step)

    def save(self) -> None:
        """Write what is recorded."""
        super().save()
        self.rows.save()

    def finalize(self, status: str) -> None:
        """Write what is recorded, and close the files."""
        super().finalize(status)
        self.rows.finalize(status)
