"""The folders that a run's ModelCheckpoints write into: which they are, and that no other run has them."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from trainer.checkpoint.folders import LOCK, held
from trainer.compat.checkpoint_io import files_of, local_path

T = TypeVar("T")


def folders_of(trainer: Any) -> list[str]:
    """Where each ModelCheckpoint of ``trainer`` writes or is going to write; paths and URLs. For rank 0.

    Loggers that number their folders choose their number here, if they have not yet.
    """
    savers = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    resolve = "_ModelCheckpoint__resolve_ckpt_dir"
    return list(dict.fromkeys(str(getattr(saver, resolve)(trainer)) for saver in savers))


def claim(trainer: Any, session: ExitStack) -> None:
    """Have the folders for this run alone, until ``session`` closes; a fit writes into them.

    Rank 0 does it, and all ranks raise where it cannot.

    Raises:
        FolderInUseError: another run has one.
        CheckpointWriteError: one cannot be made, or written to.
    """

    def work() -> None:
        folders = folders_of(trainer) if trainer.state.fn is TrainerFn.FITTING else []
        if (files := files_of(trainer.strategy)) is not None:
            savers = (saver for saver in trainer.checkpoint_callbacks if isinstance(saver, OnExceptionCheckpoint))
            files.belong(folders, [saver.ckpt_path for saver in savers])
        for folder in folders:
            if (place := local_path(folder)) is not None:
                session.enter_context(held(place))

    if not trainer.fast_dev_run:
        on_first_rank(trainer, work)


def on_first_rank(trainer: Any, work: Callable[[], T]) -> T:
    """What ``work`` returns, or raises, on rank 0: on all ranks."""
    result: Any = None
    error: Exception | None = None
    if trainer.is_global_zero:
        try:
            result = work()
        except Exception as problem:
            error = problem
    result, error = trainer.engine.broadcast((result, error))
    if error is not None:
        raise error
    found: T = result
    return found


@contextmanager
def without_warnings_of_ours(trainer: Any) -> Iterator[None]:
    """While ModelCheckpoints are set up: they warn of folders that are not empty, and there may be our lock in them.

    Of a run that goes on where another one stopped it is expected anyway.
    """
    with warnings.catch_warnings():
        if trainer.is_global_zero and trainer.state.fn is TrainerFn.FITTING and not trainer.fast_dev_run:
            for folder in folders_of(trainer):
                if trainer.resume == "auto" or _is_empty(folder):
                    what = f"Checkpoint directory {re.escape(folder)} exists and is not empty"
                    warnings.filterwarnings("ignore", message=what)
        yield


def _is_empty(folder: str) -> bool:
    place: Path | None = local_path(folder)
    return place is not None and place.is_dir() and set(os.listdir(place)) <= {LOCK}
