"""The exceptions and warnings of this package.

Each message states the given value, the expected value, and the fix. Internal invariants are ``assert``s.
"""

from __future__ import annotations

import difflib
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from pickle import UnpicklingError
from types import FrameType
from typing import Any


class TrainerError(Exception):
    """Base class of the exceptions that this package defines."""


class ConfigurationError(TrainerError, ValueError):
    """An argument, or a combination of arguments, that cannot work."""


class ArgumentError(ConfigurationError, TypeError):
    """An argument of the Trainer with an unexpected type or value.

    It is also a TypeError, because Lightning raises one for some arguments.
    """


class UnsupportedError(ConfigurationError, NotImplementedError):
    """A feature, or a combination of features, that this package does not support."""


class ClusterError(ConfigurationError):
    """The processes or variables of a launcher (torchrun, Slurm) contradict the Trainer's arguments.

    Also raised if the processes of a run cannot connect, or do not see the same files.
    """


class PrecisionError(ConfigurationError):
    """A precision that does not exist, or that the chosen device cannot compute in."""


class CheckpointError(TrainerError):
    """A checkpoint that cannot be written, found or restored."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the given path."""


class UnsafeCheckpointError(CheckpointError, UnpicklingError):
    """A checkpoint with more than tensors and plain containers: loading it could execute any code."""


class IncompleteCheckpointError(CheckpointError, KeyError):
    """A checkpoint without an entry that resuming requires."""

    __str__ = Exception.__str__  # KeyError.__str__ quotes the message


class CheckpointWriteError(CheckpointError, OSError):
    """A checkpoint, or its folder, that cannot be written. Older files are kept.

    Attributes:
        errno: the error number of the operating system. None if unknown.
    """

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class FolderInUseError(CheckpointError):
    """Another run writes its checkpoints into the same folder."""


class ResumeError(CheckpointError):
    """A resume that would not be exact, because the set-up has changed since the checkpoint was written.

    ``Trainer(exact_resume=False)`` continues with a warning.
    """


class RequeueError(TrainerError):
    """Slurm does not requeue this job."""


class LossScaleCollapse(TrainerError):  # noqa: N818 - the common term
    """Too many optimizer steps in a row were skipped, because gradients were not finite.

    Raised by ``trainer.callbacks.OverflowReport``. The message contains the loss scale before these steps and now and,
    if known, the source of the overflow, the remedy, and a checkpoint to resume from.
    """


class NonFiniteError(TrainerError):
    """A loss, gradients or weights that are not finite. No checkpoint contains such weights.

    Raised by ``trainer.callbacks.NonFiniteGuard``.

    Attributes:
        step: ``trainer.global_step`` when the weight update began, or the checkpoint was due.
        batch_idx: index of the batch that caused it; None if unknown.
        report: the diagnosis of the step (``trainer.diagnosis.report_file.Diagnosis``), or None.
    """

    def __init__(self, message: str, step: int = 0, batch_idx: int | None = None, report: Any = None) -> None:
        super().__init__(message)
        self.step = step
        self.batch_idx = batch_idx
        self.report = report


class LossSpikeError(TrainerError):
    """The loss has spiked more often than the allowed number of rollbacks.

    Raised by ``trainer.callbacks.RollBackOnLossSpike``. The checkpoints from before the spike are kept.
    """


class DataLoaderError(TrainerError, RuntimeError):
    """A worker process of a dataloader has died, or does not respond. Torch's error is the ``__cause__``.

    Attributes:
        stage: stage of the dataloader: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``.
        batch_idx: zero-based index, within the pass, of the current batch or, between two batches, of the next one.
        pids: process ids of the workers that have died; empty if they do not respond.
    """

    def __init__(self, message: str, stage: str = "", batch_idx: int = 0, pids: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.stage = stage
        self.batch_idx = batch_idx
        self.pids = list(pids)


class GradientCheckError(TrainerError):
    """A backward pass with gradients that are not the derivatives of the loss."""


_LIBRARIES = {
    "trainer", "lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torch", "torchmetrics",
    "hydra", "omegaconf", *sys.stdlib_module_names,
}  # fmt: skip
"""Packages that a warning never points into, because the user cannot change their code."""


def refuse_inexact(problem: str, advice: str = "", *, exact: bool) -> None:
    """Raise an error, or warn, because a resumed run will differ from an uninterrupted one.

    Args:
        problem: sentences that describe the difference.
        advice: a sentence that tells how to resume exactly. Default: none.
        exact: whether to raise the error: ``Trainer(exact_resume=...)``. If False, warn.

    Raises:
        ResumeError: if ``exact`` is True.
    """
    if exact:
        raise ResumeError(f"{problem} {advice and f'{advice} '}To resume anyway, set Trainer(exact_resume=False).")
    warn(f"{problem} The run resumes, but not exactly.")


def warn(message: str | Warning, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points to the user's line: the innermost one on the stack that is not in a library.

    Without such a line, as in ``python -m trainer``, it points to the line that calls this function.

    Args:
        message: the text, or a Warning with its category.
        category: the class of the warning. Default: UserWarning.
    """
    caller = sys._getframe(1)  # noqa: SLF001  # as `warnings` and `logging` do
    while caller.f_globals.get("__name__") == __name__ and caller.f_back is not None:
        caller = caller.f_back
    frame: FrameType | None = caller
    while frame is not None and _is_of_library(frame):
        frame = frame.f_back
    frame = frame or caller
    module = frame.f_globals.get("__name__") or "<unknown>"
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


def rank_zero_warn(message: str | Warning, category: type[Warning] = UserWarning) -> None:
    """Issue a warning with :func:`warn` if this process has rank 0."""
    from lightning_utilities.core.rank_zero import rank_zero_only

    if not getattr(rank_zero_only, "rank", None):
        warn(message, category)


def _is_of_library(frame: FrameType) -> bool:
    spec = frame.f_globals.get("__spec__")  # has the module's name even if `python -m` sets `__name__` to `__main__`
    name = str(frame.f_globals.get("__name__") if spec is None else spec.name)
    return name.partition(".")[0] in _LIBRARIES


def expect(holds: bool, expected: str, kind: type[Exception] = ConfigurationError, /, **given: Any) -> None:
    """Raise an error for arguments unless a condition holds: ``Got a=1 and b=2, expected ...``

    Args:
        holds: the condition.
        expected: the end of the sentence.
        kind: class of the error.
        **given: the arguments.
    """
    if not holds:
        *others, last = [f"{name}={value!r}" for name, value in given.items()]
        raise kind(f"Got {', '.join(others)}{' and ' if others else ''}{last}, expected {expected}.")


def is_count(value: Any) -> bool:
    """Return whether ``value`` is an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


ONE_PACKAGE = (
    "write `import trainer.pytorch_lightning` as the first import of the program; or, for `python -m trainer`, of the"
    " module that the config names."
)
"""The fix if ``pytorch_lightning`` and ``lightning.pytorch`` are two packages and should be one."""


_NO_MEMORY = re.compile(
    r"out of memory|DefaultCPUAllocator: (can't|not enough)|_ALLOC(ATION)?_FAILED"
    r"|(FIND|GET) was unable to find an engine",  # cuDNN's message if a convolution gets no memory to compute in
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device or the host has run out of memory. Imports no torch."""
    named = any(cls.__name__ in ("OutOfMemoryError", "MemoryError") for cls in type(error).__mro__)
    return named or (isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None)


def memory_at(error: BaseException) -> dict[str, Any]:
    """Return the entry ``out_of_memory`` of a run's record, in bytes; {} if ``error`` is not an out-of-memory error."""
    usage = error.__dict__.get("memory")
    return {} if usage is None or not is_out_of_memory(error) else {"out_of_memory": usage.facts()}


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return the sentence `` Did you mean 'x'?`` for the nearest known word, or an empty string.

    Case is ignored.

    >>> did_you_mean("16-mixd", ["16-mixed", "bf16-mixed"]), did_you_mean("AdamW", ["adam", "adamw"])
    (" Did you mean '16-mixed'?", " Did you mean 'adamw'?")
    """
    by_lower_case = {name.lower(): name for name in reversed(list(known))}
    matches = difflib.get_close_matches(given.lower(), by_lower_case, n=1, cutoff=0.6)
    return f" Did you mean {by_lower_case[matches[0]]!r}?" if matches else ""


def counted(number: int, noun: str) -> str:
    """Return a number with a noun, in the plural unless the number is 1: ``1 job``, ``2 jobs``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def join_first(texts: Iterable[object], most: int, separator: str = ", ") -> str:
    """Return the first ``most`` texts, and the number of the others.

    >>> join_first("abcd", most=2)
    'a, b and 2 more'
    """
    shown = list(map(str, texts))
    more = len(shown) - most
    return separator.join(shown[:most]) + (f" and {more:,} more" if more > 0 else "")
