"""The counters of a run. There are no others.

Each documents its unit and the code that advances it. The loops write them; other code reads them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass, field, fields, replace
from enum import Enum, auto
from typing import Any


class Position(Enum):
    """The position of a fit between the start of a batch and the start of the next one.

    Attributes:
        DONE: no batch is running, and no event is due. Also between epochs.
        STARTED: a batch is being trained, from its start to the end of its optimizer step.
        TRAINED: the batch is trained. ``on_train_batch_end`` runs, and the events after the batch are due.
        VALIDATING: a validation after the batch has begun. A run that resumes here repeats it from its beginning.
        VALIDATED: the validation is over, from ``on_validation_end`` until the next batch starts.
        EPOCH_ENDED: the epoch is trained. ``on_train_epoch_end`` runs, and the plateau schedules of the epoch are due.
    """

    DONE = auto()
    STARTED = auto()
    TRAINED = auto()
    VALIDATING = auto()
    VALIDATED = auto()
    EPOCH_ENDED = auto()


DONE, STARTED, TRAINED, VALIDATING, VALIDATED, EPOCH_ENDED = Position  # looking up a member in the class takes longer


@dataclass(frozen=True)
class EpochStart:
    """The values that the counters with these names had when the epoch of ``batch_idx`` started."""

    epoch: int = 0
    batches_started: int = 0
    batches: int = 0
    optimizer_steps: int = 0
    zero_grads: int = 0
    schedule_steps: int = 0


_SAVED_COUNTERS = (
    "batches", "optimizer_steps", "own_steps", "bare_steps", "skipped_steps", "nonfinite_losses", "has_learned",
    "updates", "zero_grads", "schedule_steps", "is_last_batch", "closing",
)  # fmt: skip
"""Counters that a checkpoint stores by name."""
_STEP_COUNTERS = (
    "optimizer_steps", "own_steps", "bare_steps", "skipped_steps", "nonfinite_losses", "completed_steps", "has_learned",
    "updates", "zero_grads", "schedule_steps",
)  # fmt: skip
"""Counters that belong to the weights. All others belong to the position in the data."""


@dataclass
class FitProgress:
    """The progress of a fit. Lives as long as the Trainer: a second ``fit`` continues to count.

    Attributes:
        epoch: epochs completed, including ``on_train_epoch_end``; ``trainer.current_epoch``. Set by the fit loop at the
            end of an epoch.
        epochs_trained: epochs with a trained last batch. One more than ``epoch`` during ``on_train_epoch_end``, when
            checkpoints are written. Set by the fit loop after an epoch's last batch.
        batch_idx: zero-based index, within the epoch, of the batch that is being trained or was trained last; -1 before
            an epoch's first. Set by the fit loop when a batch starts.
        batches_started: batches started, over all epochs. Set by the fit loop when a batch starts.
        batches: batches trained, over all epochs. Set by the fit loop before ``on_train_batch_end``.
        optimizer_steps: optimizer steps attempted, including skipped ones, summed over optimizers; windows without a
            loss also count, and a custom ``optimizer_step`` of the module counts once per call;
            ``trainer.global_step``. Set by the fit loop at each step of an optimizer.
        own_steps: the part of ``optimizer_steps`` that the module has counted itself, because it steps optimizers
            without their wrappers. Set when the module writes to Lightning's counter (``lightning/loop_state.py``).
        bare_steps: the part of ``optimizer_steps`` without the optimizers' wrappers. 0 if the module counts steps
            itself. Set at each such step.
        skipped_steps: weight updates in which an optimizer skipped its step because a gradient was not finite. Counts
            one for several optimizers. Set by the fit loop when the outcome is known.
        nonfinite_losses: the ``skipped_steps`` with a loss that was not finite on some process, so that no loss scale
            can avoid the skip. Set at the same time.
        completed_steps: steps of each optimizer (by its index) that were not skipped, since the fit began; for a
            resumed fit, since its first run began. A step counts as completed until its outcome is known. Set by the
            fit loop after an optimizer step, and when the outcome is known.
        has_learned: whether an optimizer has stepped and was not skipped. Set by the fit loop when the outcome is
            known.
        updates: accumulation windows closed, which is the step axis of the loggers. Set by the fit loop at the end of a
            window's last batch (after that batch is logged).
        zero_grads: windows that have cleared the gradients of the previous window. Set by the fit loop after a window's
            first forward.
        schedule_steps: steps of learning-rate schedules, summed over schedules. Set by the schedules.
        epoch_start: the counters when the current epoch started or, between epochs, when the last one started. Set by
            the fit loop.
        is_last_batch: whether the batch of ``batch_idx`` is its epoch's last; between epochs, whether the last epoch
            was trained to its end. Set by the fit loop when a batch starts.
        skips_epoch: whether the rest of the epoch is skipped, because ``on_train_batch_start`` has returned -1. Set by
            the fit loop when a batch starts.
        position: the position of the fit with respect to the batch of ``batch_idx``. Set by the fit loop, and by the
            evaluation loop before ``on_validation_end``.
        closing: whether a window has closed but ``updates`` does not include it yet. Set by the fit loop.
    """

    epoch: int = 0
    epochs_trained: int = 0
    batch_idx: int = -1
    batches_started: int = 0
    batches: int = 0
    optimizer_steps: int = 0
    own_steps: int = 0
    bare_steps: int = 0
    skipped_steps: int = 0
    nonfinite_losses: int = 0
    completed_steps: Counter[int] = field(default_factory=Counter)
    has_learned: bool = False
    updates: int = 0
    zero_grads: int = 0
    schedule_steps: int = 0
    epoch_start: EpochStart = field(default_factory=EpochStart)
    is_last_batch: bool = False
    skips_epoch: bool = False
    position: Position = DONE
    closing: bool = False

    @property
    def batches_this_epoch(self) -> int:
        """Batches of the current epoch that have started."""
        return self.batch_idx + 1

    def begin_epoch(self) -> None:
        """Record the counters at the start of an epoch."""
        self.epoch_start = EpochStart(*(getattr(self, counter.name) for counter in fields(EpochStart)))

    def end_epoch(self) -> None:
        """Update the counters at the end of an epoch, after its hooks."""
        self.epoch, self.batch_idx, self.position = self.epochs_trained, -1, DONE

    def end_validation(self) -> None:
        """Mark a validation that has begun as completed, before its last hook, so that it is not run again."""
        if self.position is VALIDATING:
            self.position = VALIDATED

    def count_own_steps(self, steps: int) -> None:
        """Set the number of optimizer steps that the module has counted itself."""
        self.own_steps += steps - self.optimizer_steps
        self.optimizer_steps, self.bare_steps = steps - self.bare_steps, 0

    def count_bare_step(self) -> None:
        """Count a step without the optimizer's wrapper, unless the module counts steps itself."""
        if not self.own_steps:
            self.optimizer_steps, self.bare_steps = self.optimizer_steps + 1, self.bare_steps + 1

    def jump_to_batch(self, count: int) -> None:
        """Set the counters as if ``count`` batches of the epoch had started."""
        self.batch_idx, self.batches_started = count - 1, self.epoch_start.batches_started + count

    def discard_batch(self) -> None:
        """Set the counters as if the current batch had not started, because it is trained again or never."""
        trained = self.batches - self.epoch_start.batches
        self.epoch_start = replace(self.epoch_start, batches_started=self.batches_started - trained)
        if self.position is STARTED:
            self.batch_idx, self.position = self.batch_idx - 1, DONE

    def roll_back(self, before: FitProgress) -> None:
        """Keep the step counters of the checkpoint that was just loaded, and restore the counters of the data.

        Args:
            before: these counters before the load, at the end of a batch that closes a window.
        """
        start, self.updates = before.epoch_start, self.updates + self.closing
        for name in _STEP_COUNTERS:
            setattr(before, name, getattr(self, name))
        vars(self).update(vars(before))
        counts = {
            name: min(getattr(start, name), getattr(self, name)) for name in _STEP_COUNTERS if hasattr(start, name)
        }
        self.epoch_start = replace(start, **counts)

    def restart_epoch(self) -> None:
        """Start the current epoch again after an interrupted run. Completed training still counts."""
        self.updates += self.closing
        self.completed_steps.clear()  # the optimizers are new
        self.is_last_batch = self.closing = False
        if self.batch_idx >= 0:
            self.begin_epoch()  # a checkpoint must not continue the interrupted epoch
        self.end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the counters for a checkpoint, after the last trained batch, or after the epoch if it is over.

        If a batch is being trained, the position marks the checkpoint: a resumed run repeats this batch.
        """
        return {
            "epoch": self.epochs_trained,
            "batch_idx": -1 if self.position is EPOCH_ENDED else self.batch_idx - (self.position is STARTED),
            **{name: getattr(self, name) for name in _SAVED_COUNTERS},
            "completed_steps": dict(self.completed_steps),
            "epoch_start": list(astuple(self.epoch_start)),
            "position": self.position.name,
        }

    def load_state_dict(self, state: dict[str, Any], *, finish_epoch: bool = False) -> None:
        """Restore the counters that ``state_dict`` returned.

        Args:
            state: the counters.
            finish_epoch: whether to continue an epoch that ended before its last batch, for example because of
                ``max_steps``, instead of the next one. Default: False.
        """
        for name in _SAVED_COUNTERS:
            setattr(self, name, state[name])
        start = EpochStart(*state["epoch_start"])
        self.epoch, self.batch_idx, position = state["epoch"], state["batch_idx"], Position[state["position"]]
        self.position = DONE if position in (STARTED, EPOCH_ENDED) else position
        if finish_epoch and self.batch_idx < 0 and not self.is_last_batch and self.batches > start.batches:
            self.epoch, self.batch_idx = self.epoch - 1, self.batches - start.batches - 1
        self.epochs_trained, self.batches_started = self.epoch, self.batches
        self.completed_steps = Counter(state["completed_steps"])
        self.epoch_start = replace(start, batches_started=start.batches)  # no batch is running any more


@dataclass
class EvalProgress:
    """The progress of an evaluation (validate, test or predict).

    Attributes:
        batches: batches started in the current pass, over its dataloaders. Set by the evaluation loop when a batch
            starts.
        batches_done: the batches among them that are over. Set by the evaluation loop when a batch is over.
        total_batches, total_done: the same counts over all passes or, for the validations inside a fit, over the passes
            of one epoch. Excludes sanity checks. Set by the evaluation loop at the same times.
        epoch: the fit's epoch that the totals belong to. Set by the Trainer when a fit validates.
        has_run: whether a pass other than a sanity check has finished a batch since the last reset. Set by the
            evaluation loop.
        is_last_batch: whether the pass has had its last batch. Set by the evaluation loop.
        batches_by_loader: the ``batches`` of each dataloader, by its index. Set at the same time.
        seen_batches: batches finished of each dataloader in this run, over its passes, excluding sanity checks; the
            step axis of values logged for single evaluation batches. Set by the evaluation loop after a batch is
            logged.
    """

    batches: int = 0
    batches_done: int = 0
    total_batches: int = 0
    total_done: int = 0
    epoch: int = -1
    has_run: bool = False
    is_last_batch: bool = False
    batches_by_loader: Counter[int] = field(default_factory=Counter)
    seen_batches: Counter[int] = field(default_factory=Counter)

    def begin_epoch(self, epoch: int) -> None:
        """Reset the totals if a fit validates in another epoch than before."""
        if epoch != self.epoch:
            self.epoch, self.total_batches, self.total_done = epoch, 0, 0

    def begin_pass(self) -> None:
        """Reset the counts at the start of a pass."""
        self.batches = self.batches_done = 0
        self.batches_by_loader.clear()
        self.is_last_batch = False

    def forget_batches(self) -> None:
        """Subtract the batches of the current pass from the totals, because they will be run again."""
        self.total_batches -= self.batches
        self.total_done -= self.batches_done

    def forget_run(self) -> None:
        """Reset for another run."""
        self.begin_pass()
        self.has_run = False
        self.seen_batches.clear()

    def forget_pass(self) -> None:
        """Subtract the batches of a sanity check, which does not count."""
        self.forget_batches()
        self.begin_pass()
        self.has_run = False
