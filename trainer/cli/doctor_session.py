"""The session of the command ``doctor``: the Trainer that replaces Lightning's, its call sites, verdict and figures."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial, wraps
from multiprocessing import spawn
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.trainer.states import TrainerStatus
from torch.optim import Optimizer

import trainer.pytorch_lightning  # also in processes that are spawned
from trainer.callbacks import OverflowReport
from trainer.cli.commands.doctor import FILE, NO_PATCH, PATCH, PATCH_FILE
from trainer.common.files import write_text
from trainer.common.lightning_private import scripts_started_with
from trainer.common.run_callback import RunCallback
from trainer.common.session import Session
from trainer.common.terminal import print_line
from trainer.diagnosis.diagnose import Case
from trainer.diagnosis.patch import CallSites, Patch, Site, call_site, make_patch, try_steps
from trainer.diagnosis.report_file import Diagnosis
from trainer.loop.run_state import RunState, state_of
from trainer.trainer import Trainer as PlainTrainer


@dataclass(frozen=True)
class Options:
    """The options of a command.

    Attributes:
        accelerator, devices: replace the Trainer's arguments. None to keep them.
        max_steps: maximum number of optimizer steps of a fit; None for no limit.
        max_time: maximum number of seconds of a fit; None for no limit.
        continues: whether the program continues after a verdict.
        command: the words that start this command in another process, without the arguments of the program.
    """

    accelerator: str | None
    devices: int | None
    max_steps: int | None
    max_time: float | None
    continues: bool
    command: Sequence[str]


@dataclass(eq=False)
class Doctor:
    """The state of one command. A process that a launcher spawns gets a copy.

    Args:
        options: the options of the command.
        folder: folder of the output files, and of the files that a patch may change.
        sites: the calls of the program that create Trainers and optimizers.

    Attributes:
        status: the exit status after a verdict, otherwise 0.
        precisions: the precisions of the watched fits.
        fits: number of watched fits.
        steps, skipped: number of optimizer steps in them, and of those that were skipped.
        scales: the smallest and largest loss scale; empty without loss scaling.
        seconds, waited: duration of the batches, and the part of it that the loop waited for data.
    """

    options: Options
    folder: Path
    sites: CallSites = field(default_factory=CallSites)
    status: int = 0
    precisions: list[str] = field(default_factory=list)
    fits: int = 0
    steps: int = 0
    skipped: int = 0
    scales: list[float] = field(default_factory=list)
    seconds: float = 0.0
    waited: float = 0.0

    active: ClassVar[Doctor | None] = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Continue in a process that is spawned, already before it imports the program."""
        return _resume, (self.options, self.folder, self.sites)

    def watching(self) -> ExitStack:
        """Return a context that replaces Lightning's Trainer in this process, and in those that launchers start."""
        with Session() as session:
            theirs, prepare = pl.Trainer, spawn.get_preparation_data
            for name, module in list(sys.modules.items()):
                if name.partition(".")[0] == "lightning" and getattr(module, "__dict__", {}).get("Trainer") is theirs:
                    session.replace(module, "Trainer", Trainer)
            session.replace(trainer, "Trainer", Trainer)
            session.replace(spawn, "get_preparation_data", lambda name: {**prepare(name), "doctor": self})
            session.enter_context(scripts_started_with(self.options.command))
            session.callback(setattr, Optimizer, "__init__", Optimizer.__init__)
            Optimizer.__init__ = _noting(Optimizer.__init__, self.sites.optimizers)  # type: ignore[method-assign]
            session.callback(setattr, Doctor, "active", None)
            Doctor.active = self
            return session.pop_all()

    def on_verdict(self, run: RunState, case: Case, report: Diagnosis) -> Callable[[], None]:
        """Try the remedy, and write it as a patch. All ranks call this.

        Returns:
            A function to call after the verdict was printed. It writes the files, and ends the program.
        """
        if self.status:
            return _nothing
        try_steps(run, case, report)
        patch = make_patch(report, self.sites, self.folder)
        self.status = PATCH if patch.text else NO_PATCH
        return partial(self._end, run, report, patch)

    def _end(self, run: RunState, report: Diagnosis, patch: Patch) -> None:
        """Write the files, and end the program, unless it continues or has already failed."""
        if run.is_global_zero:
            facts = json.dumps(report.as_dict() | {"patch": vars(patch)}, indent=2)
            write_text(self.folder / FILE, f"{facts}\n")
            if patch.text:
                write_text(self.folder / PATCH_FILE, patch.text)
                print_line(f"  Patch: git apply {PATCH_FILE}. {patch.note}".rstrip())
                if (steps := report.figures.get("steps")) is not None:
                    print_line(f"  Tried on the next steps: the loss goes from {steps[0]:.3g} to {steps[1]:.3g}.")
            elif patch.line:
                print_line(f"  Change: {patch.line}. {patch.note}".rstrip())
        if not self.options.continues and run.status.status is not TrainerStatus.INTERRUPTED:
            run.collectives.barrier("doctor")  # torchrun ends the first rank when another one has ended
            raise SystemExit(self.status if run.is_global_zero else 0)

    def print_summary(self) -> None:
        """Print one line with the figures of the watched fits."""
        if not self.fits:
            print_line(
                "doctor: nothing was watched: no fit of a Trainer ran, or only with DeepSpeed or barebones=True."
            )
            return
        scales = [f"loss scale {self.scales[0]:g} to {self.scales[1]:g}"] if self.scales else []
        facts = [*scales, f"{self.skipped} skipped", f"{self.waited / max(self.seconds, 1e-9):.0%} of the time"]
        print_line(
            f"doctor: no problem found. Watched losses, gradients, weights and data in {self.steps} optimizer steps of"
            f" {self.fits} fit{'s' * (self.fits > 1)} ({', '.join(self.precisions)}): {', '.join(facts)} waited for"
            " data."
        )


def _resume(options: Options, folder: Path, sites: CallSites) -> Doctor:
    if Doctor.active is None:
        Doctor(options, folder, sites).watching()
    assert Doctor.active is not None
    return Doctor.active


def _nothing() -> None:
    """Do nothing after a second verdict."""


def _noting(init: Callable[..., None], sites: list[Site]) -> Callable[..., None]:
    """Return a constructor that also notes the program's call of it."""

    @wraps(init)
    def construct(*args: Any, **arguments: Any) -> None:
        if (site := call_site()) is not None:
            sites.append(site)
        init(*args, **arguments)

    return construct


class Trainer(PlainTrainer):
    """The Trainer that replaces Lightning's in the program."""

    @wraps(PlainTrainer.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **arguments: Any) -> None:
        doctor = Doctor.active
        assert doctor is not None
        options, callbacks = doctor.options, arguments.get("callbacks")
        if options.accelerator is not None:
            arguments["accelerator"] = options.accelerator
        if options.accelerator == "cpu":
            arguments |= {"devices": 1, "num_nodes": 1}
        if options.devices is not None:
            arguments["devices"] = options.devices
        given = [callbacks] if isinstance(callbacks, Callback) else callbacks or ()
        arguments["callbacks"] = [*given, _Observer(doctor)]
        _noting(super().__init__, doctor.sites.trainers)(*args, **arguments)
        for callback in self.callbacks:
            if isinstance(callback, OverflowReport):
                callback.on_verdict = doctor.on_verdict


class _Observer(RunCallback):
    """Collects the figures of a fit, and ends it at the limits."""

    observes_only: ClassVar = True
    runs_last: ClassVar = True

    def __init__(self, doctor: Doctor) -> None:
        self._doctor = doctor
        self._first: tuple[int, int] | None = None  # counts of steps and of skipped steps when the fit began
        self._left = self._deadline = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Set the limits of the fit, so that schedules that depend on its length stay the same."""
        run, options = state_of(trainer), self._doctor.options
        if any(isinstance(callback, OverflowReport) for callback in run.callbacks):  # not with DeepSpeed, barebones
            self._first = run.global_step, run.progress.skipped_steps
        self._deadline = time.monotonic() + (options.max_time or 0.0)
        if options.max_steps is not None:
            last = run.global_step + options.max_steps
            run.limits.max_steps = last if run.limits.max_steps == -1 else min(last, run.limits.max_steps)
        self._doctor.precisions = list(dict.fromkeys([*self._doctor.precisions, str(trainer.precision)]))
        if run.scaler.is_enabled():
            self._add_scale(run.loss_scale)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._left = time.monotonic()

    on_validation_end = on_train_epoch_start

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Measure the time since the last batch."""
        self._doctor.waited += time.monotonic() - self._left

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure the batch, and end the fit if its time is over."""
        run, now = state_of(trainer), time.monotonic()
        self._doctor.seconds += now - self._left
        self._left = now
        if run.scaler.is_enabled() and (outcome := run.loop.update.outcome) is not None:
            self._add_scale(outcome.next_scale)
        if self._doctor.options.max_time is not None and run.collectives.any_rank(now > self._deadline):
            run.limits.max_steps = run.global_step

    def _add_scale(self, scale: float) -> None:
        scales = self._doctor.scales
        self._doctor.scales = [min([scale, *scales]), max([scale, *scales])]

    def _clean_up(self, trainer: pl.Trainer) -> None:
        if self._first is None:
            return
        run, doctor, (step, skipped) = state_of(trainer), self._doctor, self._first
        self._first = None
        doctor.fits += 1
        doctor.steps += run.global_step - step
        doctor.skipped += run.progress.skipped_steps - skipped
        if run.is_global_zero and not doctor.status and multiprocessing.parent_process() is not None:
            doctor.print_summary()  # the process that spawned this one has no figures
