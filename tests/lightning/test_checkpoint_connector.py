"""Resolution of `ckpt_path` under both Trainers."""

import os
import pickle
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint

from tests.parity import Classifier, assert_agree, data, ours
from tests.support import Regression, loader_of, make_batches, make_trainer, sgd

SLURM = "lightning.fabric.plugins.environments.slurm.SLURMEnvironment.detect"


class Scored(Classifier):
    """Logs a score that rises and falls."""

    SCORES = (3.0, 1.0, 2.0, 5.0, 4.0, 0.0, 7.0, 8.0)

    def __init__(self):
        super().__init__()
        self.validations = 0

    def training_step(self, batch, batch_idx):
        self.log("step_number", float(self.global_step), on_step=True, on_epoch=True)
        return self.loss(batch)

    def on_validation_epoch_end(self):
        self.log("score", self.SCORES[self.validations % len(self.SCORES)])
        self.validations += not self.trainer.sanity_checking


def fit(make, folder, *callbacks, **arguments):
    given = {"max_epochs": 2, "callbacks": list(callbacks), "enable_checkpointing": bool(callbacks) or None}
    trainer = make(default_root_dir=folder, **{**given, **arguments})
    trainer.fit(Scored(), data(8), data(4, seed=1))
    return trainer


def seen(make, tmp_path, work):
    """Return the result or the error of `work`, and the first words of its warnings."""
    folder = tmp_path / make.__name__
    folder.mkdir()
    kinds = (ValueError, FileNotFoundError, KeyError, AttributeError, pickle.UnpicklingError, RuntimeError)
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            result = work(make, folder)
        except kinds as error:
            result = [kind.__name__ for kind in kinds if isinstance(error, kind)]
    texts = {str(one.message).replace(str(folder), "") for one in caught}
    return result, sorted(text[:36] for text in texts if "ckpt_path" in text)


def name(path):
    return os.path.basename(str(path))


def best_and_last(make, folder):
    saver = ModelCheckpoint(folder / "c", monitor="score", save_last=True, filename="{epoch}")
    trainer = fit(make, folder, saver)
    found = []
    for given in ("best", "last", saver.best_model_path, Path(saver.last_model_path)):
        trainer.validate(Scored(), data(4), ckpt_path=given, verbose=False)
        found.append((name(trainer.ckpt_path), type(trainer.ckpt_path).__name__))
    trainer.test(dataloaders=data(4), verbose=False)  # without a model: the best
    return [*found, name(trainer.ckpt_path)]


def assigned(make, folder):
    trainer = fit(make, folder, ModelCheckpoint(folder / "c", monitor="score", filename="{epoch}"))
    trainer.save_checkpoint(folder / "own.ckpt")
    trainer.ckpt_path, found = folder / "own.ckpt", []
    for given in (None, None, "best", None):
        trainer.test(Scored(), data(4), ckpt_path=given, verbose=False)
        found.append(name(trainer.ckpt_path))
    return found


def requeued(make, folder):
    trainer = fit(make, folder, max_epochs=1)
    for number in ("", "_0", "_3", "_33"):
        trainer.save_checkpoint(folder / f"hpc_ckpt{number}.ckpt")
    with mock.patch(SLURM, return_value=True):
        resumed = fit(make, folder)
    resumed.validate(Scored(), data(4), ckpt_path="hpc", verbose=False)
    return resumed.global_step, name(resumed.ckpt_path), name(trainer._checkpoint_connector.hpc_save_path(str(folder)))


def on_exception(make, folder):
    fails = LambdaCallback(on_train_batch_start=lambda trainer, *_: 1 // (6 - trainer.global_step))
    with pytest.raises(ZeroDivisionError):
        fit(make, folder, OnExceptionCheckpoint(folder), fails)
    trainer = fit(make, folder, OnExceptionCheckpoint(folder))
    return trainer.global_step, name(trainer.ckpt_path), os.listdir(folder)


def saved_weights(make, folder):
    fit(make, folder).save_checkpoint(folder / "w.ckpt", weights_only=True)
    make(max_epochs=3).fit(Scored(), data(8), data(4), ckpt_path=folder / "w.ckpt")


def unsafe(make, folder):
    saves_a_path = LambdaCallback(on_save_checkpoint=lambda _, __, checkpoint: checkpoint.update(path=Path("any")))
    fit(make, folder, callbacks=[saves_a_path]).save_checkpoint(folder / "u.ckpt")
    make().validate(Scored(), data(4), ckpt_path=folder / "u.ckpt")


def evaluate(ckpt_path, **arguments):
    given = {"ckpt_path": ckpt_path, "verbose": False}
    return lambda make, folder: make(default_root_dir=folder, **arguments).validate(Scored(), data(4), **given)


WORK = {
    "best and last": best_and_last,
    "assigned": assigned,
    "requeued": requeued,
    "on exception": on_exception,
    "best without a callback": evaluate("best"),
    "last that is not there": evaluate("last", enable_checkpointing=True),
    "hpc that is not there": evaluate("hpc"),
    "no such file": evaluate("nowhere.ckpt"),
    "weights only": saved_weights,
    "unsafe": unsafe,
    "before a run": lambda make, folder: make().save_checkpoint(folder / "x.ckpt"),
}


@pytest.mark.parametrize("what", WORK)
def test_ckpt_path(tmp_path, what):
    assert_agree(lambda make: seen(make, tmp_path, WORK[what]))


def test_checkpoint_without_optimizer_states_warns(tmp_path):
    torch.save({"state_dict": Scored().state_dict(), "optimizer_states": [], "lr_schedulers": []}, tmp_path / "x.ckpt")
    trainer = ours(max_epochs=1)
    with pytest.warns(UserWarning, match="has no optimizer_states: those of this run start from their initial states"):
        trainer.fit(Scored(), data(8), data(4), ckpt_path=tmp_path / "x.ckpt")
    assert trainer.global_step == 4


@pytest.mark.parametrize("connects", [False, True])
def test_checkpoint_from_before_the_first_fit_does_not_warn(tmp_path, connects):
    first, trainer = ours(max_epochs=0), ours(max_epochs=1)
    if connects:
        first.strategy.connect(Scored())
    else:
        first.fit(Scored(), data(8), data(4))
    first.save_checkpoint(tmp_path / "x.ckpt")
    trainer.fit(Scored(), data(8), data(4), ckpt_path=tmp_path / "x.ckpt")  # warnings are errors
    assert trainer.global_step == 4


def test_evaluation_of_a_checkpoint_keeps_the_results_of_the_fit(tmp_path):
    saver, stops = ModelCheckpoint(tmp_path, monitor="score", save_top_k=-1), EarlyStopping("score", patience=9)
    trainer = fit(ours, tmp_path, saver, stops, max_epochs=4)
    worse = next(path for path, score in saver.best_k_models.items() if score == Scored.SCORES[0])
    before = saver.state_dict(), stops.state_dict()
    trainer.validate(Scored(), data(4), ckpt_path=worse, verbose=False)
    assert (saver.state_dict(), stops.state_dict()) == before
    assert (saver.best_model_score, stops.best_score, stops.wait_count) == (1.0, 1.0, 2)


@pytest.mark.parametrize(("patience", "epochs"), [(2, 4), (3, 5)])
def test_resumed_run_has_the_patience_of_its_code(tmp_path, patience, epochs):
    """The scores are 3 and 1 and, after the resume, 2, 5, 4 and 0."""
    off = {"enable_checkpointing": False}
    fit(ours, tmp_path, EarlyStopping("score", patience=9), **off).save_checkpoint(tmp_path / "x.ckpt")
    stops = EarlyStopping("score", patience=patience)
    resumed = ours(default_root_dir=tmp_path, max_epochs=9, callbacks=[stops], **off)
    resumed.fit(Scored(), data(8), data(4, seed=1), ckpt_path=tmp_path / "x.ckpt")
    assert (resumed.current_epoch, stops.patience) == (epochs, patience)


@pytest.mark.parametrize(
    ("changed", "scheduled", "message"),
    [
        ({}, True, None),
        ({"lr": 0.02}, False, "SGD continues with lr=0.1 from the checkpoint; the code has lr=0.02"),
        ({"lr": 0.02}, True, "SGD continues with initial_lr=0.1 from the checkpoint; the code has initial_lr=0.02"),
        (
            {"weight_decay": 0.5},
            True,
            "SGD continues with weight_decay=0 from the checkpoint; the code has weight_decay=0.5",
        ),
    ],
)
def test_settings_of_an_optimizer_that_a_checkpoint_replaces_are_logged(tmp_path, caplog, changed, scheduled, message):
    caplog.set_level("INFO")
    schedule = partial(torch.optim.lr_scheduler.ConstantLR, factor=0.5) if scheduled else None
    before, module = (Regression(optimizer=partial(sgd, **more), schedule=schedule) for more in ({}, changed))
    batches, path, trainer = loader_of(make_batches(2)), tmp_path / "x.ckpt", make_trainer(tmp_path)
    trainer.fit(before, batches)
    trainer.save_checkpoint(path)
    make_trainer(tmp_path, max_epochs=2).fit(module, batches, ckpt_path=path)
    found = [one.getMessage() for one in caplog.records if "continues with" in one.getMessage()]
    assert [one.startswith(str(message)) for one in found] == [True] * (message is not None)
    assert all(f"start a new run with weights={str(path)!r} instead of ckpt_path" in one for one in found)
    make_trainer(tmp_path).fit(module, batches, weights=path)  # as advised
    assert module.optimizers().param_groups[0]["lr"] == changed.get("lr", 0.1) * (0.5 if scheduled else 1)
