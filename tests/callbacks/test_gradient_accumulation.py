"""GradientAccumulation as a callback. Its arithmetic is tested in tests/loop/test_fit.py."""

import pytest
import torch

from tests.parity import assert_same_weights
from tests.support import Regression, fit_and_watch, loader_of, make_batches, make_net, make_trainer, train_by_hand
from trainer.callbacks import GradientAccumulation


def test_gradients_of_a_schedule(tmp_path):
    """Epochs with windows of 2 and of 3: one optimizer, each window a mean."""
    ours, theirs, batches = make_net(), make_net(), make_batches(6)
    callback = GradientAccumulation(schedule={0: 2, 1: 3})
    trainer, trace = fit_and_watch(tmp_path, Regression(ours), batches, callbacks=[callback], max_epochs=2)
    first, second = (train_by_hand(theirs, batches, window=window) for window in (2, 3))
    assert trace.losses == first.losses + second.losses
    assert_same_weights(ours, theirs)
    assert trainer.global_step == 5


@pytest.mark.parametrize(
    ("arguments", "end", "trained", "steps"),
    [({"max_epochs": 3}, 3, [0, 1, 2] * 3, 3), ({"max_epochs": -1, "max_steps": 2}, None, [0, 1, 2, 3, 4, 0, 1, 2], 2)],
)
def test_windows_that_straddle_epochs(tmp_path, arguments, end, trained, steps):
    ours, batches = make_net(), make_batches(5)
    callbacks = [GradientAccumulation(4, straddles_epochs=True)]
    module = Regression(ours)
    module.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == end else None
    trainer, trace = fit_and_watch(tmp_path, module, batches, callbacks=callbacks, **arguments)
    assert (len(trace.losses), trainer.global_step) == (len(trained), steps)
    train_by_hand(expected := make_net(), [batches[i] for i in trained], window=4)
    for a, b in zip(ours.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)  # the window left early is corrected afterwards


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ({"accumulate_grad_batches": 8}, True),  # 21808
        ({"callbacks": [GradientAccumulation(8)]}, True),
        ({"accumulate_grad_batches": 2}, False),
        ({"callbacks": [GradientAccumulation(8, straddles_epochs=True)]}, False),
        ({"accumulate_grad_batches": 8, "fast_dev_run": True}, False),
    ],
)
def test_windows_longer_than_an_epoch_are_reported(tmp_path, caplog, arguments, reported):
    trainer = make_trainer(tmp_path, **arguments)
    with caplog.at_level("INFO"):
        trainer.fit(Regression(), loader_of(make_batches(2)))
    expected = "accumulate_grad_batches is 8, but an epoch ends after 2 batches: no optimizer step uses more."
    assert (expected in caplog.text) is reported


def test_first_window_is_known_from_the_start(tmp_path):
    """The summary, and schedules that read the number of steps, use it before the first epoch starts."""
    assert make_trainer(tmp_path, callbacks=[GradientAccumulation(schedule={0: 4, 2: 1})]).accumulate_grad_batches == 4


@pytest.mark.parametrize(("callback", "steps"), [
    (GradientAccumulation(4), 9), (GradientAccumulation(schedule={1: 4}), 16),
    (GradientAccumulation(25, straddles_epochs=True), 2), (GradientAccumulation(40, straddles_epochs=True), 1),
    (GradientAccumulation(schedule={0: 3, 1: 4}, straddles_epochs=True), 9),
])  # fmt: skip
def test_estimated_stepping_batches_equals_the_attempted_steps(tmp_path, callback, steps):
    estimated = []

    class Asking(Regression):
        def configure_optimizers(self):
            estimated.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    trainer, _ = fit_and_watch(tmp_path, Asking(), make_batches(10), callbacks=[callback], max_epochs=3)
    assert estimated == [trainer.global_step] == [steps]
