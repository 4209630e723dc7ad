"""What can go wrong because of something a user gave us.

Each message says what was given, what was expected, and what to do. Invariants of our own are ``assert``s.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pickle import UnpicklingError


class TrainerError(Exception):
    """Base class of the exceptions this package raises."""


class ConfigurationError(TrainerError, ValueError):
    """An argument, or a combination of arguments, that cannot work."""


class UnsupportedError(ConfigurationError, NotImplementedError):
    """Something Lightning offers and this package does not (yet). Raised when the Trainer is built."""


class PrecisionError(ConfigurationError):
    """A precision that does not exist, or that the chosen device cannot compute in."""


class CheckpointError(TrainerError):
    """A checkpoint that cannot be written, found or restored."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no file where a checkpoint was expected."""


class UnsafeCheckpointError(CheckpointError, UnpicklingError):
    """A checkpoint that holds more than tensors and plain containers: loading it could run any code."""


class IncompleteCheckpointError(CheckpointError, KeyError):
    """A checkpoint without something that resuming needs."""

    __str__ = Exception.__str__  # KeyError's shows the message in quotes


class ResumeError(CheckpointError):
    """A resume that would not be exact: the run is set up in another way than the one that wrote the checkpoint.

    ``Trainer(exact_resume=False)`` goes on all the same.
    """


class RequeueError(TrainerError):
    """Slurm was to run this job again, and does not."""


class LossScaleCollapse(TrainerError):  # noqa: N818 - the name it has in the field
    """Gradients overflow in every step, at every loss scale: training has come to an end.

    Raised by ``trainer.callbacks.OverflowReport``. The message has the history of the scale, where the gradients
    overflow, what to try, and the checkpoint to go on from.
    """


class GradientCheckError(TrainerError):
    """A backward pass whose gradients are not the derivatives of the loss."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The sentence `` Did you mean 'x'?`` for the nearest known word, or an empty string.

    >>> did_you_mean("16-mixd", ["16-mixed", "bf16-mixed"])
    " Did you mean '16-mixed'?"
    """
    near = difflib.get_close_matches(given, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
