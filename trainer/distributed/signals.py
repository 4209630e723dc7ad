"""Signals: SIGTERM, SIGUSR1 and Ctrl-C end a run after the current step, and save a fit; Slurm's signal requeues it.

The handler only records that a signal has arrived. The rest is done between two batches, on all processes at the same
batch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_info

from trainer.checkpoint import model_checkpoints
from trainer.checkpoint.checkpoint_io import wait_for_saves
from trainer.common.async_max import AsyncMax
from trainer.common.lightning_private import hpc_save_path
from trainer.distributed.child_processes import children, deadline_after
from trainer.distributed.engine import LightningEngine
from trainer.distributed.launchers import ENDING_SIGNALS, SignalForwarder, default_handler, exception_of
from trainer.errors import NonFiniteError, RequeueError, rank_zero_warn
from trainer.loop.evaluation import EvalLoop
from trainer.loop.run_state import RunState

INTERRUPTED = "interrupted.ckpt"
"""The file that an interrupted fit writes to the folder of its first ModelCheckpoint."""


class Signals:
    """Ends or requeues the runs of one Trainer when a signal arrives. It is ``trainer._signal_connector``.

    Args:
        run: the state of the run.
        engine: devices and processes.

    Attributes:
        received_sigterm: whether this run has received a SIGTERM; on several processes, whether any of them has.
        interruption: the exception that has ended this run because of a signal. None without a signal.
    """

    def __init__(self, run: RunState, engine: LightningEngine) -> None:
        self.received_sigterm = False
        self.interruption: BaseException | None = None
        self._run = run
        self._trainer, self._engine, self._progress = run.trainer, engine, run.progress
        self._loop, self._eval_loops = run.loop, run.eval_loops
        self._async_max: AsyncMax | None = None
        self._handlers: dict[int, Any] = {}  # those that were installed before ours
        self._process = 0
        self._requeue_signal: int | None = None
        self._noted = 0  # index in `ENDING_SIGNALS` of the received signal, counted from 1; 0 for none
        self._global_signal = 0  # the largest of all processes
        self._to_requeue = False
        self._interrupts = 0  # number of times that Ctrl-C was pressed
        self._ends = self._holds = self._is_inner = False
        self._first_batch = 0

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_handlers": {}, "_async_max": None, "interruption": None}

    @property
    def received(self) -> int:
        """The signal that ends, or has ended, this run; 0 for none."""
        return ENDING_SIGNALS[self._noted - 1] if self._noted else 0

    # --- one run ----------------------------------------------------------------------------------------------

    def register_signal_handlers(self) -> None:
        """Install the handlers for one run.

        Python allows this only in the main thread. In other threads, no handlers are installed.
        """
        run = self._run
        self.received_sigterm, self.interruption = False, None
        self._noted, self._global_signal, self._interrupts, self._to_requeue = 0, 0, 0, False
        self._ends = self._is_inner = False
        self._process, self._first_batch = os.getpid(), self._progress.batches_started
        self._async_max = self._engine.collectives.async_max(2, "signals") if run.fits else None
        environment = self._engine.connector.cluster_environment
        requeues = environment if isinstance(environment, SLURMEnvironment) and environment.auto_requeue else None
        self._requeue_signal = None if requeues is None else requeues.requeue_signal
        self._update_signal_checks()
        for number in ENDING_SIGNALS if self._requeue_signal is None else [*ENDING_SIGNALS, self._requeue_signal]:
            self._install(number)

    def teardown(self) -> None:
        """Restore the previous handlers, and drop the exception, which keeps the frames of the run alive."""
        if self._holds:
            return  # `ending` does this when the run has ended
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
        self.interruption = self._async_max = None
        self._set_signal_checks(False)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Return a context for a fit's loop: if a signal ends it, its state is saved."""
        try:
            yield
        except BaseException as error:
            if error is self.interruption and not self._is_inner:
                self._save()
            raise
        if self._async_max is not None:
            self._async_max.close()

    @contextmanager
    def inner_run(self) -> Iterator[None]:
        """Return a context for a run in a hook of another run, such as a tuner's. A signal ends both without saving."""
        self._is_inner = True
        try:
            yield
        except BaseException as error:
            self._is_inner = error is self.interruption
            raise
        self._is_inner = False
        self._update_signal_checks()  # the loops have their state from before the inner run again

    @contextmanager
    def ending(self, error: BaseException) -> Iterator[None]:
        """Return a context for a run that ends with ``error``. If a signal caused it, further signals are ignored."""
        engine, decided_together = self._engine, error is self.interruption and self._async_max is not None
        with deadline_after(error, waited_for=engine.runs_here and engine.world_size > 1 and not decided_together):
            if not isinstance(error, KeyboardInterrupt) and error is not self.interruption:
                yield
                return
            self._ends = self._holds = True
            self._install(signal.SIGINT)  # the run may have been interrupted before it installed its handlers
            try:
                yield
            finally:
                self._holds = False
                self.teardown()

    def end_after_run(self) -> None:
        """End the program after a run that has ended normally although a signal had arrived.

        Do not end it after a SIGTERM if the program has its own handler, which was called already.
        """
        number, handled = self.received, callable(signal.getsignal(signal.SIGTERM))
        self._noted = 0
        if number and not (number == signal.SIGTERM and handled):
            raise exception_of(number)

    # --- when a signal arrives --------------------------------------------------------------------------------

    def _install(self, number: int) -> None:
        """Install our handler of a signal, unless the program has its own. A SIGTERM calls both."""
        before = signal.getsignal(number)
        if isinstance(before, SignalForwarder):  # inherited from the process that forked this one
            before = default_handler(number)
        is_ours = before == default_handler(number) or (number == signal.SIGTERM and before is not None)
        if number not in self._handlers and is_ours and threading.current_thread() is threading.main_thread():
            self._handlers[number] = before
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:
            return  # in a dataloader's worker, which was forked from this process and is ended by it
        is_first = not self._noted and not self._to_requeue
        self._interrupts += number == signal.SIGINT
        if not self._ends:
            if self._interrupts > 1 and number == signal.SIGINT:
                raise KeyboardInterrupt  # at once, because the step may take long
            if number == self._requeue_signal:
                self._to_requeue = True
            else:
                self._noted = max(self._noted, 1 + ENDING_SIGNALS.index(signal.Signals(number)))
            self.received_sigterm |= number == signal.SIGTERM
            self._update_signal_checks()
            if is_first:
                self._announce(number)
            if self._async_max is None and self._engine.runs_here and number != signal.SIGINT:
                children.send(number)  # the terminal sends a Ctrl-C to them, too
        before = self._handlers.get(number)
        if number == signal.SIGTERM and callable(before):
            before(number, frame)

    def _announce(self, number: int) -> None:
        """Print that a signal has arrived, with ``os.write``, because ``print`` is not reentrant."""
        if not self._run.is_global_zero:
            return
        saves = model_checkpoints.first_folder(self._run) is not None
        consequence = "and its state is saved" if saves else "and ends"
        if number == self._requeue_signal:
            consequence = "and the job is requeued"
        hint = " Press Ctrl-C again to stop at once." if number == signal.SIGINT else ""
        action = f"the fit finishes the step, {consequence}" if self._run.fits else "the run finishes the batch"
        os.write(2, f"\nReceived {signal.Signals(number).name}: {action}.{hint}\n".encode())

    def _update_signal_checks(self) -> None:
        """Make the loops check for signals if one has arrived here, or may have arrived on another process."""
        self._set_signal_checks(bool(self._noted or self._to_requeue or self._async_max is not None))

    def _set_signal_checks(self, enabled: bool) -> None:
        self._loop.limits.check_signals = self._check_signals if enabled else None
        for loop in self._eval_loops.values():
            loop.check_signals = partial(self._check_signals_in_evaluation, loop) if enabled else None

    # --- between two batches ----------------------------------------------------------------------------------

    def _check_signals(self, before_epoch: bool) -> None:
        """Handle signals between two batches of a fit."""
        known = [self._noted, int(self._to_requeue)]
        if self._async_max is not None:
            known = self._async_max.reduce_now(known) if before_epoch else self._async_max.reduce(known)
        self._handle(*known)

    def _check_signals_in_evaluation(self, loop: EvalLoop) -> None:
        """Handle signals before a batch of an evaluation.

        Inside a fit, a signal ends it at the same batch on all processes. With uneven inputs, they synchronize only
        before batches that all of them have. If these are unknown, a signal takes effect after the validation.
        """
        known = [self._noted, int(self._to_requeue)]
        if self._async_max is None:
            self._handle(*known)
        elif loop.all_have_batch and not (self._is_inner or self._trainer.sanity_checking):
            self._handle(*self._async_max.reduce(known))

    def _handle(self, noted: int, to_requeue: int) -> None:
        self._to_requeue |= bool(to_requeue)
        if to_requeue and not self._is_inner:
            self._to_requeue = False
            self._requeue()
            if self._async_max is None:
                self._update_signal_checks()
        self._global_signal = noted = max(noted, self._global_signal)
        if not noted or (self._engine.may_change_world_size and self._loop.window.is_open):
            return  # wait for the update: a run on another number of processes cannot resume inside a window
        self._noted, self._ends = noted, True
        self.received_sigterm |= self.received == signal.SIGTERM
        self.interruption = exception_of(self.received)
        if isinstance(self.interruption, KeyboardInterrupt) and not self._engine.runs_here:
            # a spawned process that ends with a KeyboardInterrupt counts as successful
            self.interruption = SystemExit(128 + self.received)
        raise self.interruption

    def _save(self) -> None:
        """Save the state of an interrupted fit."""
        run = self._run
        name, step = signal.Signals(self.received).name, run.global_step
        ended = f"{name} has ended the fit after step {step}"
        if self._progress.batches_started == self._first_batch:
            rank_zero_info(f"{ended}, before the first training step, so nothing is saved.")
            return
        folder = model_checkpoints.first_folder(self._run)
        if folder is None:
            rank_zero_info(f"{ended}. Nothing is saved: this Trainer writes no checkpoints.")
            return
        path = f"{folder}/{INTERRUPTED}"
        try:
            self._trainer.save_checkpoint(path)
        except NonFiniteError as error:  # on all processes; the run ends anyway
            rank_zero_warn(f"{ended}. {error}")
            return
        rank_zero_info(f"{ended}. Its state is in {path}: resume with `fit(..., ckpt_path={path!r})`.")

    def _requeue(self) -> None:
        """Save the state, as Lightning does, and requeue the Slurm job.

        Raises:
            RequeueError: if Slurm does not requeue it; in a fit on all processes, otherwise on rank 0.
        """
        run = self._run
        path: str | None = None
        if run.fits:
            for logger in run.loggers:
                logger.finalize("finished")  # flush all logged values to disk
            folder = self._trainer.default_root_dir
            path = self._engine.collectives.broadcast(str(hpc_save_path(folder)))
            self._trainer.save_checkpoint(path)
            wait_for_saves(self._trainer.strategy)  # Slurm may end the job at once
        failure = _requeue_job() if run.is_global_zero else None
        if run.fits:
            failure = self._engine.collectives.broadcast(failure)
        if failure is not None:
            saved = "" if path is None else f" The state of the fit is in {path}: a resubmitted job resumes from it."
            raise RequeueError(
                f"{failure}{saved} Requeue the job by hand (`scontrol requeue JOB`), or submit it again (`sbatch`); if"
                " this cluster does not requeue jobs, turn requeueing off with"
                " Trainer(plugins=SLURMEnvironment(auto_requeue=False))."
            )


def _requeue_job() -> str | None:
    """Requeue this job with Slurm. Return the error message, or None."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    command = ["scontrol", "requeue", job]
    problem = f"Could not requeue this Slurm job: `{' '.join(command)}`"
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        return f"{problem} found no `scontrol` on the PATH ({os.environ.get('PATH', '')})."
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{problem} failed: {error}."
    if done.returncode:
        output = " ".join((done.stderr + done.stdout).split()) or "nothing"
        return f"{problem} failed with exit status {done.returncode} and printed: {output}."
    rank_zero_info(f"Requeued Slurm job {job}.")
    return None
