"""Our counters in Lightning's shape and back."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.compat.loop_state import loops_of, progress_from
from trainer.progress import EvalProgress, FitProgress

BETWEEN_EPOCHS = FitProgress(epoch=2, epochs_trained=2, batches=12, optimizer_steps=6, windows=6, is_last_batch=True)
IN_AN_EPOCH = FitProgress(epoch=1, epochs_trained=1, batch_idx=2, batches=9, optimizer_steps=4, windows=4)
EPOCH_ENDING = FitProgress(
    epoch=1, epochs_trained=2, batch_idx=5, batches=12, optimizer_steps=6, windows=6, is_last_batch=True
)
FRESH = FitProgress()


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize(
    ("progress", "epoch", "batch_idx"),
    [(BETWEEN_EPOCHS, 2, -1), (IN_AN_EPOCH, 1, 2), (EPOCH_ENDING, 2, -1), (FRESH, 0, -1)],
    ids=["between epochs", "in an epoch", "while an epoch ends", "fresh"],
)
def test_there_and_back(progress: FitProgress, epoch: int, batch_idx: int, automatic: bool) -> None:
    back = FitProgress()
    progress_from(loops_of(progress, EvalProgress(), automatic), back)
    assert (back.epoch, back.epochs_trained, back.batch_idx) == (epoch, epoch, batch_idx)
    assert (back.batches, back.optimizer_steps, back.windows) == (
        progress.batches, progress.optimizer_steps, progress.windows,
    )  # fmt: skip


def test_optimizer_steps_stand_where_lightning_looks_for_them() -> None:
    automatic = loops_of(BETWEEN_EPOCHS, EvalProgress(), True)["fit_loop"]
    manual = loops_of(BETWEEN_EPOCHS, EvalProgress(), False)["fit_loop"]

    def steps(loops: dict[str, Any]) -> tuple[int, int]:
        optimizer = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
        by_hand = loops["epoch_loop.manual_optimization.optim_step_progress"]
        return optimizer["step"]["total"]["completed"], by_hand["total"]["completed"]

    assert steps(automatic) == (6, 0)
    assert steps(manual) == (0, 6)


def test_an_epoch_that_ends_is_processed_and_not_completed() -> None:
    epochs = loops_of(EPOCH_ENDING, EvalProgress(), True)["fit_loop"]["epoch_progress"]["current"]
    assert epochs == {"ready": 2, "started": 2, "processed": 2, "completed": 1}


def test_a_checkpoint_without_the_count_of_windows_falls_back_on_the_steps() -> None:
    loops = loops_of(BETWEEN_EPOCHS, EvalProgress(), True)
    loops["fit_loop"]["epoch_loop.state_dict"] = {}
    back = FitProgress()
    progress_from(loops, back)
    assert back.windows == 6
