"""The ``loops`` part of a checkpoint: our counters in Lightning's shape, so that either side resumes the other's."""

from __future__ import annotations

from typing import Any

from trainer.progress import EvalProgress, FitProgress


def loops_of(fit: FitProgress, val: EvalProgress, automatic: bool) -> dict[str, Any]:
    """What Lightning's loops would have written at this point.

    Args:
        fit: the training's counters.
        val: those of the validation inside it.
        automatic: whether optimization is automatic; Lightning counts optimizer steps in either of two places.
    """
    started, in_hook = fit.batches_trained_this_epoch, fit.in_batch and fit.is_trained
    inside_epoch = fit.epochs_trained == fit.epoch and started > 0
    epochs_started = fit.epochs_trained + inside_epoch
    stepped, none = _pair(fit.optimizer_steps), _pair(0)
    return {
        "fit_loop": {
            "state_dict": {},
            "epoch_loop.state_dict": {"_batches_that_stepped": fit.windows},
            "epoch_loop.batch_progress": {
                "total": _quad(fit.batches, fit.batches - in_hook),
                "current": _quad(started, started - in_hook),
                "is_last_batch": fit.is_last_batch,
            },
            "epoch_loop.scheduler_progress": none,
            "epoch_loop.automatic_optimization.state_dict": {},
            "epoch_loop.automatic_optimization.optim_progress": {
                "optimizer": {
                    "step": stepped if automatic else none,
                    "zero_grad": {part: {**counts, "started": counts["ready"]} for part, counts in none.items()},
                }
            },
            "epoch_loop.manual_optimization.state_dict": {},
            "epoch_loop.manual_optimization.optim_step_progress": none if automatic else stepped,
            "epoch_loop.val_loop.state_dict": {},
            "epoch_loop.val_loop.batch_progress": {
                "total": _quad(val.total_batches, val.total_batches),
                "current": _quad(val.batches, val.batches),
                "is_last_batch": val.is_last_batch,
            },
            "epoch_progress": {
                "total": {"ready": epochs_started, "started": epochs_started,
                          "processed": fit.epochs_trained, "completed": fit.epoch},
                "current": {"ready": epochs_started, "started": epochs_started,
                            "processed": fit.epochs_trained, "completed": fit.epoch},
            },
        },
        **{f"{name}_loop": _idle_loop(name) for name in ("validate", "test", "predict")},
    }  # fmt: skip


def progress_from(loops: dict[str, Any], progress: FitProgress) -> None:
    """Set ``progress`` to what a checkpoint of Lightning's says: at an epoch's end, or inside an epoch."""
    fit = loops["fit_loop"]
    batches = fit["epoch_loop.batch_progress"]
    automatic = fit["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]
    manual = fit["epoch_loop.manual_optimization.optim_step_progress"]["total"]
    epochs_trained = fit["epoch_progress"]["current"]["processed"]
    inside_epoch = fit["epoch_progress"]["current"]["started"] > epochs_trained
    progress.epochs_trained = progress.epoch = epochs_trained
    progress.batches = progress.batches_started = batches["total"]["processed"]
    progress.batch_idx = batches["current"]["processed"] - 1 if inside_epoch else -1
    progress.optimizer_steps = automatic["completed"] + manual["completed"]
    progress.windows = fit["epoch_loop.state_dict"].get("_batches_that_stepped", progress.optimizer_steps)


def _pair(count: int) -> dict[str, dict[str, int]]:
    return {part: {"ready": count, "completed": count} for part in ("total", "current")}


def _quad(ready: int, completed: int) -> dict[str, int]:
    return {"ready": ready, "started": ready, "processed": ready, "completed": completed}


def _idle_loop(name: str) -> dict[str, Any]:
    progress: dict[str, Any] = {"total": _quad(0, 0), "current": _quad(0, 0)}
    if name != "predict":
        progress["is_last_batch"] = False
    return {"state_dict": {}, "batch_progress": progress}
