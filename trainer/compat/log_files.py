"""Loggers that go on in the files of an earlier run, where they would delete them or open a folder of their own."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.csv_logs import CSVLogger as FabricCSVLogger
from lightning.fabric.loggers.csv_logs import _ExperimentWriter
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from trainer.compat.checkpoint_io import local_path
from trainer.default_logger import DefaultLogger

CHECKPOINTS = "checkpoints/*.ckpt"  # below the folder of a logger: where ModelCheckpoint writes by default

Row = frozenset[tuple[str, str]]


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


def go_on(logger: Any, step: int | None) -> None:
    """Have ``logger`` go on in its files, where it is one that we know: CSV, TensorBoard, or the default one.

    Args:
        logger: has not written yet, or has written to its files everything.
        step: of the next row. Later ones will be made again and are dropped. Rows of this step may have been made
            before the checkpoint (of a validation inside an accumulation window) or after it: they are kept, and not
            written twice where they are made again. None keeps all.
    """
    if isinstance(logger, TensorBoardLogger) and logger._experiment is None and step is not None:
        logger._kwargs["purge_step"] = step
    rows = logger.rows if isinstance(logger, DefaultLogger) else logger
    if isinstance(rows, FabricCSVLogger) and local_path(rows.log_dir) is not None:
        rows._experiment = (_Rows if isinstance(rows, CSVLogger) else _PlainRows)(rows.log_dir).after(step)


class _GoesOn:
    """Of a CSV logger's writer: what is there is kept, and what is kept is not written twice."""

    metrics: list[dict[str, Any]]
    metrics_keys: list[str]
    metrics_file_path: str
    _kept: frozenset[Row] = frozenset()

    def _check_log_dir_exists(self) -> None:
        pass  # Lightning's deletes the file

    def after(self, step: int | None) -> Any:
        """Cut the file, and go on behind what is left."""
        path = local_path(self.metrics_file_path)
        assert path is not None
        if path.is_file():
            self.metrics_keys, rows = _cut(path, step)
            self._kept = frozenset(map(_as_written, rows))
        return self

    def log_metrics(self, metrics_dict: dict[str, Any], step: int | None = None) -> None:
        """Take a row; one that was written behind the checkpoint and is made again, to the bit, is there already."""
        super().log_metrics(metrics_dict, step)  # type: ignore[misc]
        if _as_written(self.metrics[-1]) in self._kept:
            self.metrics.pop()


class _PlainRows(_GoesOn, _ExperimentWriter):
    pass


class _Rows(_GoesOn, ExperimentWriter):
    pass


def _cut(path: Path, step: int | None) -> tuple[list[str], list[dict[str, str]]]:
    """Drop the rows after ``step``, and a line that was not written to its end. Returns the columns and the rows."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = [line for line in file if line.endswith("\n")]
    reader = csv.DictReader(lines)
    names = list(reader.fieldnames or [])
    rows = [row for row in reader if step is None or int(float(row["step"])) <= step]
    part = path.with_name(f".{path.name}.part")
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        if names:
            writer.writeheader()
        writer.writerows(rows)
    part.replace(path)
    return names, rows


def _as_written(row: dict[str, Any]) -> Row:
    return frozenset((name, str(value)) for name, value in row.items() if str(value))
