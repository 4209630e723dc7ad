"""Writers that keep the rows of an interrupted run in the files of Lightning's CSV loggers."""

from __future__ import annotations

import csv
from io import StringIO
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from trainer.common.files import local_path, write_text
from trainer.common.lightning_private import FabricWriter


def appending_writer(logger: Any, step: int | None, count: int | None) -> Any:
    """Return a writer for ``logger`` that appends to its existing rows.

    Args:
        logger: a CSV logger that has not opened its file.
        step: drop the rows of this step and of all later ones. None keeps all rows.
        count: the number of rows to keep; takes precedence over ``step``. None if it is unknown.
    """
    writer = (_Rows if isinstance(logger, CSVLogger) else _PlainRows)(logger.log_dir)
    path = local_path(writer.metrics_file_path)
    if path is not None and path.is_file():
        writer.metrics_keys = _cut(path, step, count)
    return writer


class _KeepFile:
    def _check_log_dir_exists(self) -> None:
        pass  # Lightning's version deletes the file


class _PlainRows(_KeepFile, FabricWriter):
    pass


class _Rows(_KeepFile, ExperimentWriter):
    pass


def _cut(path: Path, step: int | None, count: int | None) -> list[str]:
    """Drop the rows as in :func:`appending_writer`, and an incomplete last line. Return the names of the columns."""
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
