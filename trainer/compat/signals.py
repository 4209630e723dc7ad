"""Signals: Lightning's handlers of SIGTERM and of SLURM's requeueing, and what a Ctrl-C must not interrupt."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.exceptions import SIGTERMException


class Interruptible(Protocol):
    """A loop, or a part of one, that raises its ``interruption`` when the current batch is over."""

    interruption: BaseException | None


class Signals(_SignalConnector):
    """Lightning's handlers. A SIGTERM ends the run with a ``SIGTERMException`` after the batch under way.

    Args:
        trainer: whose processes are told, and whose checkpoint is written before a job is requeued.
        loops: told to end.
    """

    def __init__(self, trainer: Any, loops: Sequence[Interruptible]) -> None:
        super().__init__(trainer)
        self._loops = loops

    def register_signal_handlers(self) -> None:
        """Take the signals over, for one run. In threads other than the main one nothing happens."""
        self._tell(None)
        super().register_signal_handlers()

    def teardown(self) -> None:
        """Give the signals back. Nobody holds on to an exception that was raised, and with it to the run's frames."""
        super().teardown()
        self._tell(None)

    def _sigterm_notifier_fn(self, signum: int, frame: Any) -> None:
        super()._sigterm_notifier_fn(signum, frame)
        self._tell(SIGTERMException())

    def _tell(self, interruption: BaseException | None) -> None:
        for loop in self._loops:
            loop.interruption = interruption


def requeued_checkpoint(trainer: Any) -> str | None:
    """The newest checkpoint that a requeued job has left in ``default_root_dir``; None for none."""
    return _CheckpointConnector(trainer)._hpc_resume_path


@contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """Another Ctrl-C, while the last one is dealt with, does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
