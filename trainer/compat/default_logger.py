"""The logger that ``Trainer(logger=True)`` stands for."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.fabric.loggers.csv_logs import CSVLogger
from lightning.pytorch.loggers import TensorBoardLogger


def default_logger(save_dir: str) -> TensorBoardLogger:
    """Lightning's TensorBoard logger, whose rows are written into a ``metrics.csv`` in the same folder, too.

    Args:
        save_dir: rows go to ``<save_dir>/lightning_logs/version_<n>``, with the first ``n`` that is free when
            somebody asks for it.

    Raises:
        ModuleNotFoundError: neither ``tensorboard`` nor ``tensorboardX`` is installed.
    """
    logger = TensorBoardLogger(save_dir)
    beside = _RowsBeside(logger)
    # on the instance: programs ask for the type of their logger
    vars(logger).update(log_metrics=beside.log_metrics, save=beside.save, finalize=beside.finalize)
    return logger


def rows_beside(logger: Any) -> CSVLogger | None:
    """What writes the ``metrics.csv`` of a :func:`default_logger`; None for another logger."""
    beside = getattr(vars(logger).get("log_metrics"), "__self__", None)
    return beside.rows if isinstance(beside, _RowsBeside) else None


class _RowsBeside:
    """Does what ``logger`` does with rows, and the same with ``metrics.csv``.

    Args:
        logger: whose folder it is.
    """

    def __init__(self, logger: TensorBoardLogger) -> None:
        self._logger = logger
        self._rows: CSVLogger | None = None
        self._is_open = False

    @property
    def rows(self) -> CSVLogger:
        """What writes ``metrics.csv``."""
        if self._rows is None:
            self._rows = CSVLogger(self._logger.save_dir, name=self._logger.name, version=self._logger.version)
        return self._rows

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Record numbers at one step."""
        TensorBoardLogger.log_metrics(self._logger, metrics, step)
        if metrics != {"hp_metric": -1}:  # TensorBoard's own, which says that there is no number
            self._open().log_metrics(metrics, step)

    def save(self) -> None:
        """Write what is recorded."""
        TensorBoardLogger.save(self._logger)
        self._open().save()

    def finalize(self, status: str) -> None:
        """Write what is recorded, and close the files."""
        TensorBoardLogger.finalize(self._logger, status)
        self.rows.finalize(status)

    def _open(self) -> CSVLogger:
        if not self._is_open:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Experiment logs directory .* exists and is not empty")
                _ = self.rows.experiment  # it expects an empty folder, and TensorBoard's files are there
            self._is_open = True
        return self.rows
