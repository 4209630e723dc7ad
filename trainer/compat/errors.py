"""Our configuration errors are Lightning's, too: code that catches ``MisconfigurationException`` catches them.

``trainer.errors`` may not import Lightning, which takes seconds: the command line answers typos with it.
"""

from __future__ import annotations

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import _TunerExitException

from trainer.errors import ConfigurationError

TunerExit = _TunerExitException
"""Raised by Lightning's BatchSizeFinder and LearningRateFinder to end the run once they have a result."""


def adopt() -> None:
    """Make ``ConfigurationError`` a ``MisconfigurationException``; once is enough."""
    if not issubclass(ConfigurationError, MisconfigurationException):
        ConfigurationError.__bases__ = (*ConfigurationError.__bases__, MisconfigurationException)
