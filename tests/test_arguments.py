from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.strategies import ModelParallelStrategy

from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer import Trainer
from trainer.arguments import BAREBONES, parse_limits
from trainer.callbacks import GradientAccumulation, GradientClipping, ScalerCheckpoint
from trainer.errors import ConfigurationError, PrecisionError, UnsupportedError

INF = float("inf")
DEFAULTS = {
    "fast_dev_run": False,
    "overfit_batches": 0.0,
    "max_epochs": None,
    "max_steps": -1,
    "limit_train_batches": None,
    "limit_val_batches": None,
    "limit_test_batches": None,
    "limit_predict_batches": None,
    "val_check_interval": None,
    "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": None,
}


def limits(**given):
    return parse_limits(**DEFAULTS | given)


def test_defaults():
    parsed = limits()
    assert (parsed.train, parsed.val, parsed.test, parsed.predict) == (1.0, 1.0, 1.0, 1.0)
    assert (parsed.max_epochs, parsed.max_steps, parsed.num_sanity_val_steps) == (None, -1, 2)
    assert (parsed.val_check_interval, parsed.check_val_every_n_epoch) == (1.0, 1)


@pytest.mark.parametrize("stage", ["train", "val", "test", "predict"])
@pytest.mark.parametrize(("given", "kind"), [(0, int), (1, int), (7, int), (0.5, float), (1.0, float), (3.0, int)])
def test_batches_and_shares(stage, given, kind):
    parsed = getattr(limits(**{f"limit_{stage}_batches": given}), stage)
    assert parsed == given
    assert type(parsed) is kind  # 1 is a batch, 1.0 is all of them


@pytest.mark.parametrize("given", [True, -1, -0.5, 1.5, float("nan"), "3"])
@pytest.mark.parametrize("name", ["limit_train_batches", "limit_predict_batches", "overfit_batches"])
def test_impossible_amounts(name, given):
    with pytest.raises(ConfigurationError, match=name):
        limits(**{name: given})


@pytest.mark.parametrize(("given", "batches"), [(True, 1), (1, 1), (5, 5)])
def test_fast_dev_run(given, batches):
    parsed = limits(
        fast_dev_run=given, max_epochs=9, max_steps=100, limit_val_batches=0.1, val_check_interval=0.1,
        check_val_every_n_epoch=3, num_sanity_val_steps=7,
    )  # fmt: skip
    assert (parsed.train, parsed.val, parsed.test, parsed.predict) == (batches,) * 4
    assert (parsed.max_steps, parsed.max_epochs, parsed.num_sanity_val_steps) == (batches, 1, 0)
    assert (parsed.val_check_interval, parsed.check_val_every_n_epoch) == (1.0, 1)


def test_overfit_batches():
    parsed = limits(overfit_batches=2, limit_train_batches=0.5)
    assert (parsed.train, parsed.val, parsed.test) == (2, 2, 1.0)
    parsed = limits(overfit_batches=3, fast_dev_run=True)
    assert (parsed.train, parsed.val, parsed.test) == (3, 3, 1)


@pytest.mark.parametrize("name", [f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict")]
                         + ["overfit_batches", "val_check_interval"])  # fmt: skip
@pytest.mark.parametrize("value", [1, 1.0])
def test_one_and_all_are_told_apart(name, value, caplog):
    with caplog.at_level("INFO"):
        limits()
        assert not caplog.records
        limits(**{name: value})
    one, all_ = "1 batch", "100% of the batches"
    if name == "val_check_interval":
        one, all_ = "after every batch", "at the end of the training epoch"
    message = one if isinstance(value, int) else all_
    assert f"`Trainer({name}={value})` was configured so" in caplog.text
    assert message in caplog.text


@pytest.mark.parametrize(("given", "steps"), [(None, 2), (0, 0), (5, 5), (-1, INF)])
def test_sanity_steps(given, steps):
    assert limits(num_sanity_val_steps=given).num_sanity_val_steps == steps


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"fast_dev_run": -1}, ConfigurationError, r"fast_dev_run=-1 is not a valid.*True, False or a number"),
        ({"max_epochs": -2}, ConfigurationError, r"`max_epochs` must be.*passed in -2"),
        ({"max_steps": -2}, ConfigurationError, r"`max_steps` must be.*passed in -2"),
        ({"num_sanity_val_steps": -2}, ConfigurationError, r"num_sanity_val_steps=-2, expected a number"),
        ({"val_check_interval": "01:00:00"}, ConfigurationError, r"'01:00:00'. Expected 'DD:HH:MM:SS'"),
        ({"val_check_interval": "00:01:00:half"}, ConfigurationError, r"Invalid time format for `val_check_interval`"),
        ({"val_check_interval": 1.5}, ConfigurationError, r"1.5 for val_check_interval"),
        ({"check_val_every_n_epoch": 1.5}, ConfigurationError, r"check_val_every_n_epoch.*found 1.5"),
        ({"check_val_every_n_epoch": 0}, ConfigurationError, r"check_val_every_n_epoch=0, expected at least 1"),
        (
            {"check_val_every_n_epoch": None, "val_check_interval": 0.5},
            ConfigurationError,
            r"should be an integer or a time-based duration.*Got 0.5",
        ),
    ],
)
def test_impossible_limits(given, kind, message):
    with pytest.raises(kind, match=message):
        limits(**given)


def test_batches_over_all_epochs():
    assert limits(check_val_every_n_epoch=None, val_check_interval=100).val_check_interval == 100
    assert limits(check_val_every_n_epoch=None).val_check_interval == 1.0


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("01:02:03:04", 93784.0), ({"hours": 2, "minutes": 30}, 9000.0), (timedelta(days=1, seconds=30), 86430.0)],
)
def test_time_between_validations(given, seconds):
    for every in (1, None):
        parsed = limits(val_check_interval=given, check_val_every_n_epoch=every)
        assert (parsed.val_check_interval, parsed.val_check_seconds) == (1.0, seconds)
    assert limits(val_check_interval=given, fast_dev_run=True).val_check_seconds is None
    assert limits(val_check_interval=2).val_check_seconds is None


# --- the Trainer refuses, when it is built --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"reload_dataloaders_every_n_epochs": -1}, ConfigurationError, r"should be an int >= 0, got -1"),
        ({"reload_dataloaders_every_n_epochs": "1"}, ConfigurationError, r"should be an int >= 0, got '1'"),
        ({"limit_train_batches": 1.5}, ConfigurationError, r"1.5 for limit_train_batches"),
        ({"max_epochs": -3}, ConfigurationError, r"max_epochs"),
        ({"precision": "17-mixed"}, PrecisionError, r"precision='17-mixed'.*Did you mean '16-mixed'"),
        (
            {"strategy": ModelParallelStrategy()},
            UnsupportedError,
            r"becomes ModelParallelStrategy; expected a single device or DDP.*use strategy='ddp'",
        ),
        ({"accumulate_grad_batches": 0}, ConfigurationError, r"accumulate_grad_batches=0"),
        ({"accumulate_grad_batches": 2.0}, ConfigurationError, r"accumulate_grad_batches=2.0"),
        ({"gradient_clip_val": -1.0}, ConfigurationError, r"Got -1.0 as the limit of gradient clipping"),
        ({"gradient_clip_val": "1"}, TypeError, r"`gradient_clip_val` should be an int or a float. Got '1'"),
        ({"gradient_clip_algorithm": "both"}, ConfigurationError, r"gradient_clip_algorithm='both', expected 'norm'"),
        ({"profiler": "quick"}, ConfigurationError, r"one of 'simple', 'advanced', 'pytorch', 'xla'. Got 'quick'"),
        (
            {"accumulate_grad_batches": 2, "callbacks": GradientAccumulation(2)},
            ConfigurationError,
            r"accumulate_grad_batches=2 and a GradientAccumulation callback, expected one of them",
        ),
        (
            {"gradient_clip_val": 1.0, "callbacks": [GradientClipping(max_norm=1.0)]},
            ConfigurationError,
            r"gradient_clip_val=1.0 and a GradientClipping callback, expected one of them",
        ),
        (
            {"enable_checkpointing": False, "callbacks": ModelCheckpoint()},
            ConfigurationError,
            r"`enable_checkpointing=False` but found `ModelCheckpoint`",
        ),
        (
            {"enable_progress_bar": False, "callbacks": RichProgressBar()},
            ConfigurationError,
            r"`enable_progress_bar=False` but found `RichProgressBar`",
        ),
        (
            {"enable_progress_bar": True, "callbacks": [RichProgressBar(), TQDMProgressBar()]},
            ConfigurationError,
            r"You added multiple progress bar callbacks",
        ),
    ],
)
def test_the_trainer_refuses(tmp_path, arguments, kind, message):
    with pytest.raises(kind, match=message):
        make_trainer(tmp_path, **arguments)


def test_an_unknown_argument():
    with pytest.raises(TypeError, match="acumulate"):
        Trainer(acumulate_grad_batches=2)


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        ({"limit_val_batches": False}, "limit_val_batches", 0),
        ({"overfit_batches": False}, "overfit_batches", 0),
        ({"overfit_batches": 3.0}, "overfit_batches", 3),
        ({"fast_dev_run": 0}, "fast_dev_run", False),
        ({"fast_dev_run": None}, "fast_dev_run", False),
        ({"logger": 0}, "loggers", []),
        ({"default_root_dir": "~/here/../there"}, "default_root_dir", os.path.expanduser("~/there")),
        ({"default_root_dir": Path("a/../b")}, "default_root_dir", "b"),
        ({"default_root_dir": "s3://a/../b"}, "default_root_dir", "s3://a/../b"),
        ({"default_root_dir": None}, "default_root_dir", os.getcwd()),
    ],
    ids=str,
)
def test_what_arguments_become(tmp_path, arguments, name, value):
    mine = make_trainer(tmp_path, **arguments)
    assert getattr(mine, name) == value
    theirs = (
        LightningTrainer(logger=False, enable_progress_bar=False, **arguments) if "logger" not in arguments else mine
    )
    assert getattr(theirs, name) == value or getattr(theirs, name) is None


@pytest.mark.parametrize("off", [0, 0.0, None])
def test_a_limit_of_zero_clips_nothing(tmp_path, off):
    trainer = make_trainer(tmp_path, gradient_clip_val=off)
    assert trainer.gradient_clip_val == off
    assert not any(isinstance(callback, GradientClipping) for callback in trainer.callbacks)


def test_short_forms_become_callbacks_and_attributes(tmp_path):
    trainer = make_trainer(tmp_path, gradient_clip_val=0.5, gradient_clip_algorithm="value", accumulate_grad_batches=4)
    assert (trainer.gradient_clip_val, trainer.gradient_clip_algorithm) == (0.5, "value")
    assert trainer.accumulate_grad_batches == 4
    trainer = make_trainer(tmp_path, callbacks=[GradientAccumulation(3), GradientClipping(max_norm=2.0)])
    assert (trainer.gradient_clip_val, trainer.gradient_clip_algorithm) == (2.0, "norm")
    assert trainer.accumulate_grad_batches == 3


@pytest.mark.parametrize(
    ("arguments", "epochs", "steps", "least"),
    [
        ({"max_epochs": None}, None, -1, None),
        ({"max_epochs": None, "max_steps": 5}, None, 5, None),
        ({"max_epochs": 3, "max_steps": 5}, 3, 5, None),
        ({"max_epochs": 3, "min_epochs": 2, "min_steps": 2}, 3, -1, 2),
        ({"max_epochs": 3, "fast_dev_run": 4}, 1, 4, None),
    ],
)
def test_how_long(tmp_path, arguments, epochs, steps, least):
    trainer = make_trainer(tmp_path, **arguments)
    assert (trainer.max_epochs, trainer.max_steps, trainer.min_epochs) == (epochs, steps, least)


@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")
@pytest.mark.parametrize(
    ("arguments", "epochs", "least"),
    [
        ({"max_epochs": None, "max_steps": 5}, -1, 0),
        ({"max_epochs": None, "max_time": "00:00:01:00"}, -1, 0),
        ({"max_epochs": 3, "min_steps": 2}, 3, 1),
        ({"max_epochs": None}, 1000, 0),
    ],
)
def test_what_nobody_said_is_filled_in_when_a_fit_starts(tmp_path, arguments, epochs, least):
    trainer = make_trainer(tmp_path, **arguments)
    warns = pytest.warns(PossibleUserWarning, match="`max_epochs` was not set") if epochs == 1000 else nullcontext()
    with warns:
        trainer.fit(Regression(), [])  # no data, no training
    assert (trainer.max_epochs, trainer.min_epochs) == (epochs, least)


# --- barebones -------------------------------------------------------------------------------------------------------

ASKS = {
    "enable_checkpointing": True,
    "logger": True,
    "enable_progress_bar": True,
    "log_every_n_steps": 1,
    "enable_model_summary": True,
    "num_sanity_val_steps": 1,
    "fast_dev_run": 1,
    "detect_anomaly": True,
    "profiler": "simple",
}


@pytest.mark.parametrize("name", ASKS)
def test_barebones_excludes(name):
    assert ASKS.keys() == BAREBONES.keys()
    with pytest.raises(ValueError, match=rf"`Trainer\(barebones=True, {name}={ASKS[name]!r}\)` was passed"):
        Trainer(barebones=True, **{name: ASKS[name]})


def test_barebones_is_bare(caplog):
    with caplog.at_level(logging.INFO):
        trainer = Trainer(barebones=True, accelerator="cpu", max_steps=2, precision="16-mixed", logger=False)
    assert "running in `Trainer(barebones=True)` mode" in caplog.text
    assert all(f"`{name}`" in caplog.text for name in BAREBONES)
    assert [type(callback) for callback in trainer.callbacks] == [ScalerCheckpoint]
    assert (trainer.barebones, trainer.loggers, trainer.log_every_n_steps, trainer.num_sanity_val_steps) == (
        True,
        [],
        0,
        0,
    )


def test_barebones_logs_nothing(tmp_path, caplog):
    class Logs(Regression):
        def training_step(self, batch, batch_idx):
            self.log("loss", 1.0)
            self.log_dict({"other": 2.0})
            return super().training_step(batch, batch_idx)

    trainer = Trainer(barebones=True, accelerator="cpu", max_steps=2, default_root_dir=tmp_path)
    with (
        caplog.at_level(logging.INFO),
        pytest.warns(UserWarning, match=r"trying to `self.log\(\)` but `Trainer\(barebones=True\)`"),
    ):
        trainer.fit(Logs(), loader_of(make_batches(3)))
    assert "`Trainer(barebones=True)` started running" in caplog.text
    assert (trainer.global_step, trainer.callback_metrics) == (2, {})
    assert not list(tmp_path.iterdir())
