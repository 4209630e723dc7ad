"""The end of a fit, and validation by time."""

import logging
from unittest import mock

import pytest
from lightning.pytorch.callbacks import LambdaCallback

from tests.parity import Learner, assert_agree, data, ours
from trainer.state.progress import FitProgress
from trainer.state.stopping import StoppingConditions


def test_time_decides_when_to_validate():
    limits = StoppingConditions(FitProgress(), max_epochs=1, val_check_seconds=5.0)

    def is_due_after_a_batch():
        limits.progress.batches_started += 1
        return limits.validation_is_due()

    with mock.patch("time.monotonic", side_effect=[10.0, 14.9, 15.0, 16.0, 20.0, 21.0]):
        limits.restart_validation_clock()
        assert [is_due_after_a_batch(), is_due_after_a_batch()] == [False, True]
        limits.restart_validation_clock()
        assert [is_due_after_a_batch(), is_due_after_a_batch()] == [False, True]


def test_decision_after_a_batch_is_kept():
    """Callbacks that save read it before the loop does; ranks agree on it once."""
    limits = StoppingConditions(FitProgress(), max_epochs=1, val_check_seconds=5.0)
    asked = []
    limits.any_rank = lambda decision: asked.append(decision) or decision
    with mock.patch("time.monotonic", side_effect=[10.0, 14.9, 15.0]):
        limits.restart_validation_clock()
        limits.progress.batches_started += 1
        assert [limits.validation_is_due() for _ in range(3)] == [False] * 3
        limits.progress.batches_started += 1
        assert [limits.validation_is_due() for _ in range(3)] == [True] * 3
    assert asked == [False, True]


def test_model_checkpoint_receives_the_time():
    assert ours(val_check_interval="00:00:01:00")._val_check_time_interval == 60.0
    assert ours()._val_check_time_interval is None


def test_signals_are_handled_between_batches_and_epochs_only():
    limits, calls = StoppingConditions(FitProgress(), max_epochs=1), []
    limits.check_signals = calls.append
    assert not limits.epoch_is_done()
    assert not limits.fit_is_done()
    assert not limits.ends_epoch()
    assert not limits.ends_fit()
    assert calls == [False, True]


@pytest.mark.parametrize("arguments", [{"min_epochs": 2}, {"min_steps": 3}, {}], ids=str)
def test_continued_training_is_logged_once(arguments, caplog):
    stops = LambdaCallback(on_train_batch_end=lambda trainer, *_: setattr(trainer, "should_stop", True))

    def scenario(make):
        caplog.clear()
        trainer = make(max_epochs=3, callbacks=[stops], **arguments)
        with caplog.at_level(logging.INFO):
            trainer.fit(Learner(), data(8))
        return trainer.global_step, [r.message for r in caplog.records if "signaled to stop" in r.message]

    found = assert_agree(scenario)
    assert len(found[1]) == bool(arguments)
