"""Detect in every precision that a training run breaks, report the cause, and end a run that skips every step."""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningModule
from rich.console import Console
from rich.text import Text
from torch import Tensor
from torch.optim import Optimizer

from trainer.common import terminal
from trainer.common.files import from_here, write_text
from trainer.common.module_tree import is_dense, is_measurable
from trainer.common.run_callback import RunCallback, refuse_other_trainers
from trainer.diagnosis import remedies
from trainer.diagnosis.diagnose import MAX_UNDERFLOW, Case, are_finite, diagnose
from trainer.diagnosis.host_batches import HostBatches, is_device_assert
from trainer.diagnosis.out_of_range import OutOfRange
from trainer.diagnosis.recording import Evidence, RecordedBatch
from trainer.diagnosis.replay_state import BufferState
from trainer.diagnosis.report_file import Diagnosis
from trainer.errors import LossScaleCollapse, expect, is_out_of_memory, rank_zero_warn, warn
from trainer.loop.gradients import norm_of
from trainer.loop.run_state import RunState, state_of
from trainer.precision.underflow import UnderflowProbe, joined
from trainer.record.measures import folder_of_reports
from trainer.state.outcome import StepOutcome

log = logging.getLogger(__name__)

_BYTES = 2**26
"""Maximum size of the stored copy of the weights."""
_KEEP_EVERY = 50
"""Minimum number of optimizer steps between two copies of the weights."""
_GROWTH_FACTOR = 10.0
"""A loss is examined if it exceeds the lowest one by more than this multiple of the lowest one."""
_FALL_FACTOR = 1000.0
"""A negative loss falls without bound if it exceeds the usual loss by more than this factor."""
_MANY_SKIPS = 10
"""Number of skipped steps at the beginning of a training that are mentioned. The default loss scale is then 64."""
_EXAMINED = 4
"""Maximum number of examinations per trigger in a run."""


@dataclass
class _Fit:
    """The evidence and the counts of one fit. A step number is ``trainer.global_step`` before its weight update.

    Attributes:
        loop: the fit loop.
        evidence: the recent batches and their losses.
        first_buffers: the largest value of each buffer when the fit began.
        growth: the largest of the last losses before one that was not finite, if the losses grew without bound
            (positive) or fell without bound (negative). Otherwise 0.
        skipped: the skipped steps since the last check.
        weights: copy of the weights at a step at which all values were finite. {} if they are large, or with several
            processes.
        weights_step: the step of ``weights``.
        parameters: the parameters to copy to ``weights``, by name. None until they are looked up in an epoch.
        known: the last step at which all values were finite.
        first_norm: norm of the weights when the fit began. None if they are copied, and before the first loss.
        checks: number of checks at the end of an update.
        lowest: the lowest median of the losses between two checks.
        is_broken: whether a loss was not finite without loss scaling, so that weights are not finite either.
        raised_at: the step at which the loss scale was raised; -1 if its last change lowered it.
        skips: number of skipped steps in a row.
        skips_at_floor: number of skipped steps in a row at the smallest loss scale.
        singles: number of skipped steps that follow a step that was not skipped; see :func:`_examines_single`.
        first_skip: the first of the skipped steps in a row, with the time, the scale, and the buffers when its outcome
            was known.
        occurrences: number of events, by trigger.
        latest: the latest diagnosis, by trigger.
        host_batches: the recent batches before their transfer to a GPU; None on a CPU, and with several processes.
    """

    loop: Any
    evidence: Evidence
    first_buffers: dict[str, Tensor]
    growth: float = 0.0
    skipped: set[int] = field(default_factory=set)
    weights: dict[str, Tensor] = field(default_factory=dict)
    weights_step: int = 0
    parameters: dict[str, Tensor] | None = None
    known: int = 0
    first_norm: Tensor | None = None
    checks: int = 0
    lowest: float = math.inf
    is_broken: bool = False
    raised_at: int = -1
    skips: int = 0
    skips_at_floor: int = 0
    singles: int = 0
    first_skip: tuple[int, float, float, BufferState] | None = None
    occurrences: Counter[str] = field(default_factory=Counter)
    latest: dict[str, Diagnosis] = field(default_factory=dict)
    host_batches: HostBatches | None = None


class OverflowReport(RunCallback):
    """Diagnose a training run that breaks. Print one verdict, and one remedy that was tried before.

    On by default in every precision. Triggers: a skipped step with a non-finite loss; ``after`` skipped steps in a row;
    a non-finite loss without loss scaling; a loss that grows without bound; gradients that vanish in float16; an index
    that is out of range. After a trigger, the batch is replayed in the run's precision and in float32, and
    :func:`~trainer.diagnosis.diagnose.diagnose` finds the cause. The verdict is printed in a few lines, once for each
    cause, and written with its details to ``diagnosis_step_N.md`` and, for programs, ``diagnosis_step_N.json``. A
    replay does not change the run: weights, gradients, buffers, random states, metrics and logs stay the same, bit for
    bit.

    Adds no kernel to a step, and no host-device synchronization except every ``log_every_n_steps`` updates and before a
    validation or a checkpoint. Holds references to up to 64 MiB of recent batches (at least one batch), and a copy of
    the weights if they take at most 64 MiB. Batches in shared memory are copied. On one GPU it also holds up to 64 MiB
    of batches in host memory, because the GPU cannot be read after an index that is out of range.

    Args:
        after: explain this number of skipped steps in a row with finite losses; at least 3, because one or two are
            normal while the loss scale adjusts. With one process, single skips are also examined, beginning with the
            second one. None disables both. Default: 3.
        at_step: also report on the first optimizer step that begins with ``trainer.global_step`` at this number or
            above, skipped or not, in any precision: the cause if it fails, otherwise the largest loss scale that fits.
            Default: None.
        collapse_after: number of skipped steps in a row that stop the run; None for no limit. Default: 50, about three
            times the 16 skips that lower the default scale from 2**16 to 1.
        at_floor: number of skipped steps in a row at the scaler's ``min_scale`` that stop the run, because the scale
            cannot decrease further; None for no limit. Default: 10.
        dirpath: folder of the files. Default: the folder of the run, or of the first logger, or the Trainer's
            ``default_root_dir`` if it was given; otherwise no file is written.
        console: console to print to. Default: rich's global console, which writes to ``sys.stdout``.

    Attributes:
        reports: the diagnoses of this run (:class:`~trainer.diagnosis.report_file.Diagnosis`), the same on all ranks.
        on_verdict: called by all ranks before a new diagnosis is printed, with the run's state, the case and the
            diagnosis. Returns a function to call after it was printed, which may raise to end the run. Default: None.

    Raises:
        ConfigurationError: if a number is out of range.
        LossScaleCollapse: while training; see ``collapse_after`` and ``at_floor``. If the Trainer writes checkpoints,
            ``before_collapse.ckpt`` is written first: the weights, optimizers and schedules, which the skipped steps
            have not changed, the loss scale from before these steps, and the buffers after the first of them.
    """

    unsupported_with: ClassVar = {
        "deepspeed": "replays the batches of a skipped step, but DeepSpeed does not expose their gradients."
    }
    observes_only: ClassVar = True
    sees_each_save: ClassVar = True
    reset_in_copies: ClassVar = {"_fit": None, "_probe": None}

    def __init__(
        self,
        after: int | None = 3,
        at_step: int | None = None,
        collapse_after: int | None = 50,
        at_floor: int | None = 10,
        dirpath: str | os.PathLike[str] | None = None,
        console: Console | None = None,
    ) -> None:
        expect(after is None or after >= 3, "at least 3 skipped steps in a row, or None", after=after)
        expect(at_step is None or at_step >= 0, "a step number of at least 0, or None", at_step=at_step)
        expect(collapse_after is None or collapse_after >= 3, "at least 3, or None", collapse_after=collapse_after)
        expect(at_floor is None or at_floor >= 1, "at least 1, or None", at_floor=at_floor)
        self.after = after
        self.at_step = at_step
        self.collapse_after = collapse_after
        self.at_floor = at_floor
        self.reports: list[Diagnosis] = []
        self.on_verdict: Callable[[RunState, Case, Diagnosis], Callable[[], None]] | None = None
        self.dirpath = dirpath
        self._console = console
        self._fit: _Fit | None = None
        self._probe: UnderflowProbe | None = None
        if at_step is None:
            self._omit(OverflowReport.on_before_optimizer_step)

    def on_train_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Reset the state of an earlier fit."""
        refuse_other_trainers(self, trainer)
        self._clean_up(trainer)
        self.reports = []
        run = state_of(trainer)
        part, scaler, device = run.part, run.scaler, run.device
        real = {name: b for name, b in pl_module.named_buffers() if is_measurable(b) and not b.is_complex()}
        parts = {name: part(buffer.detach()) for name, buffer in real.items()}
        buffers = {name: buffer.max() for name, buffer in parts.items() if buffer.numel()}
        examine, begin = partial(self._examine, run), partial(self._begin, run)
        every = run.limits.log_every_n_steps or 50
        evidence = Evidence(run.loop, every, _KEEP_EVERY + every, begin, examine)
        self._fit = _Fit(run.loop, evidence, buffers)
        self._fit.occurrences["step"] = int(self.at_step is None or trainer.global_step > self.at_step)
        if scaler.is_enabled():
            self._probe = UnderflowProbe(device.type)
        if device.type == "cuda" and run.world_size == 1:
            self._fit.host_batches = HostBatches(run)

    def _begin(self, run: RunState) -> None:
        """Copy the weights before the first batch, or keep their norm. Reads no value from the device."""
        fit = self._fit
        assert fit is not None
        self._keep_weights(run, fit)
        if not fit.weights:
            part = run.part
            measurable = filter(is_measurable, run.module.parameters())
            fit.first_norm = norm_of([part(parameter.detach()) for parameter in measurable])

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Look the parameters up again, because a callback may have replaced some."""
        if self._fit is not None:
            self._fit.parameters = None

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Report on ``at_step``."""
        fit, step = self._fit, trainer.global_step
        if fit is not None and not fit.occurrences["step"] and step >= (self.at_step or 0):
            run = state_of(trainer)
            self._explain(run, fit, "step", fit.evidence.batches_of(step), step, run.loss_scale)

    def _examine(self, run: RunState, outcome: StepOutcome, is_due: bool) -> None:
        """Process a skipped step or a change of the loss scale, and check the losses if that is due."""
        fit = self._fit
        if fit is None:
            return
        if outcome.skipped:
            self._process_skip(run, fit, run.global_step - len(outcome.optimizers), outcome)
        elif fit.skips:
            self._warn_of_first_scale(run, fit, outcome.scale)
            fit.skips = fit.skips_at_floor = 0
            fit.first_skip = None
            fit.evidence.resize()
        if outcome.scale != outcome.next_scale:
            fit.raised_at = run.global_step if outcome.next_scale > outcome.scale else -1
        if is_due:
            self._check_losses(run)
            fit.checks += 1
            self._stop_probe(run)
            counts = [] if self._probe is None else self._probe.finish()
            if counts and not outcome.skipped and (counts[0].subnormal > MAX_UNDERFLOW or counts[0].zeros == 1.0):
                step = run.global_step - len(outcome.optimizers)
                self._explain(run, fit, "underflow", fit.evidence.batches_of(step), step, outcome.scale)
        is_counted = not fit.checks & (fit.checks + 1)  # before the 1st, 2nd, 4th check and so on
        if self._probe is not None and fit.evidence.is_due_next and is_counted:
            run.scaler.before_unscale.append(self._count_small)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Check the losses so far."""
        self._check_losses(state_of(trainer))

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Check the losses so far."""
        self._check_losses(state_of(trainer))

    def on_train_end(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Check the last losses."""
        self._check_losses(state_of(trainer))
        for report in self.reports:
            if report.count > 1:
                self._write(state_of(trainer), report)

    def on_exception(self, trainer: pl.Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Explain an index that is out of range, or a number that exceeds the range of float16."""
        if self._fit is not None:
            self._explain_error(state_of(trainer), self._fit, exception)
        super().on_exception(trainer, pl_module, exception)

    def _explain_error(self, run: RunState, fit: _Fit, exception: BaseException) -> None:
        is_examined = isinstance(exception, (IndexError, RuntimeError, ValueError))
        if fit.host_batches is not None and is_device_assert(exception):
            fit.first_norm = None  # on the device, which can no longer be read
            with suppress(Exception):  # the module cannot be copied, or does not run on the CPU
                if (failing := fit.host_batches.failing()) is not None:
                    self._explain(run, fit, "error", [failing[0]], failing[0].step, fit.evidence.scale, failing[1])
        elif run.world_size == 1 and is_examined and not is_out_of_memory(exception):
            with suppress(Exception):  # the run ends with `exception`
                self._check_losses(run)
            metrics, progress, step = fit.loop.metrics, fit.loop.progress, run.global_step
            if metrics.batch is not None and metrics.in_batch:
                recorded = RecordedBatch(metrics.batch, progress.batch_idx, step, copy(fit.loop.mean), {})
                self._explain(run, fit, "error", [recorded], step, run.loss_scale, exception)

    def _explain(
        self,
        run: RunState,
        fit: _Fit,
        trigger: str,
        batches: Sequence[RecordedBatch],
        step: int,
        scale: float,
        error: BaseException | OutOfRange | None = None,
    ) -> None:
        """Report the cause of an event, or count it if it was reported before. All ranks call this.

        Args:
            run: the state of the run.
            fit: the evidence.
            trigger: the kind of event (:class:`~trainer.diagnosis.diagnose.Case`). Only the 1st, 2nd, 4th
                and 8th event of a kind are examined.
            batches: the batches of the window; [] if they are no longer stored.
            step: ``trainer.global_step`` when the weight update began.
            scale: the loss scale of the update.
            error: the exception that ended the step, or the tensor that it rejected, or None.
        """
        latest = fit.latest.get(trigger)
        fit.occurrences[trigger] += 1
        times = fit.occurrences[trigger]
        if times > 2 ** (_EXAMINED - 1) or times & (times - 1):  # the 1st, 2nd, 4th and 8th time
            if latest is not None:
                latest.count += 1
            return
        first = min((batch.step for batch in batches), default=step)
        recorded = fit.evidence.batches()
        recent = [batch for batch in recorded if batch.step < first]
        try:
            norm = fit.first_norm  # reading it is a host-device synchronization; None on a rank without a loss so far
            since = fit.known if norm is None or norm.isfinite() else -1
            since = int(run.collectives.reduce(torch.tensor(since, device=run.device), "min"))
            evidence = recent, fit.weights, since, fit.first_buffers
            counts = fit.skips, trigger, self.reports, fit.weights_step
            case = Case(step, batches, scale, *evidence, *counts, error, fit.growth, recorded[len(recent) :])
            diagnosis = diagnose(run, case)
        except Exception:  # the user's code may fail if it runs twice; this must not end the run
            log.info("Step %d could not be examined, because its replay failed.", step, exc_info=True)
            return
        if diagnosis is None:
            return
        known = next(
            (report for report in self.reports if (report.kind, report.key) == (diagnosis.kind, diagnosis.key)), None
        )
        fit.latest[trigger] = known or diagnosis
        if known is None:
            finish = None if self.on_verdict is None else self.on_verdict(run, case, diagnosis)
            self._report(run, diagnosis)
            if finish is not None:
                finish()
        else:
            known.count += 1

    # --- losses and gradients -------------------------------------------------------------------------------------

    def _check_losses(self, run: RunState) -> None:
        """Read the losses since the last check. A host-device synchronization."""
        fit, engine, scaled = self._fit, run.engine, run.skips_steps
        if fit is None:
            return
        is_alone, step = engine.world_size == 1, fit.loop.progress.optimizer_steps
        # with loss scaling, only the losses of steps with a known outcome
        due = fit.evidence.take_losses(step if scaled else sys.maxsize)
        if fit.is_broken or not (due or not is_alone):
            return
        values = _values_of([loss for _, loss in due])
        finite = list(filter(math.isfinite, values))
        broken: list[int] = []
        if len(finite) < len(values):
            steps = (at for (at, _), value in zip(due, values, strict=True) if not math.isfinite(value))
            broken = [at for at in steps if at not in fit.skipped]
        fit.skipped.clear()
        if engine.collectives.any_rank(bool(broken)):
            scale = run.loss_scale
            fit.is_broken = not scaled
            local = torch.tensor(broken[0] if broken else sys.maxsize, device=engine.device)
            step = int(engine.collectives.reduce(local, "min"))  # the first step on any rank
            self._note_growth(fit, due, step)
            self._explain(run, fit, "loss", fit.evidence.batches_of(step), step, scale)
            return
        is_comparable = is_alone and engine.module.automatic_optimization
        if is_comparable and len(finite) >= 6 and _has_grown(fit, finite):
            fit.growth = 0.0
            batches = fit.evidence.batches()[-1:]
            self._explain(run, fit, "growth", batches, step, run.loss_scale)
        elif len(finite) == len(values):
            self._keep_weights(run, fit)

    def _note_growth(self, fit: _Fit, losses: list[tuple[int, float | Tensor]], step: int) -> None:
        """Note whether these losses grew or fell without bound before a step. A host-device synchronization."""
        finite = list(filter(math.isfinite, _values_of([loss for at, loss in losses if at < step])))
        fit.growth = 0.0
        if not finite:
            return
        lowest, usual = min(fit.lowest, statistics.median_low(finite)), statistics.median(map(abs, finite))
        latest = max(finite[-3:], key=abs)
        falls = latest < -_FALL_FACTOR * usual
        if falls or latest - lowest > _GROWTH_FACTOR * abs(lowest):
            fit.growth = latest

    def _keep_weights(self, run: RunState, fit: _Fit) -> None:
        fit.known = fit.loop.progress.optimizer_steps
        if fit.weights and fit.known - fit.weights_step < _KEEP_EVERY:
            return
        fit.weights_step = fit.known
        if fit.parameters is None:
            named: dict[str, Tensor] = dict(run.module.named_parameters())
            named = {name: parameter for name, parameter in named.items() if is_dense(parameter)}
            is_small = sum(parameter.nbytes for parameter in named.values()) <= _BYTES
            is_whole = run.world_size == 1 and not run.is_sharded
            fit.parameters = named if is_whole and is_small else {}
        if fit.parameters and fit.weights.keys() == fit.parameters.keys():
            with torch.no_grad():
                torch._foreach_copy_(list(fit.weights.values()), list(fit.parameters.values()))
        else:
            fit.weights = {name: parameter.detach().clone() for name, parameter in fit.parameters.items()}

    def _stop_probe(self, run: RunState) -> None:
        measurements = run.scaler.before_unscale
        if self._count_small in measurements:
            measurements.remove(self._count_small)

    def _count_small(self, optimizer: Optimizer) -> None:
        """Count gradient elements that are subnormal in float16, in the last update before a check."""
        fit = self._fit
        if fit is None or self._probe is None:
            return
        gradients = fit.loop.gradients
        local = gradients.local(optimizer)
        sized = [(p.numel() * (1 + p.is_complex()), gradient) for p, gradient in local]
        if gradients.are_parts:
            total = partial(gradients.total, of=[p for p, _ in local])
            self._probe.start((("", *each) for each in sized), total)
        else:
            self._probe.start(joined(sized))

    # --- skipped steps --------------------------------------------------------------------------------------------

    def _process_skip(self, run: RunState, fit: _Fit, step: int, outcome: StepOutcome) -> None:
        """Count one skipped step, explain it if necessary, and end the run after too many of them."""
        fit.skips += 1
        fit.skips_at_floor = fit.skips_at_floor + 1 if outcome.scale <= run.scaler.min_scale else 0
        if fit.first_skip is None:
            buffers = BufferState(buffer.detach() for buffer in run.module.buffers() if is_dense(buffer))
            fit.first_skip = (step, time.time(), outcome.scale, buffers)
            # the outcome of a step may be known after the forward passes of the next one
            fit.evidence.resize(2 * fit.loop.window.size)
        fit.skipped.update(range(step, run.global_step))
        collapses = fit.skips == self.collapse_after or fit.skips_at_floor == self.at_floor
        # with manual optimization, a replay would all-reduce gradients, which changes the state of communication hooks
        replays = run.world_size == 1 or run.is_automatic
        trigger = ""
        if outcome.nonfinite_loss and replays:
            trigger = "loss"
        elif self.after is not None and fit.skips == 1 and _examines_single(run, fit, step):
            trigger = "single skip"
        elif collapses or (self.after is not None and fit.skips >= self.after):
            trigger = "skips"
        if trigger:
            self._note_growth(fit, fit.evidence.losses, step)
            self._explain(run, fit, trigger, fit.evidence.batches_of(step), step, outcome.scale)
        if collapses:
            self._collapse_error(run, fit, fit.first_skip, step)

    def _warn_of_first_scale(self, run: RunState, fit: _Fit, scale: float) -> None:
        """Warn if a training began with many skipped steps that have no other cause than the first loss scale."""
        assert fit.first_skip is not None
        step, _, first_scale, _ = fit.first_skip
        if step == 0 and fit.skips >= _MANY_SKIPS and scale < first_scale and not self.reports:
            rank_zero_warn(
                f"The first {fit.skips} optimizer steps were skipped, because the loss scale began at {first_scale:g}."
                f" {scale:g} fits: {remedies.precision(run.precision, init_scale=scale)}."
            )

    def _clean_up(self, trainer: pl.Trainer) -> None:
        """Drop the recorded batches and weights."""
        if self._fit is not None:
            self._fit.evidence.stop()
            if self._fit.host_batches is not None:
                self._fit.host_batches.stop()
        if self._probe is not None:
            self._stop_probe(state_of(trainer))
        self._fit = self._probe = None

    # --- output ---------------------------------------------------------------------------------------------------

    def _report(self, run: RunState, report: Diagnosis) -> None:
        self.reports.append(report)
        if not run.is_global_zero:
            return
        console = terminal.console(self._console)
        path = self._write(run, report)
        for line in report.lines():
            console.print(Text(line), soft_wrap=True)
        if path is not None:
            console.print(Text(f"  Details: {from_here(path)}"), soft_wrap=True)

    def _write(self, run: RunState, report: Diagnosis) -> Path | None:
        folder = Path(self.dirpath).absolute() if self.dirpath else folder_of_reports(run.trainer)
        if run.fast_dev_run or folder is None or not run.is_global_zero:
            return None
        path = folder / f"diagnosis_step_{report.step}.md"
        try:
            write_text(path, report.markdown())
            write_text(path.with_suffix(".json"), json.dumps(report.as_dict(), indent=2) + "\n")
        except OSError as problem:  # must not end the run
            warn(f"The diagnosis could not be written to {path}: {problem}")
            return None
        return path

    def _collapse_error(
        self, run: RunState, fit: _Fit, first: tuple[int, float, float, BufferState], step: int
    ) -> None:
        (first_step, seconds, scale, buffers), module = first, run.module
        trainer, scaler = run.trainer, run.scaler
        lines = [
            f"{fit.skips} optimizer steps in a row were skipped, from step {first_step} to step {step}, because"
            f" gradients were not finite; {fit.skips_at_floor} of them at the smallest loss scale,"
            f" min_scale={scaler.min_scale:g}.",
            f"Loss scale: {scale:g} at step {first_step}, {scaler.current_scale:g} now.",
        ]
        buffers.restore()
        scaler.load_state_dict({"scale": scale, "_growth_tracker": 0})
        if self.reports:
            lines += self.reports[-1].lines()[: 1 if remedies.is_command_line() else None]  # it was printed before
        if trainer.checkpoint_callbacks and not run.fast_dev_run and are_finite(module):
            folder = getattr(trainer.checkpoint_callback, "dirpath", None) or folder_of_reports(trainer)
            folder = folder or trainer.default_root_dir
            path = os.path.join(folder, "before_collapse.ckpt")  # no Path: it may be a URL
            trainer.save_checkpoint(path)
            lines.append(
                f"Weights, optimizers, schedules and the loss scale from before step {first_step}, and the buffers"
                f" after this step, are in {path}. A run that resumes from it does not repeat the batches since then."
            )
        dense = {name: buffer for name, buffer in module.named_buffers() if is_dense(buffer)}
        if broken := [name for name, buffer in dense.items() if not buffer.isfinite().all()]:
            lines.append(f"These buffers were already non-finite after step {first_step}: {', '.join(broken[:6])}.")
        folders = {getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks}
        files = [path for folder in folders if folder for path in Path(folder).glob("*.ckpt")]
        older = [path for path in files if path.stat().st_mtime <= seconds]
        if older:
            newest = max(older, key=lambda path: path.stat().st_mtime)
            lines.append(f"The newest checkpoint from before the first skipped step: {newest}.")
        lines.append("To let such a run continue, use OverflowReport(collapse_after=None, at_floor=None).")
        raise LossScaleCollapse("\n".join(lines))


def _values_of(losses: list[float | Tensor]) -> list[float]:
    """Return the losses as numbers. A host-device synchronization if some are on a device."""
    if set(map(type, losses)) <= {float, int}:
        return cast("list[float]", losses)
    on_device = [loss.reshape(()) for loss in losses if isinstance(loss, Tensor)]
    if len({(loss.dtype, loss.device) for loss in on_device}) > 1:
        on_device = [loss.to(on_device[0].device).double() for loss in on_device]
    read = iter(torch.stack(on_device).tolist())
    return [next(read) if isinstance(loss, Tensor) else loss for loss in losses]


def _has_grown(fit: _Fit, losses: list[float]) -> bool:
    """Return whether the median of the last third of the losses is much larger than the lowest such median so far.

    Return False if the learning rate was higher before and the losses have fallen to less than half of their peak.
    """
    lowest = fit.lowest if math.isfinite(fit.lowest) else min(losses[:3])
    third = losses[-max(3, len(losses) // 3) :]
    last = statistics.median(third)
    fit.lowest = min(lowest, last)
    if last - lowest <= _GROWTH_FACTOR * abs(lowest):
        return False
    peak = max((statistics.median(third[at : at + 3]) for at in range(len(third) - 2)), default=last)
    was_higher = any(
        rate > 2 * group["lr"]
        for batch in fit.evidence.batches()
        for rate, group in zip(batch.rates, fit.evidence.groups, strict=True)
    )
    return not (was_higher and statistics.median(third[-3:]) < peak / 2)


def _examines_single(run: RunState, fit: _Fit, step: int) -> bool:
    """Return whether to examine a single skip: the second one and later ones, because the first one is normal.

    Returns False if the scaler has just raised the scale, and with several processes, because a replay would need
    collectives.
    """
    if run.world_size > 1 or not run.progress.has_learned or step <= fit.raised_at:
        return False
    fit.singles += 1
    return fit.singles > 1
