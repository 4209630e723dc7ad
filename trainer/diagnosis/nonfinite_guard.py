"""Stop, skip or continue if losses, gradients or weights are not finite, in every precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
from lightning.pytorch import LightningModule
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from trainer.common.module_tree import is_measurable
from trainer.common.run_callback import RunCallback, refuse_other_trainers
from trainer.diagnosis.diagnose import Case, diagnose
from trainer.diagnosis.recording import RecordedBatch, Recorder
from trainer.diagnosis.remedies import is_command_line
from trainer.errors import ConfigurationError, NonFiniteError, expect, is_count, join_first, rank_zero_warn
from trainer.loop.closures import needs_closure
from trainer.loop.run_state import RunState, state_of
from trainer.precision.guard import StepGuard
from trainer.record.measures import last_diagnosis
from trainer.state.outcome import StepOutcome
from trainer.state.progress import FitProgress


class NonFiniteGuard(RunCallback):
    """Skip steps with nonfinite gradients in every precision, and stop or continue the run.

    The callback checks the gradients of each step. If one is not finite, the step is skipped, as by the loss scaler of
    float16: weights, optimizer states, schedules and averages do not change, and ``trainer.skipped_steps`` counts it.
    Nonfinite elements of buffers (BatchNorm's running mean) are restored. Then the policy applies:

    ``"stop"``      ends the run with a :class:`~trainer.errors.NonFiniteError`. A replay of the window's batches finds
                    the batch and the first nonfinite value: in the batch, in the output of a layer, or in a gradient.
                    The weights are those of the last good step, and no checkpoint contains nonfinite weights.
    ``"skip"``      continues with the next batch, until ``max_in_a_row`` steps in a row were skipped.
    ``"continue"``  checks nothing, like plain torch.

    With loss scaling (``16-mixed``), overflowed gradients are normal while the loss scale adapts, and
    :class:`~trainer.callbacks.OverflowReport` reports problems. Then ``"stop"`` ends the run only if a loss in the
    window of a skipped step is not finite, and ``"skip"`` only restores buffers.

    The default callback is ``NonFiniteGuard(every_step=False)``, which adds nothing to a step. It checks the weights
    before a fit writes a checkpoint, and stops the run if they are not finite, so that no good checkpoint is replaced.
    ``NonFiniteGuard("continue")`` disables this check, too.

    A nonfinite loss with finite gradients is not detected. Values that a skipped step passed to ``self.log`` stay in
    the mean of the epoch.
    LBFGS, and other optimizers that evaluate the loss, cannot skip steps. On a GPU, a fused optimizer causes no
    host-device synchronization, and its outcome is known one step later; other optimizers synchronize at each step.

    Args:
        policy: ``"stop"``, ``"skip"`` or ``"continue"``, see above. Default: ``"stop"``. ``"go_on"`` is a
            deprecated name of ``"continue"``.
        every_step: whether to check each step. If False, only the weights are checked, before a checkpoint is written.
            Default: True.
        max_in_a_row: with ``"skip"``, the number of skipped steps in a row that end the run. None for no limit.
            Default: 50.

    Raises:
        ConfigurationError: if the policy is unknown, or a number is out of range; when a fit starts, if each step is
            to be checked and an optimizer evaluates the loss itself.
        NonFiniteError: while training, see above.
    """

    observes_only: ClassVar = True
    sees_each_save: ClassVar = True
    reset_in_copies: ClassVar = {"_scaler": None, "_recorder": None}

    def __init__(
        self,
        policy: Literal["stop", "skip", "continue", "go_on"] = "stop",
        *,
        every_step: bool = True,
        max_in_a_row: int | None = 50,
    ) -> None:
        if policy == "go_on":
            rank_zero_warn(
                "NonFiniteGuard('go_on') is deprecated and will be removed in version 0.3. Use"
                " NonFiniteGuard('continue').",
                FutureWarning,
            )
            policy = "continue"
        expect(policy in ("stop", "skip", "continue"), "'stop', 'skip' or 'continue'", policy=policy)
        expect(max_in_a_row is None or is_count(max_in_a_row), "at least 1 step, or None", max_in_a_row=max_in_a_row)
        self.policy = policy
        self.every_step = every_step and policy != "continue"
        self.max_in_a_row = max_in_a_row
        if not self.every_step:
            self._omit(NonFiniteGuard.on_before_optimizer_step)
            self._omit(NonFiniteGuard.on_after_optimizer_step)
        self._scaler: Any = None  # the Trainer's scaler while it is replaced
        self._recorder: Recorder | None = None
        self._in_a_row = 0
        self._has_warned = False

    @property
    def unsupported_with(self) -> Mapping[str, str]:
        """The strategies that cannot replay a batch, and the reasons."""
        if not self.every_step or self.policy != "stop":
            return {}
        return {"deepspeed": "runs batches again to find the origin of a nonfinite value. Use NonFiniteGuard('skip')."}

    def setup(self, trainer: pl.Trainer, pl_module: LightningModule, stage: str) -> None:
        """If the Trainer's scaler neither scales nor skips, use one that skips steps."""
        refuse_other_trainers(self, trainer)
        run = state_of(trainer)
        if stage == "fit" and self.every_step and not run.skips_steps:
            engine = run.engine
            self._scaler = engine.gradients.use_scaler(StepGuard(engine.device.type))

    def on_train_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Reset the counts."""
        self._in_a_row, self._has_warned = 0, False
        if not self.every_step:
            return
        greedy = [type(optimizer).__name__ for optimizer in trainer.optimizers if needs_closure(optimizer)]
        if greedy:
            raise ConfigurationError(
                f"Got NonFiniteGuard({self.policy!r}) and the optimizer {greedy[0]}, which evaluates the loss itself,"
                " several times a step: such a step cannot be skipped. Use NonFiniteGuard(every_step=False)."
            )
        self._recorder = Recorder(state_of(trainer), keeps_batches=self.policy == "stop")

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Assign the recorded batches to this step."""
        if self._recorder is not None:
            self._recorder.close()

    def on_after_optimizer_step(
        self, trainer: pl.Trainer, pl_module: LightningModule, optimizer: Optimizer, outcome: StepOutcome
    ) -> None:
        """Apply the policy to a skipped step."""
        if self._recorder is None or optimizer is not trainer.optimizers[outcome.optimizers[0]]:
            return
        batches = self._recorder.closed
        if not outcome.skipped:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        step = trainer.global_step - len(outcome.optimizers)
        for recorded in batches:
            if recorded.buffers is not None:
                recorded.buffers.restore_nonfinite()
        run = state_of(trainer)
        scales = run.scaler.is_enabled()
        if self.policy == "stop":
            if not scales or outcome.nonfinite_loss:
                raise _error(run, step, outcome, batches)
        elif not scales:
            self._warn_or_stop(run.progress, step)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Raise if weights are not finite, to keep the last good checkpoint. A host-device synchronization."""
        state = trainer.state
        if self.policy == "continue" or state.fn != "fit" or state.status != "running":
            return
        if broken := _nonfinite_parameters(state_of(trainer)):
            report = last_diagnosis(trainer)
            lines = [] if report is None else report.lines()[: 1 if is_command_line() else None]
            raise NonFiniteError(
                f"The weights are not finite at step {trainer.global_step} of epoch {trainer.current_epoch}, so they"
                f" were not saved: {join_first(broken, 6)}."
                " NonFiniteGuard('continue') saves such weights.\n" + "\n".join(lines),
                step=trainer.global_step,
            )

    def _warn_or_stop(self, progress: FitProgress, step: int) -> None:
        """Warn once, and end the run if too many steps in a row were skipped."""
        if self._in_a_row == self.max_in_a_row:
            raise NonFiniteError(
                f"{self._in_a_row} optimizer steps in a row, up to step {step} of epoch {progress.epoch}, were"
                " skipped because gradients were not finite. The weights are those of the last good step."
                " NonFiniteGuard('stop') names their origin; NonFiniteGuard('skip', max_in_a_row=None) has no maximum.",
                step=step,
            )
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"Optimizer step {step} of epoch {progress.epoch} was skipped, because gradients were not"
                " finite. Further skipped steps are only counted, in trainer.skipped_steps. NonFiniteGuard('stop')"
                " names their origin."
            )

    def _clean_up(self, trainer: pl.Trainer) -> None:
        """Stop recording, and restore the Trainer's scaler."""
        if self._recorder is not None:
            self._recorder.stop()
            self._recorder = None
        if self._scaler is not None:
            state_of(trainer).gradients.use_scaler(self._scaler)
            self._scaler = None


def _error(run: RunState, step: int, outcome: StepOutcome, batches: list[RecordedBatch]) -> NonFiniteError:
    """Return the error, with the diagnosis of the step. All ranks call this together."""
    case = Case(step, batches, outcome.scale, in_a_row=1)
    report = diagnose(run, case) if batches or run.world_size > 1 else None
    lines = [] if report is None else report.lines()
    lines = [
        f"Gradients were not finite at optimizer step {step} of epoch {run.epoch}.",
        *lines,
        "The step was skipped: weights, optimizers and schedules are those of the last good step."
        " NonFiniteGuard('skip') continues after such steps.",
    ]
    batch_idx = None if report is None else report.finding.batch_idx
    return NonFiniteError("\n".join(lines), step=step, batch_idx=batch_idx, report=report)


def _nonfinite_parameters(run: RunState) -> list[str]:
    """Return the names of nonfinite trained parameters. One host-device synchronization if all are finite.

    If parameters are sharded, all processes must call it together, and get the same result.
    """
    module, part, collectives = run.module, run.part, run.collectives
    measurable = [(name, p) for name, p in module.named_parameters() if is_measurable(p)]
    trained = [(name, part(p.detach())) for name, p in measurable if p.requires_grad]
    tensors = [parameter for _, parameter in trained]
    is_broken = bool(tensors) and not get_total_norm(tensors).isfinite()
    if not (collectives.any_rank(is_broken) if run.is_sharded else is_broken):
        return []
    # the norm of large finite numbers may overflow
    broken = [name for name, parameter in trained if not parameter.isfinite().all()]
    if not run.is_sharded:
        return broken
    return list(dict.fromkeys(name for names in collectives.broadcast(collectives.gather(broken)) for name in names))
