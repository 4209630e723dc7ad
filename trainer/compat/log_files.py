"""Loggers that go on in the files, or in the W&B or MLflow run, of an earlier run, where they would begin anew."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.csv_logs import CSVLogger as FabricCSVLogger
from lightning.fabric.loggers.csv_logs import _ExperimentWriter
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from trainer.compat.checkpoint_io import local_path
from trainer.errors import rank_zero_warn
from trainer.files import write_text

CHECKPOINTS = "checkpoints/*.ckpt"  # below the folder of a logger: where ModelCheckpoint writes by default


def is_numbered(logger: Any) -> bool:
    """Whether ``logger`` is going to take the next free ``version_<n>``."""
    return isinstance(logger, (TensorBoardLogger, CSVLogger)) and logger._version is None


def take_version(logger: Any, version: Any) -> None:
    """Have ``logger`` write into its folder number ``version``; None for the next free one, when somebody asks."""
    logger._version = version


def newest_version(logger: Any, pattern: str | None = None) -> int | None:
    """The last of the folders of ``logger`` that has files like ``pattern``, or else its own kind of file; or None."""
    if pattern is None:
        pattern = "metrics.csv" if isinstance(logger, CSVLogger) else "events.out.tfevents.*"
    root = local_path(logger.root_dir)
    folders: Iterable[Path] = () if root is None else root.glob("version_*")
    numbers = {folder.name.removeprefix("version_"): folder for folder in folders if any(folder.glob(pattern))}
    return max((int(number) for number in numbers if number.isdecimal()), default=None)


def place_of(logger: Any) -> int | str | None:
    """Where ``logger`` is, for `go_on`: how many rows its CSV file has, or the id of its run in W&B or MLflow, or None.

    What it has is written to the file first.
    """
    if isinstance(logger, WandbLogger):
        return logger.version
    if isinstance(logger, MLFlowLogger):
        return logger._run_id
    return _rows_written(logger)


def _rows_written(logger: Any) -> int | None:
    if not isinstance(logger, FabricCSVLogger) or logger._experiment is None:
        return None
    logger.save()
    path = local_path(logger.experiment.metrics_file_path)
    if path is None or not path.is_file():
        return 0
    with path.open("rb") as file:
        return max(0, sum(1 for _ in file) - 1)


def go_on(logger: Any, step: int | None, place: int | str | None = None) -> None:
    """Have ``logger`` go on where it was, if it is one that we know: CSV, TensorBoard, W&B, MLflow.

    Args:
        logger: has not written yet, or has written to its files everything.
        step: of the next row. Those of this step and later are dropped, for they will be made again; None keeps all.
            W&B and MLflow keep all: rows of one step that are made twice are the same.
        place: `place_of` the logger then, where that is known. So many rows of a CSV file are kept: that is more exact.
    """
    if isinstance(place, str):
        _go_on_in_run(logger, place)
        return
    count = place
    if isinstance(logger, TensorBoardLogger) and logger._experiment is None and step is not None:
        logger._kwargs["purge_step"] = step
    if isinstance(logger, FabricCSVLogger) and local_path(logger.log_dir) is not None:
        logger._experiment = (_Rows if isinstance(logger, CSVLogger) else _PlainRows)(logger.log_dir).after(step, count)


def _go_on_in_run(logger: Any, run: str) -> None:
    """Have ``logger`` go on in ``run``, unless somebody has told it which run that is to be."""
    if isinstance(logger, WandbLogger) and logger._experiment is None and logger._id is None:
        logger._id = logger._wandb_init["id"] = run
    elif isinstance(logger, MLFlowLogger) and not logger._initialized and logger._run_id is None:
        try:
            logger._mlflow_client.update_run(run, status="RUNNING")
        except Exception as error:  # it has been deleted, or is elsewhere
            rank_zero_warn(f"MLflow cannot go on with the run {run}, so there is a new one: {error}")
        else:
            logger._run_id = run


class _GoesOn:
    """Of a CSV logger's writer: what is there is kept."""

    metrics_keys: list[str]
    metrics_file_path: str

    def _check_log_dir_exists(self) -> None:
        pass  # Lightning's deletes the file

    def after(self, step: int | None, count: int | None) -> Any:
        """Cut the file, and go on behind what is left."""
        path = local_path(self.metrics_file_path)
        assert path is not None
        if path.is_file():
            self.metrics_keys = _cut(path, step, count)
        return self


class _PlainRows(_GoesOn, _ExperimentWriter):
    pass


class _Rows(_GoesOn, ExperimentWriter):
    pass


def _cut(path: Path, step: int | None, count: int | None) -> list[str]:
    """Drop rows, as `go_on` says, and a line that was not written to its end. Returns the columns."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = [line for line in file if line.endswith("\n")]
    reader = csv.DictReader(lines)
    names = list(reader.fieldnames or [])
    rows = list(reader)[:count]
    if count is None and step is not None:
        rows = [row for row in rows if int(float(row["step"])) < step]
    text = StringIO(newline="")
    writer = csv.DictWriter(text, names)
    if names:
        writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
    return names
