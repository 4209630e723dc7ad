"""Our counters in Lightning's format: for views, and for checkpoints that both Trainers can resume.

Lightning counts four moments of an event (ready, started, processed, completed), since the start of the run (``total``)
and of the epoch (``current``). All of them are computed from our counters. A number that the tuner or a program assigns
to one of Lightning's counters is assigned to ours, if there is an equivalent one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from lightning.pytorch.loops.progress import (
    _BaseProgress,
    _BatchProgress,
    _OptimizationProgress,
    _OptimizerProgress,
    _ProcessedTracker,
    _Progress,
    _ReadyCompletedTracker,
    _SchedulerProgress,
    _StartedTracker,
)
from lightning.pytorch.trainer.states import RunningStage

from trainer.loop.run_state import RunState
from trainer.state.progress import DONE, STARTED, TRAINED, VALIDATING, EpochStart, EvalProgress, FitProgress


def epochs_of(fit: FitProgress) -> _Progress:
    """Return ``fit_loop.epoch_progress``."""
    inside = fit.epochs_trained == fit.epoch and fit.batches_this_epoch > 0
    counts = _all_counts(fit.epochs_trained + inside, fit.epochs_trained, fit.epoch)
    written = {"processed": partial(setattr, fit, "epochs_trained"), "completed": partial(setattr, fit, "epoch")}
    return _Progress(*(_EpochCounts(counts, written) for _ in range(2)))


def batches_of(fit: FitProgress) -> _BatchProgress:
    """Return ``fit_loop.epoch_loop.batch_progress``."""
    started, trained, start = fit.batches_started, fit.batches, fit.epoch_start
    completed = trained - (fit.position is TRAINED)
    total = _all_counts(started, trained, completed)
    current = _all_counts(started - start.batches_started, trained - start.batches, completed - start.batches)
    return _BatchProgress(
        _EpochCounts(total, {}), _EpochCounts(current, {"ready": fit.jump_to_batch}), fit.is_last_batch
    )


def schedules_of(fit: FitProgress) -> _SchedulerProgress:
    """Return ``fit_loop.epoch_loop.scheduler_progress``."""
    steps, in_epoch = fit.schedule_steps, fit.schedule_steps - fit.epoch_start.schedule_steps
    return _SchedulerProgress(_ready_completed(steps), _ready_completed(in_epoch))


def is_automatic(run: RunState) -> bool:
    """Return whether optimization is automatic."""
    return run.module is None or run.is_automatic


def optimization_of(run: RunState) -> _OptimizationProgress:
    """Return ``fit_loop.epoch_loop.automatic_optimization.optim_progress``.

    The last batch of a window counts as ready for its step while the batch is in progress.
    """
    if not is_automatic(run):
        return _OptimizationProgress()
    fit = run.progress
    ahead, cleared = fit.position is STARTED and run.window.is_last, fit.zero_grads
    total, current = (_ready_completed(fit.optimizer_steps - n, ahead) for n in (0, fit.epoch_start.optimizer_steps))
    step = _Progress(
        _StepCounts(total, {"completed": partial(setattr, fit, "optimizer_steps")}), _StepCounts(current, {})
    )
    zero_grad = _Progress(
        *(_StartedTracker(cleared - n, cleared - n, cleared - n) for n in (0, fit.epoch_start.zero_grads))
    )
    return _OptimizationProgress(_OptimizerProgress(step, zero_grad))


def manual_steps_of(run: RunState) -> _Progress:
    """Return ``fit_loop.epoch_loop.manual_optimization.optim_step_progress``; ``current`` also counts the whole run.

    A module that steps optimizers directly instead of their wrappers adds its steps to ``total.completed``.
    """
    fit, by_hand = run.progress, not is_automatic(run)
    total, current = (_ready_completed((fit.optimizer_steps - fit.own_steps) * by_hand) for _ in range(2))
    total.completed = fit.optimizer_steps * by_hand
    return _Progress(_StepCounts(total, {"completed": fit.count_own_steps}), _StepCounts(current, {}))


def evaluation_of(progress: EvalProgress, fit: FitProgress | None = None) -> _BatchProgress:
    """Return ``batch_progress`` of an evaluation loop, or of the validation in the current epoch of ``fit``."""
    counts = fit is None or fit.epoch_start.epoch == progress.epoch
    total = _all_counts(progress.total_batches * counts, progress.total_done * counts)
    return _BatchProgress(total, _all_counts(progress.batches, progress.batches_done), progress.is_last_batch)


def fit_loop_of(run: RunState) -> dict[str, Any]:
    """Return the state that Lightning's fit loop would have written at this point."""
    fit, val = run.progress, run.eval_loops[RunningStage.VALIDATING].progress
    return {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": fit.updates},
        "epoch_loop.batch_progress": batches_of(fit).state_dict(),
        "epoch_loop.scheduler_progress": schedules_of(fit).state_dict(),
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": optimization_of(run).state_dict(),
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": manual_steps_of(run).state_dict(),
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": evaluation_of(val, fit).state_dict(),
        "epoch_progress": epochs_of(fit).state_dict(),
    }


def loops_of(run: RunState) -> dict[str, Any]:
    """Return the ``loops`` entry of a checkpoint of ``trainer``, without our own entries."""
    done = {stage: loop.progress for stage, loop in run.eval_loops.items()}
    loops: dict[str, Any] = {"fit_loop": fit_loop_of(run)}
    # our only validation loop is that of the fit; a save after the fit also contains the tests and predictions since
    after = {"validate": EvalProgress(), "test": done[RunningStage.TESTING], "predict": done[RunningStage.PREDICTING]}
    for name, progress in after.items():
        batches = evaluation_of(progress).state_dict()
        if name == "predict":
            del batches["is_last_batch"]
        loops[f"{name}_loop"] = {"state_dict": {}, "batch_progress": batches}
    return loops


def progress_from(fit: dict[str, Any], progress: FitProgress, *, finish_epoch: bool = False) -> None:
    """Set ``progress`` from the state of Lightning's fit loop, at the end of an epoch or inside an epoch or a batch.

    Args:
        fit: the state of Lightning's fit loop.
        progress: the counters to set.
        finish_epoch: whether to continue an epoch that was cut short (by ``max_steps``) instead of starting the next
            one. Default: False.
    """
    epochs, batches = fit["epoch_progress"]["current"], fit["epoch_loop.batch_progress"]
    total, current = batches["total"], batches["current"]
    automatic = fit["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    zero_grad = fit["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["zero_grad"]
    manual = fit["epoch_loop.manual_optimization.optim_step_progress"]
    schedules = fit.get("epoch_loop.scheduler_progress", _SchedulerProgress().state_dict())
    # the migration of checkpoints from before Lightning 1.6 sets only the numbers of completed epochs and steps
    epochs_trained = max(epochs["processed"], epochs["completed"])
    inside_epoch = epochs["started"] > epochs["processed"]
    cut_short = epochs["processed"] > epochs["completed"] and not batches.get("is_last_batch", True)
    if cut_short and finish_epoch:
        epochs_trained, inside_epoch = epochs_trained - 1, True
    progress.epochs_trained = progress.epoch = epochs_trained
    progress.batches_started, progress.batches = total["ready"], total["processed"]
    progress.batch_idx = current["ready"] - 1 if inside_epoch else -1
    is_trained, is_over = total["ready"] == total["processed"], total["ready"] == total["completed"]
    progress.position = DONE if is_over else TRAINED if is_trained else STARTED
    progress.closing = False
    # one of them is 0, except in checkpoints from before Lightning 1.6.5, which have both
    progress.optimizer_steps = max(automatic["total"]["completed"], manual["total"]["completed"])
    progress.own_steps = manual["total"]["completed"] - manual["total"]["ready"]
    progress.has_learned = progress.optimizer_steps > 0  # as far as the checkpoint shows
    # includes skipped steps, which Lightning counts, too
    progress.completed_steps = Counter({0: automatic["total"]["completed"]})
    windows = fit["epoch_loop.state_dict"].get("_batches_that_stepped", progress.optimizer_steps)
    if not total["processed"]:  # migrated from before Lightning 1.6
        windows = progress.optimizer_steps
    # inside an epoch, Lightning counts a window after all code that may write a checkpoint; in manual optimization,
    # each batch is a window
    closed = total["processed"] if manual["total"]["completed"] else progress.optimizer_steps
    progress.updates = windows + (inside_epoch and not cut_short and closed == windows + 1)
    progress.zero_grads = zero_grad["total"]["completed"]
    progress.schedule_steps = schedules["total"]["completed"]
    progress.is_last_batch = batches.get("is_last_batch", False)
    progress.epoch_start = EpochStart(
        epoch=epochs_trained,
        batches_started=total["ready"] - current["ready"],
        batches=total["processed"] - current["processed"],
        optimizer_steps=progress.optimizer_steps - automatic["current"]["completed"],
        zero_grads=zero_grad["total"]["completed"] - zero_grad["current"]["completed"],
        schedule_steps=schedules["total"]["completed"] - schedules["current"]["completed"],
    )


def data_position_in(checkpoint: dict[str, Any], progress: FitProgress, counts_steps: bool) -> dict[str, Any]:
    """Return the position of the training data in a Lightning checkpoint, from the states of its loaders.

    Args:
        checkpoint: a checkpoint of Lightning's or ours.
        progress: the counters of training, already set.
        counts_steps: whether the run ends after a number of steps; Lightning then resumes loaders between epochs, too.

    Returns:
        The state for ``TrainingBatches.load_state_dict``; {} if there is nothing to resume.
    """
    states = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).get("combined_loader")
    batches = progress.batches_this_epoch
    if not states or not (batches or counts_steps):
        return {}
    return {"epoch": progress.epochs_trained, "batches": batches, "is_over": False, "combined_loader": list(states)}


def evaluation_from(fit: dict[str, Any], run: RunState) -> None:
    """Set the counters of the validation inside a fit from the state of Lightning's fit loop.

    The counters of training must be set already.
    """
    val = run.eval_loops[RunningStage.VALIDATING].progress
    older = fit.get("epoch_loop.val_loop.epoch_loop.batch_progress")  # of checkpoints from before Lightning 2.0
    batches = older or fit["epoch_loop.val_loop.batch_progress"]
    val.epoch = run.progress.epoch_start.epoch
    val.total_batches, val.total_done = batches["total"]["ready"], batches["total"]["completed"]
    val.batches, val.batches_done = batches["current"]["ready"], batches["current"]["completed"]
    val.is_last_batch = batches["is_last_batch"]


def resume_validation(run: RunState) -> None:
    """Repeat the validation in which a checkpoint was written, from its beginning, because its logged values are lost.

    The counters are already restored.
    """
    val, progress = run.eval_loops[RunningStage.VALIDATING].progress, run.progress
    if progress.position is VALIDATING or val.batches > val.batches_done:
        progress.position = VALIDATING
        val.forget_batches()


def batches_from(state: dict[str, Any], progress: EvalProgress) -> None:
    """Set ``progress`` from the state of Lightning's evaluation loop."""
    progress.forget_run()
    total, current = state["total"], state["current"]
    progress.total_batches, progress.total_done = total["ready"], total["completed"]
    progress.batches, progress.batches_done = current["ready"], current["completed"]


def _ready_completed(completed: int, ahead: int = 0) -> _ReadyCompletedTracker:
    return _ReadyCompletedTracker(ready=completed + ahead, completed=completed)


def _all_counts(started: int, processed: int, completed: int | None = None) -> _ProcessedTracker:
    return _ProcessedTracker(
        ready=started,
        started=started,
        processed=processed,
        completed=processed if completed is None else completed,
    )


class _LinkedCounts:
    """Counts that call a function when one of them is assigned."""

    def __init__(self, counts: _BaseProgress, written: Mapping[str, Callable[[int], None]]) -> None:
        vars(self).update(asdict(counts), _written=written)

    def __setattr__(self, count: str, number: int) -> None:
        super().__setattr__(count, number)
        if (write := vars(self)["_written"].get(count)) is not None:
            write(number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BaseProgress) and asdict(self) == asdict(other)  # type: ignore[call-overload]


class _EpochCounts(_LinkedCounts, _ProcessedTracker):
    """The four counts of an epoch or a batch."""


class _StepCounts(_LinkedCounts, _ReadyCompletedTracker):
    """The two counts of a step."""
