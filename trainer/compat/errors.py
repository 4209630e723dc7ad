"""Make our configuration errors Lightning's, too, so that ``except MisconfigurationException`` catches them.

``trainer.errors`` must not import Lightning, which takes seconds, because the command line imports it to report
mistyped arguments.
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
