"""The counters of a run. There are no others.

Each says its unit and who advances it. The loops write them; everybody else reads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class EpochStart:
    """What the counters of a fit of the same names were when the epoch of ``batch_idx`` started."""

    epoch: int = 0
    batches_started: int = 0
    batches: int = 0
    optimizer_steps: int = 0
    zero_grads: int = 0
    schedule_steps: int = 0


_AS_THEY_ARE = (
    "batches", "optimizer_steps", "own_steps", "skipped_steps", "has_learned", "zero_grads", "schedule_steps",
    "is_last_batch",
)  # fmt: skip
"""Counters that a checkpoint keeps by their names."""
_OF_STEPS = (
    "optimizer_steps", "own_steps", "skipped_steps", "completed_steps", "has_learned", "updates", "zero_grads",
    "schedule_steps",
)  # fmt: skip
"""What is counted of the weights; all else is about the data."""


@dataclass
class FitProgress:
    """How far a fit has come. Lives as long as the Trainer: a second ``fit`` goes on counting.

    Attributes:
        epoch: epochs completed, ``on_train_epoch_end`` included; ``trainer.current_epoch``. The fit loop, at the
            end of an epoch.
        epochs_trained: epochs whose last batch is trained. One more than ``epoch`` while ``on_train_epoch_end``
            runs, which is where checkpoints are written. The fit loop, after an epoch's last batch.
        batch_idx: zero-based index, within the epoch, of the batch that is being trained or was trained last;
            -1 before an epoch's first. The fit loop, when a batch starts.
        batches_started: batches started, over all epochs. The fit loop, when a batch starts.
        batches: batches trained, over all epochs. The fit loop, before ``on_train_batch_end``.
        optimizer_steps: optimizer steps attempted, skipped ones included, each optimizer counted; windows without a
            loss count as well, and an ``optimizer_step`` of the module's own once a call; ``trainer.global_step``. The
            fit loop, at each step of an optimizer.
        own_steps: those of them that the module has counted itself, as it steps optimizers past their wrappers. Set by
        whoever writes Lightning's count (``compat/loop_state.py``).
        skipped_steps: weight updates skipped because a gradient was not finite. The fit loop, when the outcome is
            known.
        completed_steps: steps of each optimizer (by its index) that were not skipped, since the fit began; of a resumed
            fit, since the first run of it began. A step counts as completed until its outcome is known. The fit loop,
            after a weight update, and when the outcome is known.
        has_learned: whether an optimizer has stepped and was not skipped. The fit loop, when the outcome is known.
        updates: accumulation windows closed, which is the step axis of the loggers. The fit loop, at the end of a
            window's last batch (after that batch is logged).
        zero_grads: windows whose old gradients have been cleared, which is after their first forward. The fit loop.
        schedule_steps: steps of learning-rate schedules, each schedule counted. The schedules.
        epoch_start: the counters when the current epoch started, or between epochs the last one. The fit loop.
        is_last_batch: whether the batch of ``batch_idx`` is its epoch's last. The fit loop, when a batch starts.
        is_trained: whether the batch of ``batch_idx`` is trained: False from its start until its weight update is over.
            The fit loop.
        in_batch: whether a batch is being trained, ``on_train_batch_end`` included. The fit loop.
        closing: whether a window has closed that ``updates`` does not count yet. The fit loop.
        resumed_epoch: the epoch inside of which a checkpoint has put the fit; -1 without one. Set by the resume.
        is_followed_up: whether what follows the batch of ``batch_idx``, such as a validation, is over. The fit loop.
        owes_validation: whether a validation is under way that is to be run to its end: from its beginning, if a
            checkpoint was written meanwhile. The fit loop; the evaluation loop, before ``on_validation_end``.
        has_validated: whether a validation has followed the batch, and is over. The evaluation loop; the fit loop, when
            the next batch starts.
    """

    epoch: int = 0
    epochs_trained: int = 0
    batch_idx: int = -1
    batches_started: int = 0
    batches: int = 0
    optimizer_steps: int = 0
    own_steps: int = 0
    skipped_steps: int = 0
    completed_steps: Counter[int] = field(default_factory=Counter)
    has_learned: bool = False
    updates: int = 0
    zero_grads: int = 0
    schedule_steps: int = 0
    epoch_start: EpochStart = field(default_factory=EpochStart)
    is_last_batch: bool = False
    is_trained: bool = True
    in_batch: bool = False
    closing: bool = False
    resumed_epoch: int = -1
    is_followed_up: bool = True
    owes_validation: bool = False
    has_validated: bool = False

    @property
    def batches_this_epoch(self) -> int:
        """Batches of the current epoch that have started."""
        return self.batch_idx + 1

    @property
    def batches_trained_this_epoch(self) -> int:
        """Batches of the current epoch that are trained."""
        return self.batch_idx + self.is_trained

    def begin_epoch(self) -> None:
        """An epoch starts."""
        self.epoch_start = EpochStart(*(getattr(self, counter.name) for counter in fields(EpochStart)))

    def begin_batch(self, batch_idx: int, is_last: bool) -> None:
        """A batch starts."""
        self.batch_idx, self.is_last_batch = batch_idx, is_last
        self.batches_started += 1
        self.in_batch, self.is_trained, self.is_followed_up, self.has_validated = True, False, False, False

    def end_epoch(self) -> None:
        """An epoch is over, its hooks included."""
        self.epoch += 1
        self.batch_idx, self.is_trained = -1, True  # no batch is under way, not even one that was skipped
        self.is_followed_up, self.owes_validation, self.has_validated = True, False, False

    def end_validation(self) -> None:
        """An evaluation is over but for its last hook. If it is the validation under way, it need not be run again."""
        if self.owes_validation:
            self.owes_validation, self.has_validated = False, True

    def count_own_steps(self, steps: int) -> None:
        """Set the number of optimizer steps that the module has counted itself."""
        self.own_steps += steps - self.optimizer_steps
        self.optimizer_steps = steps

    def jump_to_batch(self, count: int) -> None:
        """As if ``count`` batches of the epoch had started."""
        self.batch_idx, self.batches_started = count - 1, self.epoch_start.batches_started + count

    def give_up_batch(self) -> None:
        """The batch that is under way will be trained again, or never."""
        trained = self.batches - self.epoch_start.batches
        self.epoch_start = replace(self.epoch_start, batches_started=self.batches_started - trained)
        self.batch_idx = self.batches_trained_this_epoch - 1
        self.in_batch, self.is_trained = False, True

    def roll_back(self, before: FitProgress) -> None:
        """Count the steps as in the checkpoint that was just loaded, while the data goes on where it was.

        Args:
            before: these counters before that, at the end of a batch that closes a window.
        """
        start, self.updates = before.epoch_start, self.updates + self.closing - 1  # which will be counted once more
        for name in _OF_STEPS:
            setattr(before, name, getattr(self, name))
        vars(self).update(vars(before))
        counts = {name: min(getattr(start, name), getattr(self, name)) for name in _OF_STEPS if hasattr(start, name)}
        self.epoch_start = replace(start, **counts)

    def start_anew(self) -> None:
        """After an interrupted run: what was trained counts, and the epoch that was not starts from its beginning."""
        self.updates += self.closing
        self.completed_steps.clear()  # the optimizers are new
        self.epoch, self.resumed_epoch = self.epochs_trained, -1
        self.batch_idx = -1
        self.is_last_batch = self.in_batch = self.closing = self.owes_validation = self.has_validated = False
        self.is_trained = self.is_followed_up = True

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the counters as they are after the current batch, or when the epoch is over.

        What follows a batch may still be to come: ``is_followed_up``.
        ``cut_short`` are the batches of an epoch that ends before its last one, because of ``max_steps``, say.
        """
        over = self.epochs_trained > self.epoch
        follows = self.is_trained and not self.is_followed_up and not over
        return {
            "epoch": self.epochs_trained,
            "batch_idx": -1 if over else self.batches_trained_this_epoch - 1,
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            "completed_steps": dict(self.completed_steps),
            "windows": self.updates + (self.closing and not follows),
            "closing": self.closing and follows,
            "epoch_start": list(astuple(self.epoch_start)),
            "cut_short": self.batches_trained_this_epoch if over and not self.is_last_batch else 0,
            "is_followed_up": not follows,
            "owes_validation": follows and self.owes_validation,
            "has_validated": self.has_validated and not over,
        }

    def load_state_dict(self, state: dict[str, Any], *, finish_epoch: bool = False) -> None:
        """Go on from what ``state_dict`` returned.

        Args:
            state: what it returned.
            finish_epoch: go on with an epoch that was cut short, too, not with the next one.
        """
        self.epoch = self.epochs_trained = state["epoch"]
        self.batch_idx = state["batch_idx"]
        if finish_epoch and state.get("cut_short"):
            self.epoch = self.epochs_trained = state["epoch"] - 1
            self.batch_idx = state["cut_short"] - 1
        for name in _AS_THEY_ARE:
            setattr(self, name, state.get(name, 0))
        self.completed_steps = Counter(state.get("completed_steps", {}))
        start = EpochStart(*state.get("epoch_start", ()))
        self.epoch_start = replace(start, batches_started=start.batches)  # no batch is under way any more
        self.batches_started = self.batches
        self.has_learned = state.get("has_learned", state["optimizer_steps"] > 0)
        self.updates = state["windows"]
        self.is_followed_up = state.get("is_followed_up", True)
        self.owes_validation = state.get("owes_validation", False)
        self.has_validated = state.get("has_validated", False)
        self.in_batch, self.closing = False, state.get("closing", False)
        self.is_trained = True


@dataclass
class EvalProgress:
    """How far an evaluation (validate, test or predict) has come.

    Attributes:
        batches: batches started in the current pass, over its dataloaders. The evaluation loop, when a batch starts.
        batches_done: those of them that are over. The evaluation loop, when a batch is over.
        total_batches, total_done: the same over all passes, and of the validation inside a fit over those of one of
            its epochs. Sanity checks excluded. The evaluation loop, likewise.
        epoch: the fit's epoch that the totals belong to. The Trainer, when a fit validates.
        has_run: whether a pass other than a sanity check has finished a batch since the last reset. The
            evaluation loop.
        is_last_batch: whether the pass has had its last batch. The evaluation loop.
        seen_batches: batches finished of each dataloader in this run, over its passes, sanity checks excluded; the
            step axis of what single evaluation batches log. The evaluation loop, after a batch is logged.
    """

    batches: int = 0
    batches_done: int = 0
    total_batches: int = 0
    total_done: int = 0
    epoch: int = -1
    has_run: bool = False
    is_last_batch: bool = False
    seen_batches: Counter[int] = field(default_factory=Counter)

    def begin_epoch(self, epoch: int) -> None:
        """A fit validates in ``epoch``."""
        if epoch != self.epoch:
            self.epoch, self.total_batches, self.total_done = epoch, 0, 0

    def begin_pass(self) -> None:
        """A pass starts."""
        self.batches = self.batches_done = 0
        self.is_last_batch = False

    def forget_batches(self) -> None:
        """The batches of the current pass that are over will be run again."""
        self.total_batches -= self.batches_done
        self.total_done -= self.batches_done

    def forget_run(self) -> None:
        """Reset for another run."""
        self.begin_pass()
        self.has_run = False
        self.seen_batches.clear()

    def forget_pass(self) -> None:
        """A sanity check is over; it is not counted."""
        self.total_batches -= self.batches
        self.total_done -= self.batches_done
        self.begin_pass()
        self.has_run = False
