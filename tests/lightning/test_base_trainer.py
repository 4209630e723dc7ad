"""The Trainer as seen by Lightning's classes: the attributes that they read exist, with Lightning's values."""

import inspect
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from tests.parity import (
    QUIET,
    Classifier,
    Learner,
    Logs,
    RecordingLogger,
    assert_agree,
    data,
    lightning,
    lightnings_noise_ignored,
    looks_in,
    ours,
    plain,
    run_both,
    weights,
)
from trainer import Trainer
from trainer.callbacks import GradientClipping
from trainer.precision import HalfPrecision

IN_OUR_OWN_WAY = {
    "callbacks": "we have a few more by default",
    "scaler": "always there; Lightning has none without mixed precision",
    "precision_plugin": "ours, in Lightning's shape",
    **dict.fromkeys(("fit_loop", "validate_loop", "test_loop", "predict_loop"), "views"),
}
"""Public attributes with values that differ from those of Lightning's Trainer, with the reason."""


def attributes(trainer):
    """Return the names of all attributes except methods."""
    names = [name for name in dir(LightningTrainer) if isinstance(getattr(LightningTrainer, name), property)]
    names += [name for name in vars(trainer) if not callable(getattr(trainer, name))]
    return sorted({name for name in names if not name.startswith("_")} - IN_OUR_OWN_WAY.keys())


with lightnings_noise_ignored():
    ATTRIBUTES = attributes(lightning())


INHERITED = {
    name: value
    for name, value in inspect.getmembers(Trainer)
    if vars(LightningTrainer).get(name) is value and not name.startswith("_")
}


@looks_in(
    "on_fit_start", "on_train_start", "on_train_batch_start", "on_train_batch_end", "on_validation_batch_end",
    "on_train_epoch_end", "on_fit_end", "on_test_batch_end", "on_predict_batch_end",
)  # fmt: skip
class Reads(Callback):
    """Reads every attribute at several hooks, assigns an inherited one to itself, and calls the inherited methods."""

    def __init__(self):
        self.read = {}

    def look(self, hook, trainer):
        where = f"{hook} {trainer.sanity_checking} {trainer.global_step}"
        values = {}
        for name in ATTRIBUTES:
            if name == "estimated_stepping_batches" and not hook.startswith(("on_train_batch", "on_train_epoch")):
                continue  # reading it requests the training data from Lightning, early or without any
            value = getattr(trainer, name)
            values[name] = str(value) if name == "state" else plain(value)
            if (attribute := INHERITED.get(name)) is not None and attribute.fset is not None:
                setattr(trainer, name, value)
                assert getattr(trainer, name) == value, name
        trainer.print(where)
        with trainer.init_module():
            assert nn.Linear(2, 2).weight.device == trainer.strategy.root_device
        self.read[where] = values


@pytest.mark.parametrize(
    "arguments",
    [{"accumulate_grad_batches": 2, "val_check_interval": 2}, {"limit_val_batches": 1, "num_sanity_val_steps": 5}],
    ids=str,
)
def test_attributes_have_lightnings_values(arguments, tmp_path, capsys):
    methods = {name for name, value in INHERITED.items() if not isinstance(value, property)}
    assert methods == {"print", "init_module"}, "call the others in `look`, too"

    def scenario(make):
        reads = Reads()
        trainer = make(
            max_epochs=2, callbacks=[reads], default_root_dir=tmp_path, logger=RecordingLogger(), log_every_n_steps=1,
            **arguments,
        )  # fmt: skip
        reads.look("built", trainer)
        trainer.fit(Logs(), data(8), data(4))
        trainer.test(Logs(), data(4), verbose=False)
        trainer.predict(Logs(), data(4))
        reads.look("after", trainer)
        return reads.read, capsys.readouterr().out

    (theirs, printed), (mine, printed_by_ours) = run_both(scenario)
    assert printed_by_ours == printed
    assert mine == theirs


def test_modules_are_created_in_the_dtype_and_on_the_device():
    def weight(trainer, **options):
        with trainer.init_module(**options):
            return nn.Linear(2, 2).weight

    assert_agree(lambda make: [weight(make(precision=name)).dtype for name in ("16-mixed", "bf16-true", "64-true")])
    assert weight(ours(precision=HalfPrecision("bfloat16", fp32_modules="head"))).dtype is torch.float32
    assert torch.get_default_dtype() == torch.float32
    assert weight(Trainer(strategy=SingleDeviceStrategy(torch.device("meta")), logger=False)).is_meta
    drawn = torch.get_rng_state()
    weight(ours(), empty_init=True)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_clipping_may_be_set_between_two_runs():
    module, trainer = Learner(), ours(max_steps=1, gradient_clip_val=0.5)
    assert (trainer.gradient_clip_val, trainer.gradient_clip_algorithm) == (0.5, None)
    trainer.gradient_clip_val, trainer.gradient_clip_algorithm = 1e-3, "value"
    before = weights(module)
    trainer.fit(module, data(4))
    moved = max(float((a - b).abs().max()) for a, b in zip(weights(module), before, strict=True))
    assert 0 < moved < 1.1e-4  # a learning rate of 0.1
    trainer.gradient_clip_val = None
    assert not any(isinstance(callback, GradientClipping) for callback in trainer.callbacks)
    with pytest.raises(ValueError, match="norm2"):
        trainer.gradient_clip_algorithm = "norm2"


def test_limit_that_is_set_later_keeps_the_norm_of_the_callback():
    clipping = GradientClipping(max_norm=1.0, norm_type=1.0, log_norm=False)
    trainer = ours(callbacks=[clipping])
    for algorithm, limits in (("norm", (2.0, None)), ("value", (None, 2.0))):
        trainer.gradient_clip_algorithm, trainer.gradient_clip_val = algorithm, 2.0
        assert clipping in trainer.callbacks
        assert (clipping.max_norm, clipping.clip_value) == limits
        assert (clipping.norm_type, clipping.log_norm, trainer.gradient_clip_val) == (1.0, False, 2.0)


# --- methods of Lightning's class that another library has replaced ---------------------------------------------------

METHODS = ("fit", "validate", "test", "predict", "save_checkpoint")


@pytest.fixture
def replaced(monkeypatch):
    """Replace public methods of Lightning's Trainer by functions that record the calls, as MLflow and ClearML do."""
    seen = []

    def replace(name):
        original = getattr(LightningTrainer, name)

        def replacement(self, *args, **kwargs):
            seen.append(f"{name} of {type(self).__name__}")
            result = original(self, *args, **kwargs)
            seen.append((args, kwargs, result))
            return result

        monkeypatch.setattr(LightningTrainer, name, replacement)

    for name in METHODS:
        replace(name)
    return seen


def test_replacements_see_each_call_of_ours_once_and_return_its_result(tmp_path, replaced):
    trainer, module, loader = ours(max_epochs=1), Classifier(), data(4)
    file = str(tmp_path / "a.ckpt")
    torch.save(module.state_dict(), file)
    assert trainer.fit(module, loader, val_dataloaders=loader, weights=file) is None
    loaders = {"train_dataloaders": loader, "val_dataloaders": loader}
    assert replaced == ["fit of Trainer", ((module,), {**loaders, "weights": file}, None)]
    assert trainer.global_step == 2
    trainer.save_checkpoint(file)
    for name in ("validate", "test", "predict"):
        replaced.clear()
        result = getattr(trainer, name)(dataloaders=loader, ckpt_path=file)
        assert replaced == [f"{name} of Trainer", ((), {"dataloaders": loader, "ckpt_path": file}, result)]
        assert result
    replaced.clear()
    trainer.save_checkpoint(file, weights_only=True)
    assert replaced == ["save_checkpoint of Trainer", ((file,), {"weights_only": True}, None)]
    assert "optimizer_states" not in torch.load(file, weights_only=True)


def test_replacement_of_save_checkpoint_gets_the_final_names_of_existing_files(tmp_path, monkeypatch):
    saved, original = [], LightningTrainer.save_checkpoint

    def replacement(self, path, *args, **kwargs):
        original(self, path, *args, **kwargs)
        saved.append((Path(path).name, Path(path).stat().st_size > 0))

    monkeypatch.setattr(LightningTrainer, "save_checkpoint", replacement)
    saver = ModelCheckpoint(tmp_path, save_last=True, save_top_k=-1)
    ours(max_epochs=2, callbacks=[saver], enable_checkpointing=True).fit(Learner(), data(4))
    names = ["epoch=0-step=2.ckpt", "last.ckpt", "epoch=1-step=4.ckpt", "last.ckpt"]
    assert saved == [(name, True) for name in names]


def test_errors_nested_calls_and_overrides_of_subclasses_pass_through_replacements(replaced):
    class Mine(Trainer):
        def fit(self, *args, **kwargs):
            replaced.append("override")
            super().fit(*args, **kwargs)
            self.validate(*args[:2])

    class Fails(Callback):
        def on_train_batch_end(self, *_):
            raise ZeroDivisionError

    trainer = Mine(**QUIET, max_epochs=1)
    trainer.fit(Classifier(), data(4), data(4))
    assert [one for one in replaced if isinstance(one, str)] == ["override", "fit of Mine", "validate of Mine"]
    with pytest.raises(ZeroDivisionError):
        ours(max_epochs=1, callbacks=[Fails()]).fit(Learner(), data(4))
    assert replaced[-1] == "fit of Trainer"


def test_lightnings_own_trainer_runs_its_own_methods(tmp_path, replaced):
    ours(max_epochs=1).fit(Learner(), data(4))  # Lightning's function has led to ours
    replaced.clear()
    signature = inspect.signature(LightningTrainer.fit.__closure__[1].cell_contents)
    assert "train_dataloaders" in signature.parameters
    with lightnings_noise_ignored():
        trainer = lightning(max_epochs=1)
        trainer.fit(Learner(), data(4))
    assert type(trainer) is LightningTrainer
    assert [one for one in replaced if isinstance(one, str)] == ["fit of Trainer"]
    assert trainer.global_step == 2
    assert type(trainer.fit_loop).__module__.startswith("lightning.")
