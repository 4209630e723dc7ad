"""Make our configuration errors subclasses of Lightning's, so that ``except MisconfigurationException`` catches them.

The command line imports ``trainer.errors`` to report mistyped arguments. Therefore that module must not import
Lightning, which takes seconds.
"""

from __future__ import annotations

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import _TunerExitException

from trainer.errors import ConfigurationError

TunerExit = _TunerExitException
"""Raised by Lightning's BatchSizeFinder and LearningRateFinder to end the run once they have a result."""


def adopt() -> None:
    """Add ``MisconfigurationException`` to the bases of ``ConfigurationError``, unless it is there already."""
    if not issubclass(ConfigurationError, MisconfigurationException):
        ConfigurationError.__bases__ = (*ConfigurationError.__bases__, MisconfigurationException)
