"""Who overrides what, and the order of callbacks."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
)

from tests.parity import Learner, data, lightning, lightnings_noise_ignored, ours
from trainer.compat.callbacks import in_order, monitors, overrides, with_model_callbacks


class Own(Callback):
    def on_train_start(self, *args: Any) -> None: ...


class Inherits(Own):
    pass


def test_overrides_looks_at_classes_and_instances() -> None:
    assert overrides(Own(), "on_train_start")
    assert overrides(Inherits(), "on_train_start")
    assert not overrides(Own(), "on_train_end")
    assert not overrides(Callback(), "on_train_start")
    callback = Callback()
    callback.on_train_end = lambda *args: None  # type: ignore[method-assign]
    assert overrides(callback, "on_train_end")
    assert overrides(LambdaCallback(on_fit_start=lambda *args: None), "on_fit_start")


def test_overrides_knows_modules_and_datamodules() -> None:
    assert overrides(Learner(), "training_step")
    assert not overrides(Learner(), "validation_step")
    assert not overrides(Learner(), "on_train_start")
    assert not overrides(LightningDataModule(), "setup")


def test_our_own_hook_is_overridden_by_whoever_has_it() -> None:
    class Has(Callback):
        def on_after_optimizer_step(self, *args: Any) -> None: ...

    assert overrides(Has(), "on_after_optimizer_step")
    assert not overrides(Own(), "on_after_optimizer_step")
    assert not overrides(Learner(), "on_after_optimizer_step")


def test_tuners_come_first_and_checkpoints_last() -> None:
    given = [ModelCheckpoint(), Own(), LearningRateFinder(), EarlyStopping("x"), BatchSizeFinder(), Inherits()]
    order = [type(callback).__name__ for callback in in_order(given)]
    assert order == [
        "LearningRateFinder", "BatchSizeFinder", "Own", "EarlyStopping", "Inherits", "ModelCheckpoint",
    ]  # fmt: skip
    with lightnings_noise_ignored():
        theirs = lightning(callbacks=list(given), enable_checkpointing=True).callbacks
    assert [type(callback).__name__ for callback in theirs] == order


def test_those_that_read_metrics_at_the_epochs_end_wait_for_the_module() -> None:
    assert monitors(EarlyStopping("x"))
    assert monitors(ModelCheckpoint())
    assert not monitors(Own())


def test_the_modules_callbacks_replace_those_of_their_type() -> None:
    class Module(Learner):
        def configure_callbacks(self) -> Any:
            return EarlyStopping("mine")

    module = Module()
    trainers = EarlyStopping("trainer's"), Own()
    merged = with_model_callbacks(list(trainers), module)
    assert [getattr(callback, "monitor", None) for callback in merged] == [None, "mine"]
    assert with_model_callbacks(list(trainers), Learner()) == list(trainers)


def test_the_modules_callbacks_run() -> None:
    seen: list[str] = []

    class Sees(Callback):
        def on_train_start(self, trainer: Any, *args: Any) -> None:
            seen.append(type(self).__name__)

    class Module(Learner):
        def configure_callbacks(self) -> Any:
            return [Sees()]

    trainer = ours(max_epochs=1)
    trainer.fit(Module(), data(2))
    assert seen == ["Sees"]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Module(), data(2))
    assert seen == ["Sees", "Sees"]  # not twice in the second run
