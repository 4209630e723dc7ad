"""Detect a training that breaks, report the cause, and end a run that skips every step. For every precision."""

from __future__ import annotations

import logging
import math
import os
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from lightning.pytorch import LightningModule
from rich.console import Console
from rich.text import Text
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from trainer import terminal
from trainer.callbacks.run_callback import RunCallback
from trainer.data.samples import tensors_in
from trainer.errors import LossScaleCollapse, expect, is_out_of_memory, warn
from trainer.files import from_here, write_text
from trainer.postmortem.diagnose import MUCH, Case, diagnose, out_of_range
from trainer.postmortem.examine import examine
from trainer.postmortem.recording import RecordedBatch, Recorder
from trainer.postmortem.report import Diagnosis
from trainer.postmortem.state import BufferState
from trainer.precision.scaler import kept
from trainer.precision.underflow import UnderflowProbe
from trainer.record.measures import folder_of_reports
from trainer.state.outcome import StepOutcome

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_HISTORY = 40
"""Number of stored changes of the loss scale: more than the 24 that lower it from 2**24 to 1."""
log = logging.getLogger(__name__)

_BYTES = 2**26
"""Maximum size of the stored batches, and of the stored copy of the weights."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_KEEP_EVERY = 50
"""Minimum number of optimizer steps between two copies of the weights."""
_GROWN = 10.0
"""A loss is examined if it exceeds the lowest one by this many times the lowest one."""
_EXAMINED = 4
"""Maximum number of examinations per trigger in a run."""


class OverflowReport(RunCallback):
    """Diagnose a training that breaks: one verdict and one remedy, tried before it is printed.

    On by default in every precision. Triggers: a skipped step with a non-finite loss; ``after`` skipped steps in a row;
    a non-finite loss without loss scaling; a loss that grows without bound; gradients that vanish in float16; an index
    that is out of range. After a trigger, the batch is replayed in the run's precision and in float32, and
    :func:`~trainer.postmortem.diagnose.diagnose` finds the cause. The verdict is printed in a few lines, once for each
    cause, and written with its details to ``diagnosis_step_N.md``. A replay does not change the run: weights,
    gradients, buffers, random states, metrics and logs stay the same, bit for bit.

    Adds no kernel to a step, and no host-device synchronization except every ``log_every_n_steps`` updates and before a
    validation or a checkpoint. Holds references to up to 64 MiB of recent batches (at least one batch), and a copy of
    the weights if they take at most 64 MiB.

    Args:
        after: explain this number of skipped steps in a row with finite losses; at least 3, because one or two are
            normal while the loss scale adjusts. With one process, single skips are also examined, beginning with the
            second one. None disables both. Default: 3.
        at_step: also report on this optimizer step (``trainer.global_step`` when it begins, or the first one after
            that), skipped or not, in any precision: the largest loss scale that fits. Copies the weights once. Default:
            None.
        collapse_after: number of skipped steps in a row that stop the run; None for no limit. The default, 50, is three
            times the 16 skips that lower the default scale from 2**16 to 1. Default: 50.
        at_floor: number of skipped steps in a row at the scaler's ``min_scale`` that stop the run, because the scale
            cannot decrease further; None for no limit. Default: 10.
        dirpath: folder of the files. Default: the folder of the run, or of the first logger, or the Trainer's
            ``default_root_dir`` if it was given; otherwise no file is written.
        console: console to print to. Default: rich's global console, which writes to ``sys.stdout``.

    Attributes:
        reports: the diagnoses of this run (:class:`~trainer.postmortem.report.Diagnosis`), the same on all ranks.

    Raises:
        ConfigurationError: if a number is out of range.
        LossScaleCollapse: while training; see ``collapse_after`` and ``at_floor``. If the Trainer writes checkpoints,
            ``before_collapse.ckpt`` is written first: the weights, optimizers and schedules, which the skipped steps
            have not changed, and the buffers and the loss scale from before these steps.
    """

    unsupported_with: ClassVar = {
        "deepspeed": "replays the batches of a skipped step, but DeepSpeed does not expose their gradients."
    }
    observes_only: ClassVar = True
    reset_in_copies: ClassVar = {
        "_recorder": None,
        "_first_skip": None,
        "_recent": deque(),
        "_before": {},
        "_buffers": {},
        "_loop": None,
        "_probe": None,
    }

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
        self.dirpath = dirpath
        self._console = console
        self._recorder: Recorder | None = None  # records batches while steps are skipped, or for at_step
        self._reports_step = False  # whether the report of at_step is due
        self._history: deque[tuple[int, float]] = deque(maxlen=_HISTORY)
        self._skips = 0  # number of skipped steps in a row
        self._skips_at_floor = 0
        self._singles = 0  # number of single skips, each after a step that was not skipped
        self._first_skip: _FirstSkip | None = None
        # with a fused optimizer on a GPU, the outcome of a step comes one step late
        limits = [limit for limit in (after, collapse_after, at_floor) if limit is not None]
        self._record_from = max(1, min(limits) - 2) if limits else None
        self._occurrences: Counter[str] = Counter()  # by trigger
        self._latest: dict[str, Diagnosis] = {}  # by trigger
        self._recent: deque[RecordedBatch] = deque(maxlen=1)
        self._before: dict[str, Tensor] = {}  # copy of the weights from a step at which all values were finite
        self._buffers: dict[str, Tensor] = {}  # the largest value of each buffer when the fit began
        self._known = 0  # the last step at which all values were finite
        self._kept_at = 0  # the step of `_before`
        self._latest_batch = 0  # `batches_started` of the newest batch in `_recent`
        self._losses: list[tuple[int, Tensor]] = []  # (step, scaled loss) since the last check
        self._skipped: set[int] = set()  # skipped steps since the last check
        self._every, self._updates = 50, 0  # updates between two checks, and since the last check
        self._lowest = math.inf  # the lowest median of the losses between two checks
        self._probe: UnderflowProbe | None = None
        self._checks = 0  # number of checks in this fit, one every `log_every_n_steps` updates
        self._first_norm: Tensor | None = None  # norm of the weights when the fit began, if they are not copied
        self._loop: Any = None
        self._is_broken = self._tries_scale = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the state of an earlier fit."""
        self._clean_up(trainer)
        self.reports, self._latest = [], {}
        self._occurrences.clear()
        self._history.clear()
        self._history.append((trainer.global_step, trainer.scaler.current_scale))
        if self.at_step is not None and trainer.global_step <= self.at_step:
            self._recorder, self._reports_step = Recorder(trainer, self.at_step, parameters=True), True
        self._loop, self._lowest, self._is_broken = trainer.loop, math.inf, False
        self._every, self._updates, self._checks = trainer.log_every_n_steps or 50, 0, 0
        self._recent, self._losses, self._singles = deque(maxlen=0), [], 0
        part = trainer.engine.gradients.part
        parts = {
            name: part(b.detach()) for name, b in pl_module.named_buffers() if not is_lazy(b) and b.dtype in _DTYPES
        }
        self._buffers = {name: buffer.max() for name, buffer in parts.items() if buffer.numel()}
        if trainer.scaler.is_enabled():
            self._probe = UnderflowProbe(trainer.engine.device.type)
            trainer.scaler.before_unscale.append(self._count_small)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Store the batch and its loss. Reads no value from the device."""
        loop = self._loop
        if not self._recent.maxlen:  # the first batch
            self._keep_weights(trainer)
            if not self._before:
                part = trainer.engine.gradients.part
                self._first_norm = get_total_norm([part(p.detach()) for p in pl_module.parameters() if p.numel()])
            size = sum(tensor.nbytes for tensor in tensors_in(loop.metrics.batch))
            number = (_KEEP_EVERY + self._every) * loop.window.size  # all batches since the copy of the weights
            self._recent = deque(maxlen=max(1, min(_BYTES // max(size, 1), number)))
        window, progress, losses = loop.window, loop.progress, loop.gradients.scaler.losses
        if progress.batches_started != self._latest_batch:  # a closure or a manual step may have several losses
            self._latest_batch = progress.batches_started
            position = window if window.batches == 1 else copy(window)
            recorded = RecordedBatch(loop.metrics.batch, progress.batch_idx, progress.optimizer_steps, position, {})
            self._recent.append(recorded)
        self._losses.append((progress.optimizer_steps, losses[-1] if losses else kept(loss)))

    def on_after_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer, outcome: StepOutcome
    ) -> None:
        """Process a skipped step, and check the losses every ``log_every_n_steps`` updates."""
        if optimizer is not trainer.optimizers[outcome.optimizers[0]]:  # the steps of several optimizers are one update
            return
        self._process(trainer, outcome)
        self._updates += 1
        if self._updates >= self._every:
            self._check_losses(trainer)
            self._checks += 1
            if self._probe is not None:
                self._check_underflow(trainer, trainer.global_step - len(outcome.optimizers), outcome)

    def _process(self, trainer: Trainer, outcome: StepOutcome) -> None:
        changes = outcome.scale != outcome.next_scale
        if not (outcome.skipped or self._skips or self._recorder or changes):
            return
        step = trainer.global_step - len(outcome.optimizers)
        if changes:
            last = self._history[-1]
            self._tries_scale = (  # whether the scaler has raised the scale just before this step
                outcome.skipped and step <= last[0] and len(self._history) > 1 and last[1] > self._history[-2][1]
            )
            self._history.append((trainer.global_step, outcome.next_scale))
        recorded = self._recorder.take() if self._recorder is not None else []
        if outcome.skipped:
            self._process_skip(trainer, step, outcome, recorded or self._batches_of(step))
        elif self._skips:
            self._end_skips()
        if self._reports_step and self.at_step is not None and step >= self.at_step:
            has_report = any(report.step == step for report in self.reports)
            if has_report or self._report_step(trainer, step, outcome, recorded):
                self._reports_step = False
                if not self._skips:
                    self._stop_recording()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the losses so far."""
        if trainer.training or self._losses:
            self._check_losses(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Check the losses so far."""
        self._check_losses(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the last losses."""
        self._check_losses(trainer)
        for report in {id(one): one for one in self._latest.values()}.values():
            if report.count > 1:
                self._write(trainer, report)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Explain an index that is out of range, or a number that exceeds the range of float16."""
        self._explain_error(trainer, exception)
        super().on_exception(trainer, pl_module, exception)

    def _explain(
        self, trainer: Trainer, trigger: str, batches: Sequence[RecordedBatch], step: int, scale: float
    ) -> None:
        """Report the cause of an event, or count it if it was reported before. All ranks call this.

        Args:
            trainer: the Trainer.
            trigger: the kind of event (:class:`~trainer.postmortem.diagnose.Case`). Only the first few events of one
                kind are examined.
            batches: the batches of the window; [] if they are no longer stored.
            step: ``trainer.global_step`` when the weight update began.
            scale: the loss scale of the update.
        """
        latest = self._latest.get(trigger)
        self._occurrences[trigger] += 1
        times = self._occurrences[trigger]
        if times > 2 ** (_EXAMINED - 1) or times & (times - 1):  # the 1st, 2nd, 4th and 8th time
            if latest is not None:
                latest.count += 1
            return
        first = min((one.step for one in batches), default=step)
        recent = [one for one in self._recent if one.step < first]
        norm = self._first_norm  # a host-device synchronization
        since = self._known if norm is None or not trainer.engine.any_rank(not norm.isfinite()) else -1
        evidence = recent, self._before, since, self._buffers
        case = Case(step, batches, scale, *evidence, self._skips, trigger, self.reports, self._kept_at)
        try:
            found = diagnose(trainer, case)
        except Exception:  # the user's code may fail if it runs twice; this must not end the run
            log.info("Step %d could not be examined, because its replay failed.", step, exc_info=True)
            return
        if found is None:
            return
        known = next((one for one in self.reports if (one.kind, one.key) == (found.kind, found.key)), None)
        self._latest[trigger] = known or found
        if known is None:
            self._report(trainer, found)
        else:
            known.count += 1

    # --- losses and gradients -------------------------------------------------------------------------------------

    def _check_losses(self, trainer: Trainer) -> None:
        """Read the losses since the last check. A host-device synchronization."""
        engine, scaled, is_alone = trainer.engine, trainer.scaler.skips_steps, trainer.world_size == 1
        # with loss scaling, only the losses of steps that are known to be skipped or not
        due = [(step, loss) for step, loss in self._losses if not scaled or step < trainer.global_step]
        self._losses, self._updates = self._losses[len(due) :], 0
        if self._is_broken or not (due or not is_alone) or self._loop is None:
            return
        values = _values_of([loss for _, loss in due])
        steps = [step for (step, _), value in zip(due, values, strict=True) if not math.isfinite(value)]
        broken = [step for step in steps if step not in self._skipped]
        self._skipped.clear()
        if engine.any_rank(bool(broken)):
            self._is_broken = not scaled
            local = torch.tensor(broken[0] if broken else sys.maxsize, device=engine.device)
            step = int(engine.reduce(local, "min"))  # the first step on any rank
            self._explain(trainer, "loss", self._batches_of(step), step, trainer.scaler.current_scale)
            return
        if trainer.scaler.is_enabled():
            values = [value / self._scale_of(step) for (step, _), value in zip(due, values, strict=True)]
        finite = [value for value in values if math.isfinite(value)]
        is_comparable = is_alone and trainer.lightning_module.automatic_optimization
        if is_comparable and len(finite) >= 6 and self._has_grown(finite):
            batches = list(self._recent)[-1:]
            self._explain(trainer, "growth", batches, trainer.global_step, trainer.scaler.current_scale)
        elif not steps:
            self._keep_weights(trainer)

    def _scale_of(self, step: int) -> float:
        if self._history[-1][0] <= step:
            return self._history[-1][1]
        return next((scale for begin, scale in reversed(self._history) if begin <= step), self._history[0][1])

    def _has_grown(self, losses: list[float]) -> bool:
        third = max(3, len(losses) // 3)
        first, last = min(losses[:3]), statistics.median(losses[-third:])
        lowest = min(self._lowest, first) if math.isinf(self._lowest) else self._lowest
        self._lowest = min(lowest, last)
        return last - lowest > _GROWN * abs(lowest)

    def _keep_weights(self, trainer: Trainer) -> None:
        self._known = trainer.global_step
        if self._before and self._known - self._kept_at < _KEEP_EVERY:
            return
        self._kept_at, named = self._known, dict(trainer.lightning_module.named_parameters())
        is_small = sum(parameter.nbytes for parameter in named.values()) <= _BYTES
        if trainer.world_size > 1 or trainer.engine.gradients.are_parts or not is_small:
            return
        if self._before.keys() == named.keys():
            torch._foreach_copy_(list(self._before.values()), [parameter.detach() for parameter in named.values()])
        else:
            self._before = {name: parameter.detach().clone() for name, parameter in named.items()}

    def _count_small(self, optimizer: Optimizer) -> None:
        """Count gradient elements that are subnormal in float16, before the 1st, 2nd, 4th check and so on."""
        if self._updates + 1 < self._every or self._checks & (self._checks + 1) or self._probe is None:
            return
        gradients = self._loop.gradients
        local = gradients.local(optimizer)
        total = partial(gradients.total, of=[p for p, _ in local]) if gradients.are_parts else None
        self._probe.start((("", p.numel() * (1 + p.is_complex()), gradient) for p, gradient in local), total)

    def _check_underflow(self, trainer: Trainer, step: int, outcome: StepOutcome) -> None:
        found = self._probe.finish() if self._probe is not None else []
        if found and not outcome.skipped and (found[0].subnormal > MUCH or found[0].zeros == 1.0):
            self._explain(trainer, "underflow", self._batches_of(step), step, outcome.scale)

    def _batches_of(self, step: int) -> list[RecordedBatch]:
        """Return the recent batches of this step. A batch with several steps is recorded with its first step."""
        first = max((one.step for one in self._recent if one.step <= step), default=step)
        return [one for one in self._recent if one.step == first]

    # --- skipped steps --------------------------------------------------------------------------------------------

    def _process_skip(
        self, trainer: Trainer, step: int, outcome: StepOutcome, batches: Sequence[RecordedBatch]
    ) -> None:
        """Count one skipped step, explain it if necessary, and end the run after too many of them."""
        at_floor = outcome.scale <= trainer.scaler.min_scale
        self._skips += 1
        self._skips_at_floor = self._skips_at_floor + 1 if at_floor else 0
        if self._first_skip is None:
            buffers = BufferState(buffer.detach() for buffer in trainer.lightning_module.buffers())
            self._first_skip = _FirstSkip(step, time.time(), outcome.scale, buffers)
        self._skipped.update(range(step, trainer.global_step))
        collapses = self._skips == self.collapse_after or self._skips_at_floor == self.at_floor
        # with manual optimization, a replay would all-reduce gradients, which changes the state of communication hooks
        replays = trainer.world_size == 1 or trainer.lightning_module.automatic_optimization
        if outcome.nonfinite_loss and replays:
            self._explain(trainer, "loss", batches, step, outcome.scale)
        elif self.after is not None and self._skips == 1 and self._examines_single(trainer):
            self._explain(trainer, "single skip", batches, step, outcome.scale)
        elif collapses or (self.after is not None and self._skips >= self.after):
            self._explain(trainer, "skips", batches, step, outcome.scale)
        if collapses:
            self._collapse(trainer, step)
        if self._recorder is None and self._record_from is not None and self._skips >= self._record_from:
            self._recorder = Recorder(trainer)

    def _examines_single(self, trainer: Trainer) -> bool:
        """Return whether to examine a single skip: the second one and later ones, because the first one is normal.

        Returns False with several processes, because a replay would need collectives.
        """
        if trainer.world_size > 1 or not trainer.progress.has_learned or self._tries_scale:
            return False
        self._singles += 1
        return self._singles > 1

    def _end_skips(self) -> None:
        self._skips = self._skips_at_floor = 0
        self._first_skip = None
        if not self._reports_step:
            self._stop_recording()

    def _stop_recording(self) -> None:
        if self._recorder is not None:
            self._recorder.stop()
            self._recorder = None

    def _clean_up(self, trainer: Trainer) -> None:
        """Drop the recorded batches and weights."""
        self._reports_step = False
        self._end_skips()
        self._recent, self._before, self._losses, self._loop = deque(maxlen=1), {}, [], None
        self._first_norm, self._buffers = None, {}
        if self._count_small in trainer.scaler.before_unscale:
            trainer.scaler.before_unscale.remove(self._count_small)

    def _report_step(self, trainer: Trainer, step: int, outcome: StepOutcome, batches: Sequence[RecordedBatch]) -> bool:
        """Report on the step ``at_step``. Return False if no rank has recorded it."""
        finding = examine(trainer, batches, outcome.scale)
        if finding is None:
            return False
        case = Case(step, batches, outcome.scale, in_a_row=self._skips)
        report = diagnose(trainer, case) if finding.fails else None
        cause = f"The largest loss scale that fits is {finding.largest_scale:g}."
        report = report or Diagnosis("none", cause, "", finding=finding, step=step, in_a_row=self._skips)
        self._report(trainer, report)
        return True

    # --- output ---------------------------------------------------------------------------------------------------

    def _report(self, trainer: Trainer, report: Diagnosis) -> None:
        self.reports.append(report)
        if not trainer.is_global_zero:
            return
        console = terminal.console(self._console)
        path = self._write(trainer, report)
        for line in report.lines():
            console.print(Text(line), soft_wrap=True)
        if path is not None:
            console.print(Text(f"  Details: {from_here(path)}"), soft_wrap=True)

    def _write(self, trainer: Trainer, report: Diagnosis) -> Path | None:
        folder = Path(self.dirpath).absolute() if self.dirpath else folder_of_reports(trainer)
        if trainer.fast_dev_run or folder is None or not trainer.is_global_zero:
            return None
        path = folder / f"diagnosis_step_{report.step}.md"
        try:
            write_text(path, report.markdown())
        except OSError as problem:  # must not end the run
            warn(f"The diagnosis could not be written to {path}: {problem}")
        return path

    def _explain_error(self, trainer: Trainer, exception: BaseException) -> None:
        """Explain an exception of a step from the local variables in its traceback."""
        is_examined = isinstance(exception, (IndexError, RuntimeError, ValueError))
        if trainer.world_size > 1 or self._loop is None or not is_examined or is_out_of_memory(exception):
            return
        with suppress(Exception):  # the run ends with `exception`
            self._check_losses(trainer)
        batch, progress = self._loop.metrics.batch, self._loop.progress
        if batch is None or not self._loop.metrics.in_batch:
            return
        step, scale = trainer.global_step, trainer.scaler.current_scale
        one = RecordedBatch(batch, progress.batch_idx, step, copy(self._loop.window), {})
        evidence = list(self._recent), self._before, self._known, self._buffers
        case, found = Case(step, [one], scale, *evidence, trigger="error", kept=self._kept_at), None
        index = _index_out_of_range(exception.__traceback__)
        with suppress(Exception):  # a replay fails after a device error
            if index is not None:
                found = out_of_range(trainer, case, *index, error=str(exception))
            elif "without overflow" in str(exception) or not _are_finite(trainer.lightning_module, batch):
                found = diagnose(trainer, case)
        if found is not None and all((one.kind, one.key) != (found.kind, found.key) for one in self.reports):
            self._report(trainer, found)

    def _collapse(self, trainer: Trainer, step: int) -> None:
        first, module = self._first_skip, trainer.lightning_module
        assert first is not None
        lines = [
            f"{self._skips} optimizer steps in a row were skipped, from step {first.step} to step {step}, because"
            f" gradients were not finite; {self._skips_at_floor} of them at the smallest loss scale,"
            f" min_scale={trainer.scaler.min_scale:g}.",
            f"Loss scale: {first.scale:g} at step {first.step}, {trainer.scaler.current_scale:g} now.",
        ]
        first.buffers.restore()
        trainer.scaler.load_state_dict({"scale": first.scale, "_growth_tracker": 0})
        if self.reports:
            lines += self.reports[-1].lines()
        if trainer.checkpoint_callbacks and not trainer.fast_dev_run and _are_finite(module):
            folder = getattr(trainer.checkpoint_callback, "dirpath", None) or folder_of_reports(trainer)
            folder = folder or trainer.default_root_dir
            path = os.path.join(folder, "before_collapse.ckpt")  # no Path: it may be a URL
            trainer.save_checkpoint(path)
            lines.append(
                f"Weights, optimizers, schedules, buffers and the loss scale from before step {first.step} are in"
                f" {path}; a run that resumes from it begins with the current batch."
            )
        if broken := [name for name, buffer in module.named_buffers() if not buffer.isfinite().all()]:
            lines.append(f"These buffers were already non-finite after step {first.step}: {', '.join(broken[:6])}.")
        if older := _newest_checkpoint(trainer, first.time):
            lines.append(f"The newest checkpoint from before the first skipped step: {older}.")
        lines.append("To let such a run continue, use OverflowReport(collapse_after=None, at_floor=None).")
        raise LossScaleCollapse("\n".join(lines))


def _values_of(losses: list[Tensor]) -> list[float]:
    """Return the values of losses with one element each. A host-device synchronization."""
    if len({(loss.dtype, loss.device, loss.shape) for loss in losses}) > 1:
        losses = [loss.to(losses[0].device).double().reshape(()) for loss in losses]
    return torch.stack(losses).flatten().tolist() if losses else []


def _are_finite(module: LightningModule, batch: Any = ()) -> bool:
    """Return whether all weights and all numbers of the batch are finite. A host-device synchronization."""
    return all(bool(tensor.isfinite().all()) for tensor in (*module.parameters(), *tensors_in(batch)))


def _index_out_of_range(trace: TracebackType | None) -> tuple[Tensor, int] | None:
    """Return the index that torch refused and the number of rows or classes, from the frames of the exception."""
    found: tuple[Tensor, int] | None = None
    while trace is not None:
        values, name = trace.tb_frame.f_locals, trace.tb_frame.f_code.co_name
        given, weight, target = values.get("input"), values.get("weight"), values.get("target")
        if name == "embedding" and isinstance(given, Tensor) and isinstance(weight, Tensor):
            found = given, len(weight)
        elif name in ("cross_entropy", "nll_loss") and isinstance(given, Tensor) and isinstance(target, Tensor):
            found = (
                target.masked_fill(target == values.get("ignore_index", -100), 0),
                given.shape[min(1, given.dim() - 1)],
            )
        trace = trace.tb_next
    if found is None or found[0].is_floating_point() or not ((found[0] < 0) | (found[0] >= found[1])).any():
        return None
    return found


class _FirstSkip(NamedTuple):
    """The first of several skipped steps in a row.

    Attributes:
        step: ``trainer.global_step`` when the weight update began.
        time: when its outcome was known, in seconds since the epoch.
        scale: the loss scale of the update.
        buffers: the buffers when its outcome was known, after its forward pass.
    """

    step: int
    time: float
    scale: float
    buffers: BufferState


def _newest_checkpoint(trainer: Trainer, before: float) -> Path | None:
    """Return the newest file in the folders of the checkpoint callbacks that was written before this moment."""
    folders = {getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks}
    files = [path for folder in folders if folder for path in Path(folder).glob("*.ckpt")]
    return max((p for p in files if p.stat().st_mtime <= before), key=lambda p: p.stat().st_mtime, default=None)
