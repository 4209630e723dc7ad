"""Run the jobs of a sweep, each with its own process and folder.

Hydra's sweeper creates the jobs, and its launcher calls `trainer.cli.execution.task` for each, in any process or on any
machine. There, `run_job` starts the same command in a new process with the overrides of that job. This isolates jobs
from each other (peak memory, random states, global flags of torch, variables of a process group), supports several
processes per job, and keeps torch out of the process of the sweep.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from trainer.cli.parsing import UsageError
from trainer.cli.plugins import PARALLEL, SUBMITIT_PREFIX
from trainer.cli.processes import clean_environment, is_first
from trainer.cli.schema import targets
from trainer.cli.warm_process import Process, start_process, warm_processes
from trainer.cli.workdir import config_flags, quoted, unresolved_words
from trainer.common import redaction
from trainer.common.files import from_here
from trainer.common.terminal import is_quiet
from trainer.record.find_checkpoint import checkpoints_in
from trainer.record.run_record import RUN, SUCCESSFUL, RunRecord, load_run, read_json, shown

CONSOLE = "console.log"
"""Name of the file with the output of a job, in its folder."""

SWEPT = "TRAINER_SWEPT"
"""Environment variable with the names of the settings that differ between the jobs of a sweep."""

_BASIC = "hydra._internal.core_plugins."
_STOP = ".stop"
_IMPORTED = (
    "trainer.cli.execution", "trainer.cli.config_checks", "trainer.cli.fused", "trainer.trainer", "trainer.callbacks",
    "torch.utils.tensorboard",
)  # fmt: skip
"""Modules that each job imports, in addition to those that its config names."""
_MAX_LINES = 20
"""Largest number of lines of a job's error message."""
_ENDING = {getattr(signal, name, -1) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")}

# Hydra's settings of the sweep, which are not passed to jobs.
_SWEEP_ONLY = ("hydra.mode", "hydra.run.dir", "hydra.sweep", "hydra.launcher", "hydra/launcher", "hydra/sweeper")


@dataclass
class Job:
    """One job of a sweep.

    Args:
        number: number in the sweep, from 0.
        folder: folder of the job.
        overrides: its overrides without those of Hydra.
        words: words of its command line after ``python -m trainer``.
        flags: flags that its configs are found with.
        cwd: its working directory.
        digest: hash of its config. Jobs with equal hashes are equal.
        resumes: whether it resumes from its last checkpoint.
        aside: whether other jobs run at the same time, or it runs on another machine.
        environment: variables in addition to those of the sweep.
        own_session: whether it runs in a new session, so that Ctrl-C does not reach it. The sweep then passes signals
            on.
        swept: the names of the settings that differ between jobs.
        names: the modules, classes and functions that it imports.
    """

    number: int
    folder: Path
    overrides: list[str]
    words: list[str]
    flags: list[str]
    cwd: str
    digest: str
    resumes: bool
    aside: bool
    environment: dict[str, str] = field(default_factory=dict)
    own_session: bool = False
    swept: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @classmethod
    def composed(cls, config: DictConfig) -> Job:
        """Return the job that Hydra composed last.

        Args:
            config: config of the job, without the node ``hydra``.
        """
        hydra = HydraConfig.get()
        overrides = unresolved_words(hydra.overrides.task)
        of_hydra = [
            *(
                word
                for word in unresolved_words(hydra.overrides.hydra)
                if not word.lstrip("+~").startswith(_SWEEP_ONLY)
            ),
            f"hydra.run.dir={quoted(hydra.runtime.output_dir)}",
            f"hydra.job.num={hydra.job.num}",
            f"hydra.job.id={hydra.job.id}",
            "hydra.mode=RUN",
        ]
        resumes = OmegaConf.select(config, "trainer.resume") == "auto"
        is_requeued = not resumes and int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0  # Slurm requeued the job
        return cls(
            number=int(hydra.job.num),
            folder=Path(hydra.runtime.output_dir),
            overrides=overrides,
            words=[*overrides, *(["resume=auto"] if is_requeued else []), *of_hydra],
            flags=[word for flag in config_flags(hydra).items() for word in flag],
            cwd=hydra.runtime.cwd,
            digest=hashlib.sha256(OmegaConf.to_yaml(config).encode()).hexdigest(),
            resumes=resumes or is_requeued,
            aside=not str(hydra.launcher["_target_"]).startswith(_BASIC),
            swept=tuple(os.environ.get(SWEPT, "").split()),
            names=(*_IMPORTED, *(str(name) for _, name in targets(OmegaConf.to_container(config)))),
        )

    @property
    def title(self) -> str:
        """Return the start of the line about the job: its number and overrides."""
        return f"Job {self.number}: {' '.join(shown(self.overrides))}"

    def report(self, run: RunRecord, status: str, seconds: float | None = None) -> None:
        """Print the line about the job, and its error below.

        If the start of the line was printed when the job started, print only the rest: objective, time and status.
        """
        value, goal = run.objective_value, run.objective
        line = self.title if self.aside or seconds is None else ""  # otherwise printed when the job started
        line += "" if value is None or goal is None else f", {goal[0]} {value:.4g}"
        line += "" if seconds is None else f", {seconds:.1f} s"
        error = "".join(f"  {line}\n" for line in self._error() if run.status == "failed")
        if not is_quiet():  # a single write, because parallel jobs print at the same time
            print(f"{line}, {status}\n{error}", end="", flush=True)

    def _error(self) -> list[str]:
        """Return the lines of the error message at the end of the job's output."""
        try:
            lines = (self.folder / CONSOLE).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        starts = [place for place, line in enumerate(lines) if line.startswith("trainer: ")]
        return [line for line in lines[starts[-1] :] if line.strip()][:_MAX_LINES] if starts else []

    def is_done(self) -> bool:
        """Return whether the job resumes, and an equal job completed or was pruned in an earlier sweep."""
        former = read_json(self.folder)
        return self.resumes and former.get("status") in SUCCESSFUL and former.get("digest") == self.digest

    def refuse_other_job(self) -> None:
        """Check that the checkpoints in the folder are of this job, if it resumes.

        Raises:
            UsageError: if they are of a job with other values of the settings that differ between jobs.
        """
        if not self.resumes or not checkpoints_in(self.folder):
            return
        both = load_run(self.folder).chosen, map(redaction.word, shown(self.overrides))
        before, now = ([word for word in words if word.lstrip("+~").partition("=")[0] in self.swept] for words in both)
        if sorted(before) != sorted(now):
            raise UsageError(
                f"Job {self.number} is {' '.join(now)}, but the checkpoints in {from_here(self.folder)} are of"
                f" {' '.join(before) or 'another job'}. Repeat the values of that sweep in the same order, or choose"
                " another folder: hydra.sweep.dir=FOLDER."
            )

    def keep(self) -> float | None:
        """Include the job's earlier record in the summary of this sweep, and return the value of its objective."""
        (self.folder / RUN).touch()
        run = load_run(self.folder)
        self.report(run, f"{run.status} in an earlier sweep")
        return run.result

    @contextmanager
    def process(self) -> Iterator[Process]:
        """Start the process of the job. On exit, complete its record."""
        if not self.resumes and is_first():
            (self.folder / RUN).unlink(missing_ok=True)  # of an earlier run of this job, unless it resumes
        if not (self.aside or is_quiet()):
            print(self.title, end="", flush=True)
        started = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        # Slurm sends SIGUSR2 to all processes, and it would kill a job that does not ignore it
        ignored = handled(["SIGUSR2"] if _requeues() else [], signal.SIG_IGN)
        with (self.folder / CONSOLE).open("ab" if self.resumes else "wb") as console, ignored:
            process = start_process(
                ["trainer", *self.words, *self.flags],
                folder=self.cwd,
                environment=clean_environment(os.environ) | self.environment,
                output=console,
                own_session=self.own_session,
                names=self.names,
            )
        try:
            yield process
        finally:
            self._finish(process.returncode, time.monotonic() - started)

    def _finish(self, status: int | None, seconds: float) -> None:
        """Complete the record of the job, or write one if the job has written none."""
        if not is_first():
            return
        facts = {"metrics": {}, "run_dir": str(self.folder), **read_json(self.folder)}
        recorded = facts.get("status")
        if recorded in (None, "running") or (status != 0 and recorded in SUCCESSFUL):
            facts["status"] = "failed"
        if status is not None and status != 0 and not facts.get("error"):
            number = -status if status < 0 else status - 128
            if recorded in (None, "running") and number in _ENDING:
                facts["status"] = "interrupted"  # by a signal, before it could write its record
            if facts["status"] == "failed":  # other statuses need no explanation
                message = next(iter(self._error()), "").removeprefix("trainer: ")
                facts["error"] = _signal_error(-status) if status < 0 else message or f"exit status {status}"
        facts |= {"job": self.number, "overrides": self.overrides, "flags": self.flags}
        facts |= {"exit_status": status, "digest": self.digest}
        run = RunRecord(facts, self.folder)
        run.write()
        self.report(run, run.status, seconds)


def _signal_error(number: int) -> str:
    """Return the error of a process that a signal ended before it could write its record."""
    names = {each.value: each.name for each in signal.Signals}
    name = names.get(number, f"signal {number}")
    return f"ended by {name}{', which the system sends when memory runs out' if name == 'SIGKILL' else ''}"


def run_job(config: DictConfig) -> float | None:
    """Run the last job that Hydra composed, in a new process, and wait for it. If it fails, the sweep continues.

    Args:
        config: config of the job.

    Returns:
        The value of its objective; None if it has none, or failed.
    """
    hydra = HydraConfig.get()
    return execute(Job.composed(config), StopFile(Path(hydra.runtime.cwd) / hydra.sweep.dir))


def execute(job: Job, stop: StopFile) -> float | None:
    """Run a job, unless it is done or its sweep was stopped. Return the same as `run_job`."""
    if stop.signals_received():
        return None
    if job.is_done():
        return job.keep()
    job.refuse_other_job()
    passed_on = 0  # number of signals in `stop` that the job has received
    with job.process() as process, _forward_signals(process) as received:
        try:
            while process.returncode is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.5 if job.aside else None)
                for number in stop.signals_received()[passed_on:] if job.aside else ():
                    passed_on += 1
                    process.send_signal(number)
        except KeyboardInterrupt:
            process.wait()  # the terminal interrupts the job too
            raise
    if received and not stop.signals_received():
        number, handler = received[-1]
        if callable(handler):
            handler(number, None)  # handler of the launcher: submitit requeues the job
        raise SystemExit(128 + number)
    return load_run(job.folder).result


class StopFile:
    """File in the folder of a sweep with the signals that the sweep received, for parallel and remote jobs.

    Args:
        folder: folder of the sweep.
        elsewhere: whether jobs run on other machines and may not have started. A second Ctrl-C then exits at once.
    """

    def __init__(self, folder: Path, elsewhere: bool = False) -> None:
        self.file = folder / _STOP
        self._elsewhere = elsewhere

    def signals_received(self) -> list[int]:
        """Return the numbers of the signals in order."""
        try:
            return [int(number) for number in self.file.read_text(encoding="utf-8").splitlines()]
        except OSError:
            return []

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Write the signals that end the sweep to the file, while a launcher waits for its jobs.

        Raises:
            KeyboardInterrupt, SystemExit: if a signal was received: after all jobs have saved and exited, or
                immediately at a second Ctrl-C if jobs run on other machines.
        """

        def receive(number: int, frame: Any) -> None:
            if number == signal.SIGINT and self._elsewhere and self.signals_received():
                raise KeyboardInterrupt  # the second Ctrl-C
            with self.file.open("a", encoding="utf-8") as file:
                file.write(f"{number}\n")

        with handled(("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"), receive):
            yield
        self.end()  # not after an exception: the file then stays for jobs that have not started

    def end(self) -> None:
        """Remove the file after all jobs have exited, and raise the exception for the first signal in it."""
        received = self.signals_received()
        self.file.unlink(missing_ok=True)
        for number in received:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


@contextmanager
def waiting_for(hydra: Any, folder: Path) -> Iterator[None]:
    """Inside the context, a sweep waits for its jobs, and signals are passed on to them. Removes an empty folder.

    Args:
        hydra: the config's node ``hydra``.
        folder: folder of the sweep.
    """
    target = str(hydra.launcher["_target_"])
    is_remote = target.startswith(SUBMITIT_PREFIX)
    stop = StopFile(folder, is_remote)
    stop.file.unlink(missing_ok=True)  # left by an earlier sweep in this folder
    if is_remote or not is_quiet():
        place = "run on other machines and " if is_remote else ""
        text = f"The jobs {place}write their output to {CONSOLE} in their folders in {folder}. Ctrl-C stops them."
        print(text, flush=True)
    with ExitStack() as stack:
        if not target.startswith(_BASIC):
            stack.enter_context(stop.signals())
        if target.startswith((_BASIC, PARALLEL)):
            stack.enter_context(warm_processes())
        try:
            yield
        finally:
            with suppress(OSError):  # not empty, unless the sweep was refused before its first job
                os.removedirs(os.path.relpath(folder))


@contextmanager
def handled(names: Iterable[str], handler: Callable[[int, Any], None] | int) -> Iterator[dict[int, Any]]:
    """Handle signals inside the context, if the platform has them. Does nothing outside of the main thread.

    Yields:
        The previous handlers by signal number.
    """
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield before
    finally:
        for number, former in before.items():
            signal.signal(number, signal.SIG_DFL if former is None else former)


@contextmanager
def _forward_signals(process: Process) -> Iterator[list[tuple[int, Any]]]:
    """Pass on to a job the signals after which a run saves and exits.

    Yields:
        The received signals with their previous handlers. If a launcher handles a signal, the job gets SIGTERM instead,
        which always ends a run.
    """
    received: list[tuple[int, Any]] = []
    names = ["SIGTERM", "SIGUSR1", *(["SIGUSR2"] if _requeues() else [])]

    def pass_on(number: int, frame: Any) -> None:
        received.append((number, before[number]))
        process.send_signal(signal.SIGTERM if callable(before[number]) else number)

    with handled(names, pass_on) as before:
        yield received


def _requeues() -> bool:
    """Return whether a launcher handles the signal that submitit receives before the time limit of a job."""
    return hasattr(signal, "SIGUSR2") and callable(signal.getsignal(signal.SIGUSR2))
