"""The jobs of a sweep: each in a process and a folder of its own.

Hydra's sweeper makes the jobs, and its launcher calls `trainer.cli.run.task` for each, in whatever process or on
whatever machine the launcher likes. There, `run_job` starts the same command line once more, with the overrides of that
job alone. So nothing leaks from job to job (peak memory, random state, torch's global flags, the variables of a process
group), several processes per job work, and the sweep itself never imports torch.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from trainer.cli.overrides import with_values
from trainer.cli.plugins import ELSEWHERE
from trainer.cli.processes import PARENT, clean_environment, is_first
from trainer.cli.workdir import config_flags, quoted
from trainer.record.run_record import ENDED_WELL, RUN, RunRecord, load_run, read_json, shown
from trainer.terminal import is_quiet

CONSOLE = "console.log"
"""The output of a job, in its folder."""

_BASIC = "hydra._internal.core_plugins."
_STOP = ".stop"
_MOST_LINES = 20
"""Of the error of a job."""
_ENDING = {getattr(signal, name, -1) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")}

# Hydra's settings for the sweep, which are none of a job's business.
_SWEEP_ONLY = (
    "hydra.mode",
    "hydra.run.dir",
    "hydra.sweep",
    "hydra.launcher",
    "hydra/launcher",
    "hydra/sweeper",
)


@dataclass
class Job:
    """One job of a sweep.

    Args:
        number: in the sweep, from 0.
        folder: its own.
        overrides: that make it, with the values of this job; without Hydra's.
        words: of its command line, behind ``python -m trainer``.
        flags: by which its configs are found.
        cwd: where it is started.
        digest: of its config: two jobs with the same one do the same.
        resumes: whether it goes on where it was stopped.
        aside: whether other jobs run at the same time, or it runs on another machine.
        environment: variables that are added to those of the sweep.
        own_session: whether what the terminal tells the sweep, such as Ctrl-C, does not reach the job: the sweep will
            tell it.
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

    @classmethod
    def composed(cls, config: DictConfig) -> Job:
        """The job that Hydra has composed last.

        Args:
            config: of the job, without Hydra's node.
        """
        hydra = HydraConfig.get()
        overrides = with_values(_as_written(hydra.overrides.task), config)
        ours = [word for word in _as_written(hydra.overrides.hydra) if not word.lstrip("+~").startswith(_SWEEP_ONLY)]
        resumes = OmegaConf.select(config, "trainer.resume") == "auto"
        again = not resumes and int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0  # Slurm has requeued it
        folder = Path(hydra.runtime.output_dir)
        placement = [
            f"hydra.run.dir={quoted(str(folder))}",
            f"hydra.job.num={hydra.job.num}",
            f"hydra.job.id={hydra.job.id}",
            "hydra.mode=RUN",
        ]
        return cls(
            number=int(hydra.job.num),
            folder=folder,
            overrides=overrides,
            words=[*overrides, *(["resume=auto"] if again else []), *ours, *placement],
            flags=[word for flag in config_flags(hydra).items() for word in flag],
            cwd=hydra.runtime.cwd,
            digest=hashlib.sha256(OmegaConf.to_yaml(config).encode()).hexdigest(),
            resumes=resumes or again,
            aside=not str(hydra.launcher["_target_"]).startswith(_BASIC),
        )

    @property
    def title(self) -> str:
        """The first half of the line on the job: its number and overrides."""
        return f"Job {self.number}: {' '.join(shown(self.overrides))}"

    def report(self, run: RunRecord, status: str, seconds: float | None = None) -> None:
        """Print the line on the job, or the second half of it: objective, time and status; then its error."""
        value, goal = run.objective_value, run.objective
        parts = [
            "" if value is None or goal is None else f"{goal[0]} {value:.4g}",
            "" if seconds is None else f"{seconds:.1f} s",
            status,
        ]
        begin = self.title if self.aside or seconds is None else ""  # otherwise it was printed when the job started
        error = "".join(f"  {line}\n" for line in self._error() if run.status == "failed")
        line = f"{begin}, {', '.join(filter(None, parts))}\n"
        if not is_quiet():
            print(f"{line}{error}", end="", flush=True)  # one write, because jobs that run at the same time print, too

    def _error(self) -> list[str]:
        """The lines of the message with which the job has ended, from its output."""
        try:
            lines = (self.folder / CONSOLE).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        starts = [place for place, line in enumerate(lines) if line.startswith("trainer: ")]
        return [line for line in lines[starts[-1] :] if line.strip()][:_MOST_LINES] if starts else []

    def is_done(self) -> bool:
        """Whether it goes on with the same job of an earlier sweep, which has left nothing to do."""
        former = read_json(self.folder)
        return self.resumes and former.get("status") in ENDED_WELL and former.get("digest") == self.digest

    def keep(self) -> float | None:
        """Take over the record of an earlier sweep, for the table of this one. Returns the value of its objective."""
        (self.folder / RUN).touch()
        run = load_run(self.folder)
        self.report(run, f"{run.status} before")
        return run.result

    @contextmanager
    def process(self) -> Iterator[subprocess.Popen[bytes]]:
        """The job's process, started. At the end, its record is completed."""
        if not self.resumes and is_first():
            (self.folder / RUN).unlink(missing_ok=True)  # a job that goes on, or has nothing left to do, wants it
        if not (self.aside or is_quiet()):
            print(self.title, end="", flush=True)
        started = time.monotonic()
        process = self._start()
        try:
            yield process
        finally:
            self._finish(process.returncode, time.monotonic() - started)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "trainer", *self.words, *self.flags]
        environment = clean_environment(os.environ) | self.environment | {PARENT: str(os.getpid())}
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / CONSOLE).open("ab" if self.resumes else "wb") as console, _no_requeuing_signal():
            return subprocess.Popen(
                command,
                cwd=self.cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=self.own_session,
            )

    def _finish(self, status: int | None, seconds: float) -> None:
        """Complete the job's record, or write one for a job that could not."""
        if not is_first():
            return
        facts = {"metrics": {}, "run_dir": str(self.folder), **read_json(self.folder)}
        said = facts.get("status")
        if said in (None, "running") or (status != 0 and said in ENDED_WELL):
            facts["status"] = "failed"
        if status is not None and status != 0 and not facts.get("error"):
            number = -status if status < 0 else status - 128
            if said in (None, "running") and number in _ENDING:
                facts["status"] = "interrupted"  # before it could say so
            if facts["status"] == "failed":  # of others the status says it all
                message = next(iter(self._error()), "").removeprefix("trainer: ")
                facts["error"] = _ended_by(-status) if status < 0 else message or f"exit status {status}"
        facts |= {"job": self.number, "overrides": self.overrides, "flags": self.flags}
        facts |= {"exit_status": status, "digest": self.digest}
        run = RunRecord(facts, self.folder)
        run.write()
        self.report(run, run.status, seconds)


def _ended_by(number: int) -> str:
    """What became of a process that a signal has ended, and could not say so itself."""
    names = {each.value: each.name for each in signal.Signals}
    name = names.get(number, f"signal {number}")
    is_kill = number == getattr(signal, "SIGKILL", None)
    return f"ended by {name}{', as the system does it when memory runs out' if is_kill else ''}"


def run_job(config: DictConfig) -> float | None:
    """Run the job that Hydra has composed, in a process of its own, and wait for it. Its failure is not ours.

    Args:
        config: of the job.

    Returns:
        The value of its objective; None if it has none, or failed.
    """
    hydra = HydraConfig.get()
    return carry_out(Job.composed(config), Stop(Path(hydra.runtime.cwd) / hydra.sweep.dir))


def carry_out(job: Job, stop: Stop) -> float | None:
    """Run a job, unless it or its sweep has ended; returns as `run_job` does."""
    if stop.told():
        return None
    if job.is_done():
        return job.keep()
    with job.process() as process, _passed_on(process) as received:
        try:
            _wait(process, stop if job.aside else None)
        except KeyboardInterrupt:
            process.wait()  # the terminal has interrupted the job too
            raise
    if received and not stop.told():
        number, handler = received[-1]
        if callable(handler):
            handler(number, None)  # the launcher's: submitit has the job requeued
        raise SystemExit(128 + number)
    return load_run(job.folder).result


def _wait(process: subprocess.Popen[bytes], stop: Stop | None) -> None:
    """Wait for a job; one that runs elsewhere than the sweep is ended with it."""
    if stop is None:
        process.wait()
        return
    passed_on = 0
    while True:
        try:
            process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            for number in stop.told()[passed_on:]:
                passed_on += 1
                process.send_signal(number)
        else:
            return


class Stop:
    """The word that a sweep has been ended, for jobs that run side by side or elsewhere: a file in its folder.

    Args:
        folder: of the sweep.
        elsewhere: whether jobs may not have begun, and would not hear of a second Ctrl-C.
    """

    def __init__(self, folder: Path, elsewhere: bool = False) -> None:
        self.file = folder / _STOP
        self._elsewhere = elsewhere

    def told(self) -> list[int]:
        """The signals, the first one first."""
        try:
            return [int(number) for number in self.file.read_text(encoding="utf-8").splitlines()]
        except OSError:
            return []

    @contextmanager
    def signals(self) -> Iterator[None]:
        """While a launcher waits for jobs that it has begun, pass on to them what ends the sweep.

        Raises:
            KeyboardInterrupt, SystemExit: it has been ended; the jobs have saved and are over.
        """

        def receive(number: int, frame: Any) -> None:
            if number == signal.SIGINT and self._elsewhere and self.told():
                raise KeyboardInterrupt  # the second one: at once
            with self.file.open("a", encoding="utf-8") as file:
                file.write(f"{number}\n")

        with handled(("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"), receive):
            yield
        self.end()  # or the word stays, for jobs that have not begun

    def end(self) -> None:
        """Take the word back when all jobs are over, and raise what has ended the sweep."""
        told = self.told()
        self.file.unlink(missing_ok=True)
        for number in told:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def waiting_for(hydra: Any, folder: Path) -> AbstractContextManager[None]:
    """For the time in which a sweep waits for its jobs: a signal to it reaches them where it is not the terminal's.

    Args:
        hydra: its node of that name.
        folder: its folder.
    """
    target = str(hydra.launcher["_target_"])
    stop = Stop(folder, target.startswith(ELSEWHERE))
    stop.file.unlink(missing_ok=True)  # of an earlier sweep here
    if target.startswith(ELSEWHERE) or not is_quiet():
        where = "run on other machines and " if target.startswith(ELSEWHERE) else ""
        print(f"The jobs {where}write their output to {CONSOLE} in their folders in {folder}. Ctrl-C stops them.")
        sys.stdout.flush()
    return nullcontext() if target.startswith(_BASIC) else stop.signals()


@contextmanager
def handled(names: Iterable[str], handler: Callable[[int, Any], None]) -> Iterator[dict[int, Any]]:
    """Handle signals, as far as there are such here; outside of the main thread, where none arrive, none.

    Yields:
        Those that are handled, with their handlers before.
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
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[list[tuple[int, Any]]]:
    """While a job runs, pass on to it the signals that end a run, after it has saved.

    Yields:
        Those that come, with the handlers that they have had. Where a launcher handles one, the job gets a SIGTERM for
        it: that ends a run in any case.
    """
    received: list[tuple[int, Any]] = []
    names = ["SIGTERM", "SIGUSR1", *(["SIGUSR2"] if _requeues() else [])]

    def pass_on(number: int, frame: Any) -> None:
        received.append((number, before[number]))
        process.send_signal(signal.SIGTERM if callable(before[number]) else number)

    with handled(names, pass_on) as before:
        yield received


def _requeues() -> bool:
    """Whether a launcher waits for the signal by which submitit is told that a job's time is up."""
    return hasattr(signal, "SIGUSR2") and callable(signal.getsignal(signal.SIGUSR2))


@contextmanager
def _no_requeuing_signal() -> Iterator[None]:
    """What is started here ignores the signal: Slurm sends it to all processes, and it would end the job's unsaved."""
    if not _requeues() or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, before)


def _as_written(overrides: Any) -> list[str]:
    words = OmegaConf.to_container(overrides, resolve=False)
    assert isinstance(words, list)
    return words
