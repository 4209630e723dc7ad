"""``trainer.fit_loop`` and its relatives have the values of Lightning's loops at every hook of a run."""

import logging
from contextlib import nullcontext
from unittest.mock import Mock, patch

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import RunningStage

from tests.parity import Classifier, Learner, assert_agree, data, looks_in, ours, plain, run_both, weights
from trainer.errors import ConfigurationError


def moments(counts):
    """Return the four counters of Lightning, without "started", which is "ready" in our loop."""
    return counts.ready, counts.processed, counts.completed


@looks_in(
    "on_train_start", "on_train_batch_start", "on_before_zero_grad", "on_train_batch_end", "on_validation_end",
    "on_train_epoch_end", "on_train_end",
)  # fmt: skip
class Looks(Callback):
    """Records the values of the views at several hooks."""

    def __init__(self):
        self.seen = []

    def look(self, where, trainer):
        if trainer.sanity_checking:
            return
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        schedules, epochs = epoch.scheduler_progress, fit.epoch_progress.current
        self.seen.append({
            "where": where,
            "steps": (epoch._batches_that_stepped, epoch.global_step),
            "batch_idx": (fit.batch_idx, epoch.batch_idx, fit.total_batch_idx),
            "batches": (moments(epoch.batch_progress.current), moments(epoch.batch_progress.total)),
            "last": (epoch.batch_progress.is_last_batch, trainer.is_last_batch),
            "epochs": (epochs.processed, epochs.completed),
            "val": [moments(getattr(epoch.val_loop.batch_progress, name)) for name in ("current", "total")],
            "schedules": (schedules.total.completed, schedules.current.completed),
            "limits": (fit.max_batches, fit.max_epochs, fit.max_steps, epoch.min_steps or 0),
            "val batches": (epoch.val_loop._has_run, list(trainer.num_val_batches)),
            "done": fit.done,  # reading it writes a counter
        })  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [{"max_epochs": 2, "accumulate_grad_batches": 3}, {"max_epochs": 1, "val_check_interval": 2}, {"max_steps": 5}],
    ids=str,
)
def test_views_agree_with_lightnings_loops(arguments):
    def scenario(make):
        looks = Looks()
        make(callbacks=[looks], **arguments).fit(Classifier(), data(8), data(4))
        return looks.seen

    theirs, mine = run_both(scenario)
    assert len(theirs) == len(mine)
    for a, b in zip(theirs, mine, strict=True):
        different = {key: (a[key], b[key]) for key in a if a[key] != b[key]}
        assert not different, (a["where"], different)


def test_values_set_by_callbacks_reach_the_loop():
    trainer = ours(max_epochs=5)
    trainer.fit_loop.max_epochs = 2
    trainer.fit_loop.epoch_loop.max_steps = 3
    assert (trainer.max_epochs, trainer.max_steps) == (2, 3)
    trainer.accumulate_grad_batches = 4
    assert trainer.loop.window.batches == 4
    assert (trainer.max_epochs, trainer.max_steps) == (2, 3)


@pytest.mark.filterwarnings("ignore")
def test_fit_resumed_inside_an_epoch_is_restarting(tmp_path):
    class Tells(Classifier):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append((self.current_epoch, batch_idx, self.trainer.fit_loop.restarting))
            if batch_idx == 1:
                self.trainer.save_checkpoint(tmp_path / "middle.ckpt")

        def on_train_end(self):
            self.trainer.save_checkpoint(tmp_path / "between.ckpt")

    def scenario(make):
        seen.clear()
        for epochs, path in enumerate((None, tmp_path / "middle.ckpt", tmp_path / "between.ckpt"), start=1):
            make(max_epochs=epochs).fit(Tells(), data(8), ckpt_path=path)
        return [*seen]

    seen = []
    assert [restarting for *_, restarting in assert_agree(scenario)] == [False] * 4 + [True] * 2 + [False] * 8


@pytest.mark.parametrize(
    ("limits", "epochs", "batches", "steps"),
    [({"max_epochs": 2}, 2, 4, 20), ({"max_steps": 12}, 1, 3, 5), ({"min_epochs": 2, "min_steps": 20}, 4, 4, 12)],
    ids=str,
)
def test_trainer_state_can_be_set(limits, epochs, batches, steps, caplog):
    caplog.set_level(logging.DEBUG, logger="lightning.pytorch.utilities.rank_zero")

    def scenario(make):
        trainer = make(**{"max_epochs": 9, **limits})
        loop, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        loop.max_batches = 4
        loop.epoch_progress.current.processed = loop.epoch_progress.current.completed = epochs
        epoch.batch_progress.current.ready = batches
        epoch.automatic_optimization.optim_progress.optimizer.step.total.completed = steps
        found = []
        for trainer.should_stop in (False, True):
            caplog.clear()
            found.append((loop.done, [message for message in caplog.messages if "Trainer.fit" in message]))
            found.append((epoch.done, loop._can_stop_early))
        return found, trainer.global_step, trainer.current_epoch, epoch.batch_idx, trainer.num_training_batches

    assert_agree(scenario)


def test_fit_reports_the_reason_for_its_end(caplog):
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        ours(max_steps=2).fit(Classifier(), data(8), data(4))
    assert "`Trainer.fit` stopped: `max_steps=2` reached." in caplog.messages


def test_passes_and_steps_of_an_evaluation_can_be_counted_and_replaced():
    def scenario(make):
        trainer, module, loaders = make(max_epochs=2, num_sanity_val_steps=1), Classifier(), (data(8), data(4))
        loop = trainer.fit_loop.epoch_loop.val_loop
        with patch.object(loop, "_evaluation_step", wraps=loop._evaluation_step) as step:
            trainer.fit(module, *loaders)
        trainer.validate(module, data(4))
        loop.run = Mock()
        trainer.fit_loop.max_epochs = 4
        trainer.fit(module, *loaders)
        return [step.call_count, loop.run.call_count]

    steps, passes = assert_agree(scenario)
    assert steps == 5
    assert passes >= 2


def test_batch_can_be_trained_through_the_view():
    def scenario(make):
        module, trainer, batch = Learner(), make(max_epochs=1, accumulate_grad_batches=2), next(iter(data(2)))
        module.training_step = lambda batch, batch_idx: None if batch_idx == 9 else module.loss(batch)
        trainer.fit(module, data(8))
        trainer.state.stage = RunningStage.TRAINING
        by_hand = trainer.fit_loop.epoch_loop.automatic_optimization
        outputs = [by_hand.run(trainer.optimizers[0], i, {"batch": batch, "batch_idx": i}) for i in (0, 9, 1)]
        loss = by_hand._make_closure({"batch": batch, "batch_idx": 0}, trainer.optimizers[0], 0)()
        return [plain(outputs), loss.item(), [weight.tolist() for weight in weights(module)]]

    assert [list(output) for output in assert_agree(scenario)[0][:2]] == [["loss"], []]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_optimizer_stepped_by_the_user_in_automatic_optimization(precision):
    class StepsItself(Learner):
        def on_train_epoch_end(self):
            self.loss(next(iter(data(2)))).backward()
            before = weights(self)
            self.optimizers().step()
            assert not torch.equal(weights(self)[0], before[0])

    message = "outside of manual optimization, while the loss is scaled"
    with nullcontext() if precision == "32-true" else pytest.raises(ConfigurationError, match=message):
        ours(max_epochs=1, precision=precision).fit(StepsItself(), data(4))
