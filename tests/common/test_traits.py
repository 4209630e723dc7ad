"""The attributes of a callback from outside the package, and their values for Lightning's own callbacks."""

from unittest.mock import Mock

import pytest
from lightning.pytorch import Callback
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ModelPruning, Timer

from tests.callbacks.test_copies import ARGUMENTS, OURS
from tests.parity import ours
from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.callbacks import FastSettings, GradientClipping, NonFiniteGuard, OverflowReport
from trainer.common import traits
from trainer.errors import UnsupportedError


class Foreign(Callback):
    """A callback of another package."""

    observes_only = True
    reads_epoch_metrics = True
    runs_last = True
    unsupported_with = {"fsdp": "needs whole weights. Use strategy='ddp'."}
    calls = []

    def on_train_batch_end(self, *_):
        self.calls.append("callback's batch")

    def on_train_epoch_end(self, trainer, pl_module):
        self.calls.append(f"callback reads {trainer.callback_metrics['epochs']:.0f}")


def test_attributes_of_a_foreign_callback_set_its_order(tmp_path):
    Foreign.calls.clear()
    module = Regression()
    module.on_train_batch_end = lambda *_: Foreign.calls.append("module's batch")
    module.on_train_epoch_end = lambda: module.log("epochs", 3.0)
    make_trainer(tmp_path, callbacks=[Foreign()]).fit(module, loader_of(make_batches(1)))
    assert Foreign.calls == ["module's batch", "callback's batch", "callback reads 3"]


def test_foreign_callback_is_refused_with_the_strategies_that_it_names():
    with pytest.raises(UnsupportedError, match="Got Foreign with strategy='fsdp'"):
        ours(strategy="fsdp", devices=2, callbacks=[Foreign()])
    ours(strategy="ddp", devices=2, callbacks=[Foreign()])


def test_trial_run_leaves_out_callbacks_that_only_observe():
    callbacks = [Foreign(), Callback(), Timer("00:01:00:00")]
    assert list(map(traits.observes_only, callbacks)) == [True, False, True]


def test_save_of_weights_only_is_seen_by_callbacks_that_ask_for_it(tmp_path):
    callbacks = [Callback(), Callback()]
    callbacks[1].sees_each_save = True
    for callback in callbacks:
        callback.on_save_checkpoint = Mock()
    trainer = make_trainer(tmp_path, callbacks=callbacks)
    trainer.fit(Regression(), loader_of(make_batches(1)))
    for weights_only in (False, True):
        trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=weights_only)
    assert [callback.on_save_checkpoint.call_count for callback in callbacks] == [1, 2]


@pytest.mark.parametrize(
    "name",
    ["AlignmentAdvisor", "AnomalyDetection", "GradientClipping", "LayerNorms", "NonFiniteGuard", "OverflowReport",
     "ScaleMonitor"],
)  # fmt: skip
def test_callback_that_needs_this_trainer_refuses_lightnings(tmp_path, name):
    trainer = make_trainer(tmp_path, LightningTrainer, callbacks=[OURS[name](**ARGUMENTS.get(name, {}))])
    with pytest.raises(UnsupportedError, match=rf"Got {name} in a lightning.*Trainer, expected a trainer\."):
        trainer.fit(Regression(), loader_of(make_batches(1)))


def test_known_callbacks():
    assert traits.runs_last(ModelCheckpoint())
    assert not traits.runs_last(EarlyStopping("loss"))
    assert all(map(traits.reads_epoch_metrics, (EarlyStopping("loss"), OURS["ProgressBar"](), OURS["RunRecorder"]())))
    assert all(map(traits.sees_each_save, (FastSettings(), NonFiniteGuard(), OverflowReport())))
    assert traits.unsupported_with(ModelPruning("l1_unstructured")).keys() == {"fsdp", "deepspeed"}
    assert traits.unsupported_with(GradientClipping(1.0)) == traits.unsupported_with(NonFiniteGuard("skip")) == {}
    for callback in (GradientClipping(clip_value=1.0), NonFiniteGuard("stop")):
        assert traits.unsupported_with(callback).keys() == {"deepspeed"}
