"""``trainer.fit_loop`` and its relatives have the values of Lightning's loops at every hook of a run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import RunningStage

from tests.parity import Classifier, Learner, assert_agree, data, looks_in, ours, plain, run_both
from trainer.errors import ConfigurationError


def moments(counts: Any) -> tuple[int, int, int]:
    """Return the four counters of Lightning, without "started", which is "ready" in our loop."""
    return counts.ready, counts.processed, counts.completed


@looks_in(
    "on_train_start", "on_train_batch_start", "on_before_zero_grad", "on_train_batch_end", "on_validation_end",
    "on_train_epoch_end", "on_train_end",
)  # fmt: skip
class Looks(Callback):
    """Records the values of the views at several hooks."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def look(self, where: str, trainer: Any) -> None:
        if trainer.sanity_checking:
            return
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self.seen.append({
            "where": where,
            "batches that stepped": epoch._batches_that_stepped,
            "global step": epoch.global_step,
            "batch_idx": (fit.batch_idx, epoch.batch_idx),
            "total_batch_idx": fit.total_batch_idx,
            "current": moments(epoch.batch_progress.current),
            "total": moments(epoch.batch_progress.total),
            "last": (epoch.batch_progress.is_last_batch, trainer.is_last_batch),
            "epochs": (fit.epoch_progress.current.processed, fit.epoch_progress.current.completed),
            "val current": moments(epoch.val_loop.batch_progress.current),
            "val total": moments(epoch.val_loop.batch_progress.total),
            "schedules": (epoch.scheduler_progress.total.completed, epoch.scheduler_progress.current.completed),
            "has run": epoch.val_loop._has_run,
            "limits": (fit.max_batches, fit.max_epochs, fit.max_steps, epoch.min_steps or 0),
            "val": list(trainer.num_val_batches),
            "done": fit.done,  # reading it writes a counter
        })  # fmt: skip


ARGUMENTS: list[dict[str, Any]] = [
    {"max_epochs": 2, "accumulate_grad_batches": 3},
    {"max_epochs": 1, "val_check_interval": 2},
    {"max_steps": 5},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_views_agree_with_lightnings_loops(arguments: dict[str, Any]) -> None:
    def scenario(make: Any) -> list[Any]:
        looks = Looks()
        make(callbacks=[looks], **arguments).fit(Classifier(), data(8), data(4))
        return looks.seen

    theirs, mine = run_both(scenario)
    assert len(theirs) == len(mine)
    for a, b in zip(theirs, mine, strict=True):
        different = {key: (a[key], b[key]) for key in a if a[key] != b[key]}
        assert not different, (a["where"], different)


def test_values_set_by_callbacks_reach_the_loop() -> None:
    trainer = ours(max_epochs=5)
    trainer.fit_loop.max_epochs = 2
    trainer.fit_loop.epoch_loop.max_steps = 3
    assert (trainer.max_epochs, trainer.max_steps) == (2, 3)
    trainer.accumulate_grad_batches = 4
    assert trainer.loop.window.batches == 4
    assert (trainer.max_epochs, trainer.max_steps) == (2, 3)


@pytest.mark.filterwarnings("ignore")
def test_fit_resumed_inside_an_epoch_is_restarting(tmp_path: Path) -> None:
    class Tells(Classifier):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append((self.current_epoch, batch_idx, self.trainer.fit_loop.restarting))
            if batch_idx == 1:
                self.trainer.save_checkpoint(tmp_path / "middle.ckpt")

        def on_train_end(self) -> None:
            self.trainer.save_checkpoint(tmp_path / "between.ckpt")

    def scenario(make: Any) -> list[Any]:
        seen.clear()
        make(max_epochs=1).fit(Tells(), data(8))
        make(max_epochs=2).fit(Tells(), data(8), ckpt_path=tmp_path / "middle.ckpt")
        make(max_epochs=3).fit(Tells(), data(8), ckpt_path=tmp_path / "between.ckpt")
        return [*seen]

    seen: list[Any] = []
    found = assert_agree(scenario)
    assert [restarting for *_, restarting in found] == [False] * 4 + [True] * 2 + [False] * 8


@pytest.mark.parametrize(
    ("limits", "epochs", "batches", "steps"),
    [({"max_epochs": 2}, 2, 4, 20), ({"max_steps": 12}, 1, 3, 5), ({"min_epochs": 2, "min_steps": 20}, 4, 4, 12)],
    ids=str,
)
def test_trainer_state_can_be_set(
    limits: dict[str, Any], epochs: int, batches: int, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    def scenario(make: Any) -> list[Any]:
        trainer = make(**{"max_epochs": 9, **limits})
        loop = trainer.fit_loop
        loop.max_batches = 4
        loop.epoch_progress.current.processed = epochs
        loop.epoch_progress.current.completed = epochs
        loop.epoch_loop.batch_progress.current.ready = batches
        loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = steps
        found = []
        for trainer.should_stop in (False, True):
            caplog.clear()
            with caplog.at_level(logging.DEBUG, logger="lightning.pytorch.utilities.rank_zero"):
                found.append((loop.done, [message for message in caplog.messages if "Trainer.fit" in message]))
            found.append((loop.epoch_loop.done, loop._can_stop_early))
        counts = (trainer.global_step, trainer.current_epoch, loop.epoch_loop.batch_idx, trainer.num_training_batches)
        return [*found, *counts]

    assert_agree(scenario)


def test_fit_reports_the_reason_for_its_end(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        ours(max_steps=2).fit(Classifier(), data(8), data(4))
    assert "`Trainer.fit` stopped: `max_steps=2` reached." in caplog.messages


def test_passes_and_steps_of_an_evaluation_can_be_counted_and_replaced() -> None:
    def scenario(make: Any) -> list[int]:
        counts = []
        trainer = make(max_epochs=2, num_sanity_val_steps=1)
        loop = trainer.fit_loop.epoch_loop.val_loop
        with patch.object(loop, "_evaluation_step", wraps=loop._evaluation_step) as step:
            trainer.fit(Classifier(), data(8), data(4))
        counts.append(step.call_count)
        trainer.validate(Classifier(), data(4))
        counts.append(step.call_count)
        loop.run = Mock()
        trainer.fit_loop.max_epochs = 4
        trainer.fit(Classifier(), data(8), data(4))
        counts.append(loop.run.call_count)
        return counts

    found = assert_agree(scenario)
    assert found[0] == found[1] == 5
    assert found[2] >= 2


def test_batch_can_be_trained_through_the_view() -> None:
    class SkipsOne(Learner):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 9 else super().training_step(batch, batch_idx)

    def scenario(make: Any) -> list[Any]:
        module, trainer = SkipsOne(), make(max_epochs=1, accumulate_grad_batches=2)
        trainer.fit(module, data(8))
        trainer.state.stage = RunningStage.TRAINING
        by_hand = trainer.fit_loop.epoch_loop.automatic_optimization
        batch = next(iter(data(2)))
        outputs = [by_hand.run(trainer.optimizers[0], i, {"batch": batch, "batch_idx": i}) for i in (0, 9, 1)]
        loss = by_hand._make_closure({"batch": batch, "batch_idx": 0}, trainer.optimizers[0], 0)()
        weights = [parameter.detach().clone() for parameter in module.parameters()]
        return [plain(outputs), loss.item(), torch.cat([weight.flatten() for weight in weights]).tolist()]

    found = assert_agree(scenario)
    assert list(found[0][0]) == ["loss"]
    assert found[0][1] == {}


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_optimizer_stepped_by_the_user_in_automatic_optimization(precision: str) -> None:
    class StepsItself(Learner):
        def on_train_epoch_end(self) -> None:
            self.loss(batch).backward()
            before = self.net[0].weight.detach().clone()
            self.optimizers().step()
            moved.append(not self.net[0].weight.equal(before))

    batch, moved = next(iter(data(2))), []
    trainer = ours(max_epochs=1, precision=precision)
    if precision == "32-true":
        trainer.fit(StepsItself(), data(4))
        assert moved == [True]
    else:
        with pytest.raises(ConfigurationError, match="outside of manual optimization, while the loss is scaled"):
            trainer.fit(StepsItself(), data(4))
