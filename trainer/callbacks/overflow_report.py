"""Why steps are skipped: the post-mortem of an overflow, and the end of a run that only skips."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from lightning.pytorch import LightningModule
from rich.console import Console
from rich.text import Text
from torch.optim import Optimizer

from trainer import terminal
from trainer.callbacks.run_callback import RunCallback
from trainer.errors import LossScaleCollapse, expect, warn
from trainer.files import from_here, write_text
from trainer.postmortem.examine import examine
from trainer.postmortem.recording import RecordedBatch, Recorder
from trainer.postmortem.report import Report, names_of
from trainer.record.measures import folder_of_reports
from trainer.state.outcome import StepOutcome

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_HISTORY = 40
"""Changes of the scale that are remembered: more than it takes from 2**24 down to 1."""


class OverflowReport(RunCallback):
    """Says which layer overflows when steps are skipped, and stops a run that does nothing but skip.

    On by default where the loss is scaled. After ``after`` skipped steps in a row the batch is run again, with the
    same random numbers and a hook on every module. The report names the first module whose output is not
    finite and the first whose incoming gradient is not; how large the finite numbers around it are, and in which
    dtype; the largest loss scale that would have fit; and what to try. It is printed and written to
    ``overflow_report_step_N.md``. The replay leaves the run as it was, to the bit: weights, gradients, buffers,
    random states, metrics, logs (``trainer.postmortem`` says how, and where the limits are).

    While no step is skipped nothing is kept, copied or hooked. After ``after - 2`` skips in a row, batches
    are kept until their outcome is known: by reference, with the random states and a copy of the buffers.

    Args:
        after: skipped steps in a row that draw a report, one for each such row; at least 3, because fewer are
            how a loss scale finds its level. None for no such report.
        at_step: report on this optimizer step as well (``trainer.global_step`` when it begins, or the next one that
            comes), skipped or not, and in any precision: how far is it from overflowing? Copies the weights, once.
        collapse_after: skipped steps in a row that stop the run; None to go on. 50 is past the 16 skips that it takes
            from the default scale, 2**16, down to 1, three times over.
        at_floor: skipped steps in a row, all at the scaler's ``min_scale``, that stop the run: the scale
            cannot fall any further. None to go on.
        dirpath: folder of the files. Default: that of the first logger, or ``trainer.default_root_dir``; on the command
            line the run's folder.
        console: where to print. Default: rich's global console, which writes to ``sys.stdout``.

    Attributes:
        reports: the reports of this run (:class:`~trainer.postmortem.report.Report`), the same on all ranks.

    Raises:
        ConfigurationError: a number out of range.
        LossScaleCollapse: while training; see ``collapse_after`` and ``at_floor``. Where the Trainer writes
            checkpoints, ``before_collapse.ckpt`` is written before, with the buffers and the scale from before the
            skipped steps; weights, optimizers and schedules have not changed since.
    """

    unsupported_with: ClassVar = {
        "deepspeed": "runs the batches of a skipped step again, for gradients that DeepSpeed keeps to itself."
    }
    observes_only: ClassVar = True
    reset_in_copies: ClassVar = {"_demand": None, "_recorder": None, "_before": None}

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
        expect(at_step is None or at_step >= 0, "the number of a step, from 0, or None", at_step=at_step)
        expect(collapse_after is None or collapse_after >= 3, "at least 3, or None", collapse_after=collapse_after)
        expect(at_floor is None or at_floor >= 1, "at least 1, or None", at_floor=at_floor)
        self.after = after
        self.at_step = at_step
        self.collapse_after = collapse_after
        self.at_floor = at_floor
        self.reports: list[Report] = []
        self.dirpath = dirpath
        self._console = console
        self._demand: Recorder | None = None  # for at_step
        self._recorder: Recorder | None = None  # while steps are skipped
        self._history: deque[tuple[int, float]] = deque(maxlen=_HISTORY)
        self._skips = 0  # in a row, up to now
        self._skips_at_floor = 0
        self._has_reported = False  # on this row of skips
        self._before: _BeforeSkips | None = None
        # with a fused optimizer on a GPU, the outcome of a step comes one step late
        limits = [limit for limit in (after, collapse_after, at_floor) if limit is not None]
        self._record_from = max(1, min(limits) - 2) if limits else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget an earlier run."""
        self._clean_up(trainer)
        self.reports = []
        self._history.clear()
        self._history.append((trainer.global_step, trainer.scaler.current_scale))
        if self.at_step is not None and trainer.global_step <= self.at_step:
            self._demand = Recorder(trainer, self.at_step, parameters=True)

    def on_after_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer, outcome: StepOutcome
    ) -> None:
        """Count skipped steps. A few comparisons where none is, and none has just been."""
        if not (outcome.skipped or self._skips or self._demand or outcome.scale != outcome.next_scale):
            return
        if optimizer is not trainer.optimizers[outcome.optimizers[0]]:  # several optimizers are one step
            return
        step, at_step = trainer.global_step - len(outcome.optimizers), self.at_step
        if outcome.scale != outcome.next_scale:
            self._history.append((trainer.global_step, outcome.next_scale))
        demanded = self._demand.take() if self._demand is not None else []
        if outcome.skipped:
            self._take_skip(trainer, step, outcome)
        elif self._skips:
            self._end_skips()
        if self._demand is None or at_step is None or step < at_step:
            return
        if any(report.step == step for report in self.reports) or self._report(trainer, step, outcome, demanded):
            self._demand.stop()
            self._demand = None

    def _take_skip(self, trainer: Trainer, step: int, outcome: StepOutcome) -> None:
        """Count one skipped step; report, and end the run, where it is time to."""
        at_floor = outcome.scale <= trainer.scaler.min_scale
        self._skips += 1
        self._skips_at_floor = self._skips_at_floor + 1 if at_floor else 0
        if self._before is None:
            self._before = _BeforeSkips(trainer, step, outcome.scale)
        batches = self._recorder.take() if self._recorder is not None else []
        collapses = self._skips == self.collapse_after or self._skips_at_floor == self.at_floor
        is_due = self.after is not None and self._skips >= self.after and not self._has_reported
        if self._recorder is not None and (is_due or collapses):
            self._has_reported |= self._report(trainer, step, outcome, batches)
        if collapses:
            self._collapse(trainer, step)
        if self._recorder is None and self._record_from is not None and self._skips >= self._record_from:
            self._recorder = Recorder(trainer)

    def _end_skips(self) -> None:
        self._skips = self._skips_at_floor = 0
        self._has_reported = False
        self._before = None
        if self._recorder is not None:
            self._recorder.stop()
            self._recorder = None

    def _clean_up(self, trainer: Trainer) -> None:
        """Drop the recorded batches."""
        self._end_skips()
        if self._demand is not None:
            self._demand.stop()
            self._demand = None

    def _report(self, trainer: Trainer, step: int, outcome: StepOutcome, batches: Sequence[RecordedBatch]) -> bool:
        """Replay the step, and say what was found: on rank 0 of them all. False where no rank has recorded it."""
        finding = examine(trainer, batches, outcome.scale)
        if finding is None:
            return False
        floor, world_size = trainer.scaler.min_scale, trainer.world_size
        report = Report(step, self._skips, trainer.precision, floor, world_size, finding)
        self.reports.append(report)
        folder = self._folder(trainer)
        if not trainer.is_global_zero:
            return True
        console = terminal.console(self._console)
        path = None if trainer.fast_dev_run or folder is None else folder / f"overflow_report_step_{step}.md"
        if path is not None:
            _write(path, report.markdown())
        if not self._has_reported:  # once on a row of skips is enough; the file is there of both
            console.print(report.table().drawn())
            if path is not None:  # a line of its own, good to paste
                console.print(Text(f" report        {from_here(path)}\n"), soft_wrap=True)
        return True

    def _collapse(self, trainer: Trainer, step: int) -> None:
        before, module = self._before, trainer.lightning_module
        assert before is not None
        before.restore(trainer)
        lines = [
            f"{self._skips} optimizer steps in a row were skipped, from step {before.step} to step {step}, because"
            f" gradients were not finite; {self._skips_at_floor} of them at the smallest loss scale,"
            f" min_scale={trainer.scaler.min_scale:g}.",
            f"Loss scale: {_told(self._history, len(trainer.optimizers))}.",
        ]
        if self.reports and self.reports[-1].step >= before.step:
            report = self.reports[-1]
            lines.append(report.verdict)
            if report.finding.parameters:
                lines.append(f"Gradients that are not finite: {names_of(report.finding.parameters)}.")
            lines += [f"Try: {advice}" for advice in report.advice]
        if trainer.checkpoint_callbacks and not trainer.fast_dev_run:
            folder = getattr(trainer.checkpoint_callback, "dirpath", None) or self._folder(trainer)
            folder = folder or trainer.default_root_dir
            path = os.path.join(folder, "before_collapse.ckpt")  # no Path: it may be a URL
            trainer.save_checkpoint(path)
            lines.append(
                f"Weights, optimizers, schedules, buffers and the loss scale from before step {before.step} are in"
                f" {path}; a run that resumes from it begins with the batch that is under way."
            )
        if broken := [name for name, buffer in module.named_buffers() if not buffer.isfinite().all()]:
            lines.append(
                f"These buffers were not finite after step {before.step} already: {names_of(broken)}. Reset them, or"
                " take them from an older checkpoint."
            )
        if older := _newest_checkpoint(trainer, before.time):
            lines.append(f"The newest checkpoint from before: {older}.")
        lines.append("OverflowReport(collapse_after=None, at_floor=None) lets such a run go on.")
        raise LossScaleCollapse("\n".join(lines))

    def _folder(self, trainer: Trainer) -> Path | None:
        return Path(self.dirpath).absolute() if self.dirpath else folder_of_reports(trainer)


class _BeforeSkips:
    """What skipped steps change although they leave the weights alone: the buffers, and the scale.

    Made when the first one's outcome is known: its own forward has been through the buffers.

    Args:
        trainer: whose.
        step: of the first skipped step.
        scale: that it was computed with.
    """

    def __init__(self, trainer: Trainer, step: int, scale: float) -> None:
        self.step = step
        self.time = time.time()
        self._scale = scale
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in trainer.lightning_module.buffers()]

    def restore(self, trainer: Trainer) -> None:
        """Restore them. The scale grows again when a whole ``growth_interval`` has passed."""
        for buffer, content in self._buffers:
            buffer.data.copy_(content)
        trainer.scaler.load_state_dict({"scale": self._scale, "_growth_tracker": 0})


def _told(history: Sequence[tuple[int, float]], stride: int) -> str:
    """``65536 from step 0, 32768 to 1 in steps 13 to 28``: falls in steps that follow each other become one."""
    told: list[str] = []
    entries = list(history)
    while entries:
        end = 1
        while (
            end < len(entries)
            and entries[end][1] < entries[end - 1][1]
            and entries[end][0] - entries[end - 1][0] <= stride
        ):
            end += 1
        (first, high), (last, low) = entries[0], entries[end - 1]
        told.append(f"{high:g} from step {first}" if end == 1 else f"{high:g} to {low:g} in steps {first} to {last}")
        del entries[:end]
    return ", ".join(told)


def _newest_checkpoint(trainer: Trainer, before: float) -> Path | None:
    """The newest file in the folders of the checkpoint callbacks that was written before this moment."""
    folders = {getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks}
    files = [path for folder in folders if folder for path in Path(folder).glob("*.ckpt")]
    return max((p for p in files if p.stat().st_mtime <= before), key=lambda p: p.stat().st_mtime, default=None)


def _write(path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as problem:  # no reason to end a run
        warn(f"The overflow report could not be written to {path}: {problem}")
