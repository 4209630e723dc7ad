"""Detection of overridden hooks, and the order of callbacks."""

import functools
import os

import pytest
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, LearningRateFinder, ModelCheckpoint

from tests.parity import Classifier, Learner, assert_agree, data, lightning, ours
from trainer.errors import ConfigurationError
from trainer.lightning.callback_order import sort_callbacks
from trainer.loop.overrides import overrides


class Own(Callback):
    def on_train_start(self, *args): ...


def test_overrides_are_found_in_classes_and_on_instances():
    class Inherits(Own):
        def on_after_optimizer_step(self, *args): ...

    for name in ("on_train_start", "on_after_optimizer_step"):
        assert overrides(Inherits(), name)
        assert not overrides(Callback(), name)
    assert not overrides(Own(), "on_after_optimizer_step")
    assert overrides(LambdaCallback(on_fit_start=lambda *args: None), "on_fit_start")
    assert overrides(Learner(), "training_step")
    assert not overrides(Learner(), "validation_step")
    assert not overrides(LightningDataModule(), "setup")


def test_tuners_come_first_and_checkpoints_last():
    given = [ModelCheckpoint(), Own(), LearningRateFinder(), EarlyStopping("x")]
    order = [type(callback).__name__ for callback in sort_callbacks(given)]
    assert order == ["LearningRateFinder", "Own", "EarlyStopping", "ModelCheckpoint"]


def test_spy_of_a_hook_does_not_count_as_an_override():
    module = Learner()
    for name in ("backward", "on_validation_model_train"):
        original = getattr(module, name)
        vars(module)[name] = functools.wraps(original)(lambda *args, original=original: original(*args))
    assert overrides(module, "backward")
    assert not overrides(module, "on_validation_model_train")
    vars(module)["on_validation_model_train"] = lambda: None
    assert overrides(module, "on_validation_model_train")


STOPS, STOPS_TOO, CHECKPOINT = type("Stops", (EarlyStopping,), {})("x"), EarlyStopping("x"), ModelCheckpoint()
CONFIGURED = {
    "one": ([Own()], STOPS),
    "of a subclass": ([EarlyStopping("y"), Own()], [STOPS]),
    "of a base": ([STOPS], [STOPS_TOO]),
    "several": ([EarlyStopping("y"), EarlyStopping("z"), CHECKPOINT], (STOPS_TOO, Own())),
}


@pytest.mark.parametrize(("given", "own"), CONFIGURED.values(), ids=CONFIGURED.keys())
def test_modules_callbacks_replace_the_same_ones_as_with_lightning(given, own):
    def scenario(make):
        module = Learner()
        module.configure_callbacks = lambda: own
        trainer = make(callbacks=list(given), max_epochs=0, enable_checkpointing=CHECKPOINT in given)
        house = [callback for callback in trainer.callbacks if callback not in given]
        trainer.fit(module, data(2))
        trainer.fit(module, data(2))  # a second run changes nothing
        return [type(callback).__name__ for callback in trainer.callbacks if callback not in house]

    assert_agree(scenario)


def test_callbacks_whose_states_would_collide_are_refused():
    for make in (lightning, ours):
        with pytest.raises(RuntimeError, match="Found more than one stateful callback of type `EarlyStopping`"):
            make(callbacks=[EarlyStopping("x"), EarlyStopping("x")])
    ours(callbacks=[EarlyStopping("x"), EarlyStopping("y"), Own(), Own()])


def test_callbacks_of_a_package_installed_in_between_are_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    assert not [callback for callback in ours().callbacks if type(callback) is Callback]
    info = tmp_path / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lightning.pytorch.callbacks_factory]\none = plugin:make\n")
    (tmp_path / "plugin.py").write_text("import lightning.pytorch as pl\n\ndef make():\n    return [pl.Callback()]\n")
    os.utime(tmp_path, (1, 1))  # the clock of the file system may be coarse
    assert [callback for callback in ours().callbacks if type(callback) is Callback]


def test_callback_of_the_other_package_is_refused_by_the_place_where_it_was_added(tmp_path):
    other = type(
        "Other", (), {"__module__": "pytorch_lightning.callbacks", "state_key": "other", "on_exception": print}
    )()
    trainer = ours(max_epochs=1)
    trainer.callbacks.append(other)
    with pytest.raises(
        ConfigurationError, match=r"Got trainer\.callbacks=Other\(\.\.\.\), which is built on pytorch_li"
    ):
        trainer.fit(Classifier(), data(2))
