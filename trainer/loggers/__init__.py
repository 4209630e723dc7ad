"""Support for loggers beyond Lightning's interface: one adapter class per logger. Imports no torch.

The adapters of this project are in this package. Another package adds one as a subclass of
:class:`LoggerAdapter`, in a module that the entry-point group ``trainer.loggers`` names, or in any other module that
is imported before the logger is built.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from trainer.common import packages
from trainer.errors import ConfigurationError

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch import Tensor

ENTRY_POINTS = "trainer.loggers"
"""The entry-point group of modules with adapters."""

_BUILT_IN = ("mlflow", "numbered", "wandb")
_ADAPTERS: dict[tuple[str, str], type[LoggerAdapter]] = {}  # by top-level package and name of the logger's class


class LoggedRun(NamedTuple):
    """A run that the command line builds a logger for.

    Args:
        folder: the run's folder.
        name: the setting ``name``, or the recipe.
        sweep: the name of the sweep's folder, or None if the run is not a job.
        former: the logger's id of the earlier run that this run evaluates. None if there is none.
    """

    folder: Path
    name: str | None = None
    sweep: str | None = None
    former: str | None = None

    @property
    def title(self) -> str:
        """The name of the run's folder. For a job, the name of the sweep precedes it: ``SWEEP/0``."""
        return f"{self.sweep}/{self.folder.name}" if self.sweep else self.folder.name


class LoggerAdapter:
    """The support for one kind of logger. The defaults suit a logger that needs no support.

    Args:
        logger: an instance of the class `target`.

    Attributes:
        target: the full name of the logger's class, as in ``_target_``. A subclass that sets it is registered.
        opening_order: loggers with a smaller number open their files first. Default: 2.
        logs_images: whether `log_images` is implemented.
        is_tracker: whether the logger collects the runs of a user, and receives the settings of each run.
    """

    target: ClassVar[str] = ""
    opening_order: ClassVar[int] = 2
    logs_images: ClassVar[bool] = False
    is_tracker: ClassVar[bool] = False

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "target" in vars(cls):
            _ADAPTERS[_key(cls.target)] = cls

    @classmethod
    def key(cls) -> str:
        """Return the name of the logger in ``run.json``: the name of the adapter class in lower case."""
        return cls.__name__.lower()

    # --- the logger's node in a config, before the logger is built --------------------------------------------

    @classmethod
    def check(cls, key: str, node: Mapping[str, Any], checkpoint_files: Any) -> None:
        """Check the settings of the logger.

        Args:
            key: key of the node, such as ``"logger.wandb"``.
            node: the settings.
            checkpoint_files: the node ``checkpoint_files``.

        Raises:
            ConfigurationError: if one is invalid. The message contains the value and the fix.
        """

    @classmethod
    def complete(cls, node: Any, run: LoggedRun) -> Any:
        """Return the settings. Those that are null are filled in for the run."""
        return node

    @classmethod
    def prepare(cls, node: dict[str, Any]) -> None:
        """Create the store that all runs share. Called on one process, before the logger is built."""

    @classmethod
    def end(cls, *, ok: bool) -> None:
        """Close the connection when the command ends; ``ok`` if the run completed or was pruned."""

    # --- the logger -------------------------------------------------------------------------------------------

    @property
    def folder(self) -> str | None:
        """The folder on this machine that the logger writes to, or None."""
        named = (getattr(self.logger, name, None) for name in ("log_dir", "save_dir"))
        path = next((folder for folder in named if isinstance(folder, str | Path)), "")
        return str(path) if path and "://" not in str(path) else None

    @property
    def is_numbered(self) -> bool:
        """Whether the logger will take the next free folder ``version_<n>``."""
        return False

    def use_version(self, version: int | None) -> None:
        """Have a numbered logger write to the folder with this number; None for the next free one."""

    def newest_version(self, pattern: str | None = None) -> int | None:
        """Return the largest number of a folder that has files of the logger, or None.

        Args:
            pattern: glob pattern of the files. Default: None, the names of the logger's own files.
        """
        return None

    def position(self) -> int | str | None:
        """Return the number of rows, or the id of the run, that `resume` continues from; None if neither is known."""
        return None

    def resume(self, step: int | None, position: int | str | None = None) -> None:
        """Continue an interrupted run: its files, or its run in a tracker.

        Args:
            step: step of the next row. Rows of this step and later ones are dropped. None keeps all.
            position: the value that `position` returned when the checkpoint was written; more exact than the step.
        """

    def log_images(self, name: str, images: Any, step: int) -> None:
        """Log images, uint8 of shape (count, height, width, channels)."""

    def log_settings(self, settings: Mapping[str, Any]) -> str | None:
        """Log the settings of a run as hyperparameters. Returns the id of the run, for ``run.json``."""
        return None

    def new_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Return those of the hyperparameters ``parameters`` that the logger accepts."""
        return parameters


class TrackerAdapter(LoggerAdapter):
    """An adapter of a logger that collects runs, and can store checkpoints as artifacts (``log_model``).

    Attributes:
        extra: the extra of this package that installs the logger's package.
    """

    is_tracker: ClassVar[bool] = True
    logs_images: ClassVar[bool] = True
    extra: ClassVar[str]

    @classmethod
    def needed_modules(cls, node: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the modules that the logger imports with these settings."""
        return (cls.extra,)

    @classmethod
    def check(cls, key: str, node: Mapping[str, Any], checkpoint_files: Any) -> None:
        """Check that the package is installed, and that checkpoints can be artifacts."""
        if problem := packages.missing(cls.extra, *cls.needed_modules(node)):
            raise ConfigurationError(f"{key} needs {problem}. To run without it, use logger=default.")
        log_model = node.get("log_model")
        files = checkpoint_files if log_model and isinstance(checkpoint_files, Mapping) else {}
        if files.get("sharded") is True:
            reason = "sharded checkpoints are folders, and artifacts are files. Remove one of the settings."
            raise ConfigurationError(f"{key}.log_model is {log_model}, and checkpoint_files.sharded is true: {reason}")
        if files.get("asynchronous") is True and log_model == "all":
            raise ConfigurationError(
                f"{key}.log_model is all, and checkpoint_files.asynchronous is true: a checkpoint would be sent before"
                f" it is written. Set {key}.log_model=true, which sends the last checkpoints at the end."
            )

    @property
    def folder(self) -> str | None:
        """The folder of the run's checkpoints, ``SAVE_DIR/NAME/ID``; ``SAVE_DIR`` if the run has no id yet."""
        save_dir, run = super().folder, self.position()
        return save_dir if run is None else str(Path(save_dir or "", str(self.logger.name), str(run)))

    def log_settings(self, settings: Mapping[str, Any]) -> str | None:
        """Log the settings, and return the id of the run."""
        self.logger.log_hyperparams(dict(settings))
        return str(self.logger.version)


def fill(node: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """Return ``node`` with its null or missing settings taken from ``values``. Values of None are ignored."""
    return {**node, **{name: value for name, value in values.items() if value is not None and node.get(name) is None}}


def adapter(logger: Any) -> LoggerAdapter:
    """Return the adapter of a logger, from its class or from the closest base class with a registered adapter."""
    _load()
    classes = type.mro(logger.__class__)
    adapters = (_ADAPTERS.get(_key(f"{cls.__module__}.{cls.__qualname__}")) for cls in classes)
    return next((each for each in adapters if each is not None), LoggerAdapter)(logger)


def adapter_class(node: Any) -> type[LoggerAdapter]:
    """Return the adapter class for a logger's node in a config, from its ``_target_``."""
    _load()
    target = str(node.get("_target_", "")) if isinstance(node, Mapping) else ""
    return _ADAPTERS.get(_key(target), LoggerAdapter)


def adapter_classes() -> list[type[LoggerAdapter]]:
    """Return all registered adapter classes."""
    _load()
    return list(_ADAPTERS.values())


def _key(target: str) -> tuple[str, str]:
    root, _, name = re.sub(r"^pytorch_lightning\b", "lightning", target).partition(".")
    return root, name.rpartition(".")[2]


@cache
def _load() -> None:
    """Import the modules with adapters, which register them."""
    names = [f"{__name__}.{module}" for module in _BUILT_IN]
    for name in [*names, *(point.value for point in entry_points(group=ENTRY_POINTS))]:
        importlib.import_module(name.partition(":")[0])


def log_images(trainer: pl.Trainer, name: str, images: Tensor) -> None:
    """Log images to TensorBoard, W&B and MLflow at the current step. Also works with Lightning's Trainer.

    Does nothing on ranks above 0, in the sanity check, and without such a logger. The images are then not copied from
    the device.

    Args:
        trainer: the Trainer with the loggers; ``self.trainer`` in a module.
        name: such as ``"samples"``. W&B and TensorBoard show one row of images with this name. MLflow shows each
            image separately, with the names ``samples/0``, ``samples/1``, and so on.
        images: shape (count, channels, height, width) or (channels, height, width), with 1 or 3 channels; uint8, or
            floating point in [0, 1].

    Raises:
        ValueError: if ``images`` has another shape.
        TypeError: if ``images`` has another dtype.
    """
    adapters = [logger for logger in map(adapter, trainer.loggers) if logger.logs_images]
    if not adapters or not trainer.is_global_zero or trainer.sanity_checking:
        return
    pixels, step = _pixels(images), trainer.global_step
    for each in adapters:
        each.log_images(name, pixels, step)


def _pixels(images: Tensor) -> Any:
    """Return a numpy array of uint8 with shape (count, height, width, channels)."""
    batch = images.detach() if images.dim() == 4 else images.detach()[None]
    if batch.dim() != 4 or batch.shape[1] not in (1, 3):
        expected = "(count, channels, height, width) or (channels, height, width), with 1 or 3 channels"
        raise ValueError(f"Got images of shape {tuple(images.shape)}, expected {expected}.")
    if batch.is_floating_point():
        batch = (batch.float().clamp(0, 1) * 255).round().byte()
    elif str(batch.dtype) != "torch.uint8":
        raise TypeError(f"Got images of {batch.dtype}, expected uint8, or floating point in [0, 1].")
    return batch.permute(0, 2, 3, 1).cpu().numpy()  # a host-device synchronization
