"""The adapters of loggers that number their folders: TensorBoard and CSV."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from trainer.common.files import local_path
from trainer.loggers import LoggerAdapter


class _VersionedLogger(LoggerAdapter):
    """A logger with a folder ``version_<n>`` for each run."""

    files: ClassVar[str]  # the pattern of its files

    @property
    def is_numbered(self) -> bool:
        """Whether the user left the number to the logger."""
        return getattr(self.logger, "_version", None) is None

    def use_version(self, version: int | None) -> None:
        """Set the number; None for the next free one."""
        self.logger._version = version

    def newest_version(self, pattern: str | None = None) -> int | None:
        """Return the largest number of a folder with matching files, or None."""
        root = local_path(self.logger.root_dir)
        folders: Iterable[Path] = () if root is None else root.glob("version_*")
        written = [folder for folder in folders if any(folder.glob(pattern or self.files))]
        numbers = [folder.name.removeprefix("version_") for folder in written]
        return max((int(number) for number in numbers if number.isdecimal()), default=None)


class TensorBoard(_VersionedLogger):
    """TensorBoard's event files."""

    target: ClassVar[str] = "lightning.pytorch.loggers.TensorBoardLogger"
    logs_images: ClassVar[bool] = True
    files: ClassVar[str] = "events.out.tfevents.*"

    def resume(self, step: int | None, position: int | str | None = None) -> None:
        """Make TensorBoard hide the events from ``step`` on."""
        if self.logger._experiment is None and step is not None:
            self.logger._kwargs["purge_step"] = step

    def log_images(self, name: str, images: Any, step: int) -> None:
        """Log the images as one row."""
        self.logger.experiment.add_images(name, images, step, dataformats="NHWC")


class CSV(_VersionedLogger):
    """Lightning's and Fabric's CSV logger."""

    target: ClassVar[str] = "lightning.pytorch.loggers.CSVLogger"
    opening_order: ClassVar[int] = 1  # it expects an empty folder, and may share it with other loggers
    files: ClassVar[str] = "metrics.csv"

    @property
    def is_numbered(self) -> bool:
        """Whether the user left the number to the logger. Fabric's logger chooses it itself."""
        from lightning.pytorch.loggers import CSVLogger

        return isinstance(self.logger, CSVLogger) and super().is_numbered

    @property
    def is_open(self) -> bool:
        """Whether the logger has opened its file."""
        return self.logger._experiment is not None

    def position(self) -> int | None:
        """Save, and return the number of rows in the file, or None if the logger has not opened it."""
        if not self.is_open:
            return None
        self.logger.save()
        path = local_path(self.logger.experiment.metrics_file_path)
        if path is None or not path.is_file():
            return 0
        with path.open("rb") as file:
            return max(0, sum(1 for _ in file) - 1)

    def resume(self, step: int | None, position: int | str | None = None) -> None:
        """Truncate the file after the rows of the checkpoint, and append to it."""
        from trainer.loggers.csv_rows import appending_writer

        if not isinstance(position, str) and local_path(self.logger.log_dir) is not None:
            self.logger._experiment = appending_writer(self.logger, step, position)
