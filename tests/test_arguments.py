"""Arguments of the Trainer, also from the environment, and the messages of its constructor, as in Lightning."""

import inspect
import logging
import os
import re
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.parity import MAKERS, QUIET, lightnings_noise_ignored, ours
from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer import Trainer
from trainer.arguments import ARGUMENTS, BAREBONES, Kind, check, parse_limits
from trainer.callbacks import GradientAccumulation, GradientClipping, ScalerCheckpoint
from trainer.errors import ArgumentError, ConfigurationError, PrecisionError

INF = float("inf")
BARS = [RichProgressBar(), TQDMProgressBar()]


def limits(**given):
    check(given)
    found = parse_limits({name: argument.default for name, argument in ARGUMENTS.items()} | given, rank_zero_info)
    stages = {stage: found[f"limit_{stage}_batches"] for stage in ("train", "val", "test", "predict")}
    return SimpleNamespace(**found, **stages)


def test_table_is_that_of_the_signature():
    parameters = inspect.signature(Trainer).parameters.values()
    assert [(one.name, one.default) for one in parameters] == [(one.name, one.default) for one in ARGUMENTS.values()]


def test_every_default_and_every_choice_is_all_right():
    for argument in ARGUMENTS.values():
        assert argument.meaning
        for value in (argument.default, *(one for one in argument.accepts if not isinstance(one, Kind))):
            assert argument.mistake(value) is None
            assert argument.mistake(value, "trainer.x") is None


@pytest.mark.parametrize(
    "given",
    [
        {"limit_val_batches": False, "limit_train_batches": 3.0, "max_steps": 1e6, "num_nodes": np.int64(1)},
        {"gradient_clip_algorithm": "NORM", "profiler": "Simple", "max_epochs": INF, "gradient_clip_val": INF},
        {"max_time": timedelta(hours=1), "default_root_dir": Path("x"), "enable_progress_bar": 0, "benchmark": 1},
        {"profiler": False, "gradient_clip_val": False, "sync_batchnorm": None, "inference_mode": None},
        {"strategy": ModelParallelStrategy(), "devices": "0,1", "accelerator": CPUAccelerator()},
        {"devices": "2,"},
    ],
)
def test_arguments_allowed_by_lightning_are_accepted(given):
    check(given)


def test_names_that_others_register_are_known():
    with pytest.raises(ConfigurationError, match=r"strategy is 'mine', expected"):
        check({"strategy": "mine"})
    check({"strategy": "mine"}, strategy=["mine"])


@pytest.mark.parametrize(
    ("stage", "given", "kind"),
    [("train", 1, int), ("val", 0.5, float), ("test", 1.0, float), ("predict", 3.0, int), ("train", 0, int)],
)
def test_batches_and_shares(stage, given, kind):
    parsed = getattr(limits(**{f"limit_{stage}_batches": given}), stage)
    assert parsed == given
    assert type(parsed) is kind  # 1 is a batch, 1.0 is all of them


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("limit_train_batches", value) for value in (True, -1, -0.5, 1.5, float("nan"), "3")),
        ("reload_dataloaders_every_n_epochs", -1),
        ("val_check_interval", "00:01"),
        ("max_epochs", -2),
        ("max_time", timedelta(-1)),
        ("fast_dev_run", -1),
        ("num_sanity_val_steps", -2),
        ("check_val_every_n_epoch", 0.5),
        ("accumulate_grad_batches", 0),
        ("gradient_clip_algorithm", "norms"),
        ("gradient_clip_val", -1.0),
        ("profiler", "fast"),
        ("strategy", "deepspeed_stage_3_offload_nvme"),
    ],
)
def test_impossible_values_are_refused(name, value):
    with pytest.raises(ConfigurationError, match=re.escape(f"{name} is {value!r}, expected")):
        limits(**{name: value})


@pytest.mark.parametrize(("given", "batches"), [(True, 1), (5, 5)])
def test_fast_dev_run(given, batches):
    parsed = limits(
        fast_dev_run=given, max_epochs=9, max_steps=100, limit_val_batches=0.1, val_check_interval=0.1,
        check_val_every_n_epoch=3, num_sanity_val_steps=7,
    )  # fmt: skip
    assert (parsed.train, parsed.val, parsed.test, parsed.predict) == (batches,) * 4
    assert (parsed.max_steps, parsed.max_epochs, parsed.num_sanity_val_steps) == (batches, 1, 0)
    assert (parsed.val_check_interval, parsed.check_val_every_n_epoch) == (1.0, 1)


@pytest.mark.parametrize(
    ("more", "train", "val"),
    [
        ({}, 2, 2),
        ({"limit_val_batches": 0.0}, 2, 0),  # 8962
        ({"limit_train_batches": 0}, 0, 2),
        ({"limit_train_batches": 1.0, "limit_val_batches": 2}, 2, 2),
        ({"fast_dev_run": 5}, 2, 2),
    ],
)
def test_overfit_batches_limits_training_and_validation(more, train, val):
    parsed = limits(overfit_batches=2, **more)
    assert (parsed.overfit_batches, parsed.train, parsed.val) == (2, train, val)


@pytest.mark.parametrize(("name", "value"), [("limit_val_batches", 1), ("limit_train_batches", 0.5)])
def test_overfit_batches_with_another_limit_is_refused(name, value):
    with pytest.raises(ConfigurationError, match=f"overfit_batches is 2, and {name} is {value}: .* or {name}=0"):
        limits(overfit_batches=2, **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "meaning"),
    [
        ("limit_test_batches", 1, "1 batch"),
        ("overfit_batches", 1.0, "100% of the batches"),
        ("val_check_interval", 1, "after every batch"),
        ("val_check_interval", 1.0, "at the end of the training epoch"),
    ],
)
def test_one_and_all_are_distinguished(name, value, meaning, caplog):
    with caplog.at_level("INFO"):
        limits()
        assert not caplog.records
        limits(**{name: value})
    assert f"`Trainer({name}={value})` was configured so" in caplog.text
    assert meaning in caplog.text


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("01:02:03:04", 93784.0), ({"hours": 2, "minutes": 30}, 9000.0), (timedelta(days=1, seconds=30), 86430.0)],
)
def test_time_between_validations(given, seconds):
    for every in (1, None):
        parsed = limits(val_check_interval=given, check_val_every_n_epoch=every)
        assert (parsed.val_check_interval, parsed.val_check_seconds) == (1.0, seconds)
        parsed = limits(val_check_interval=100, check_val_every_n_epoch=every)
        assert (parsed.val_check_interval, parsed.val_check_seconds) == (100, None)
    assert limits(val_check_interval=given, fast_dev_run=True).val_check_seconds is None


# --- the Trainer refuses, when it is built --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"precision": "17-mixed"}, PrecisionError, r"precision='17-mixed'.*Did you mean '16-mixed'"),
        ({"check_val_every_n_epoch": None, "val_check_interval": 0.5}, ConfigurationError, "counts batches"),
        ({"strategy": "nonsense"}, ValueError, "nonsense"),
        ({"accelerator": "nonsense"}, ValueError, "nonsense"),
        ({"accelerator": "cuda"}, MisconfigurationException, "(?i)cuda|gpu"),
        ({"accelerator": "cpu", "devices": 0}, MisconfigurationException, "devices"),
        ({"accumulate_grad_batches": 2, "callbacks": GradientAccumulation(2)}, ConfigurationError, "expected one"),
        ({"gradient_clip_val": 1.0, "callbacks": GradientClipping(max_norm=1.0)}, ConfigurationError, "expected one"),
        ({"enable_checkpointing": False, "callbacks": ModelCheckpoint()}, ConfigurationError, "but found `ModelCh"),
        ({"enable_progress_bar": False, "callbacks": RichProgressBar()}, ConfigurationError, "but found `RichPro"),
        ({"enable_progress_bar": True, "callbacks": BARS}, ConfigurationError, "multiple progress bar callbacks"),
        ({"acumulate_grad_batches": 2}, TypeError, "acumulate"),
    ],
)
def test_trainer_refuses(tmp_path, arguments, kind, message):
    with pytest.raises(kind, match=message):
        make_trainer(tmp_path, **arguments)


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        ({"limit_val_batches": False}, "limit_val_batches", 0),
        ({"overfit_batches": 3.0}, "overfit_batches", 3),
        ({"fast_dev_run": 0}, "fast_dev_run", False),
        ({"logger": 0}, "loggers", []),
        ({"default_root_dir": "~/here/../there"}, "default_root_dir", os.path.expanduser("~/there")),
        ({"default_root_dir": Path("a/../b")}, "default_root_dir", "b"),
        ({"default_root_dir": "s3://a/../b"}, "default_root_dir", "s3://a/../b"),
        ({"default_root_dir": None}, "default_root_dir", os.getcwd()),
    ],
    ids=str,
)
def test_converted_arguments_equal_lightnings(tmp_path, arguments, name, value):
    assert getattr(make_trainer(tmp_path, **arguments), name) == value
    theirs = LightningTrainer(**{"logger": False, "enable_progress_bar": False} | arguments)
    assert getattr(theirs, name) == value or getattr(theirs, name) is None


@pytest.mark.parametrize("off", [0, 0.0, None])
def test_limit_of_zero_clips_nothing(tmp_path, off):
    trainer = make_trainer(tmp_path, gradient_clip_val=off)
    assert trainer.gradient_clip_val == off
    assert not any(isinstance(callback, GradientClipping) for callback in trainer.callbacks)


@pytest.mark.parametrize("batches", [0, -1, 2.5])
def test_assigned_accumulation_is_checked_like_the_argument(tmp_path, batches):
    trainer = make_trainer(tmp_path)
    with pytest.raises(ArgumentError, match="accumulate_grad_batches is"):
        trainer.accumulate_grad_batches = batches
    assert trainer.accumulate_grad_batches == 1


def test_short_forms_become_callbacks_and_attributes(tmp_path):
    short = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 4}
    long = {"callbacks": [GradientAccumulation(3), GradientClipping(max_norm=2.0)]}
    for arguments, expected in ((short, [*short.values()]), (long, [2.0, "norm", 3])):
        trainer = make_trainer(tmp_path, **arguments)
        assert [getattr(trainer, name) for name in short] == expected


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
def test_defaults_are_set_at_the_start_of_a_fit(tmp_path, arguments, epochs, least):
    trainer = make_trainer(tmp_path, **arguments)
    with pytest.warns(PossibleUserWarning, match="`max_epochs` was not set") if epochs == 1000 else nullcontext():
        trainer.fit(Regression(), [])  # no data, no training
    assert (trainer.max_epochs, trainer.min_epochs) == (epochs, least)


# --- barebones -------------------------------------------------------------------------------------------------------

ASKS = {"profiler": "simple", "log_every_n_steps": 1, "num_sanity_val_steps": 1, "fast_dev_run": 1}


@pytest.mark.parametrize("name", BAREBONES)
def test_barebones_excludes(name):
    asked = ASKS.get(name, True)
    with pytest.raises(ValueError, match=rf"`Trainer\(barebones=True, {name}={asked!r}\)` was passed"):
        Trainer(barebones=True, **{name: asked})


def test_barebones_is_bare(caplog):
    with caplog.at_level(logging.INFO):
        trainer = Trainer(barebones=True, accelerator="cpu", max_steps=2, precision="16-mixed", logger=False)
    assert "running in `Trainer(barebones=True)` mode" in caplog.text
    assert all(f"`{name}`" in caplog.text for name in BAREBONES)
    assert [type(callback) for callback in trainer.callbacks] == [ScalerCheckpoint]
    assert (trainer.barebones, trainer.loggers) == (True, [])
    assert (trainer.log_every_n_steps, trainer.num_sanity_val_steps) == (0, 0)


def test_barebones_logs_nothing(tmp_path, caplog):
    def change(loss, batch_idx):
        module.log("loss", 1.0)
        module.log_dict({"other": 2.0})
        return loss

    caplog.set_level(logging.INFO)
    module = Regression(change=change)
    trainer = Trainer(barebones=True, accelerator="cpu", max_steps=2, default_root_dir=tmp_path)
    with pytest.warns(UserWarning, match=r"trying to `self.log\(\)` but `Trainer\(barebones=True\)`"):
        trainer.fit(module, loader_of(make_batches(3)))
    assert "`Trainer(barebones=True)` started running" in caplog.text
    assert (trainer.global_step, trainer.callback_metrics) == (2, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [LightningTrainer, Trainer])
def test_environment_variables_are_defaults_of_arguments(kind, monkeypatch):
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "7")
    monkeypatch.setenv("PL_TRAINER_LIMIT_VAL_BATCHES", "0.5")
    monkeypatch.setenv("PL_TRAINER_PRECISION", "bf16-mixed")
    monkeypatch.setenv("PL_TRAINER_DEVICES", "3")
    monkeypatch.setenv("PL_TRAINER_NO_SUCH_ARGUMENT", "3")
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "")
    with lightnings_noise_ignored():
        trainer = kind(**QUIET)  # which sets `devices`
    assert (trainer.max_steps, trainer.limit_val_batches, trainer.precision) == (7, 0.5, "bf16-mixed")
    assert (trainer.num_devices, trainer.max_epochs) == (1, None)


@pytest.mark.parametrize("arguments", [{}, {"fast_dev_run": 2}, {"detect_anomaly": True}], ids=str)
def test_messages_of_the_constructor(arguments, caplog):
    said = []
    for make in MAKERS:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            make(**arguments)
        said.append({record.message for record in caplog.records if "Tip" not in record.message})
    assert said[0] == said[1]
    assert "GPU available: False, used: False" in said[1]


def test_gpu_that_is_not_used(monkeypatch):
    monkeypatch.setattr("lightning.pytorch.accelerators.CUDAAccelerator.is_available", lambda: True)
    with pytest.warns(UserWarning, match="GPU available but not used"):
        ours()
