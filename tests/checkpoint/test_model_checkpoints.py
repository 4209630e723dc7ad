"""ModelCheckpoint after a resume: it saves each step once, and completes postponed saves."""

import signal
from collections import UserList
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import lightning
import pytest
import torch
from _faults.training import differences
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from tests.support import Killed, KilledAt, Regression, loader_of, make_batches, make_net, make_trainer, manual_step
from trainer import Trainer

BATCHES = make_batches(4)


def interrupted(batch):
    """Return a callback that ends the run in the batch with this number by SIGTERM, before a validation that is due."""

    def end(trainer, *_):
        if trainer.progress.batches == batch:
            signal.raise_signal(signal.SIGTERM)

    return LambdaCallback(on_train_batch_end=end)


@pytest.mark.parametrize(
    ("options", "end", "arguments"),
    [
        ({"monitor": "val_loss", "save_top_k": 2}, interrupted(8), {"val_check_interval": 2}),
        ({"save_top_k": -1}, interrupted(5), {"accumulate_grad_batches": 3}),
        ({}, KilledAt(3), {}),
        ({"save_last": "link"}, KilledAt(7), {}),
    ],
)
def test_resumed_run_leaves_the_files_of_an_uninterrupted_one(tmp_path, options, end, arguments):
    """Also if the run ends before the validation that its saver waits for."""

    def run(name, *callbacks):
        saver = ModelCheckpoint(tmp_path / name / "kept", every_n_train_steps=2, **options)
        fit(tmp_path / name, *callbacks, saver, batches=4, resume="auto", max_epochs=3, **arguments)
        files = {path.name: path for path in (tmp_path / name).rglob("*.ckpt") if path.name != "interrupted.ckpt"}
        return {name: torch.load(path, weights_only=True)["global_step"] for name, path in files.items()}

    whole = run("whole")
    assert run("run", end) != whole
    assert run("run") == whole


# --- times of saves --------------------------------------------------------------------------------------------------


def score(step):
    """Return the ``val_loss`` of the weights after ``step`` optimizer steps: a different number for each step."""
    return float((step * 7) % 23)


class Scored(Regression):
    """Logs the score of the current weights in each validation, and records the order of events."""

    def __init__(self, manual=False):
        super().__init__(make_net(dropout=0.2), partial(torch.optim.SGD, lr=0.02, momentum=0.9))
        self.automatic_optimization = not manual
        self.layer, self.saved_models = self.net, {}
        self.events = UserList()  # not restored, because this class is not the user's
        self.losses = {}

    def training_step(self, batch, batch_idx):
        self.saved_models[batch_idx] = {name: value.detach().clone() for name, value in self.layer.state_dict().items()}
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        if self.automatic_optimization:
            return loss
        manual_step(self, loss)
        return {"loss": loss}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.events.append(("batch", self.trainer.global_step))
        self.losses[self.trainer.global_step] = outputs["loss"].item()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", score(self.trainer.global_step), batch_size=4)

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            self.events.append(("validation", self.trainer.global_step))

    def on_save_checkpoint(self, checkpoint):
        self.events.append(("save", self.trainer.global_step))


class Counts(ModelCheckpoint):
    """Overrides hooks and calls those of the base class."""

    def on_validation_end(self, *args):
        super().on_validation_end(*args)

    def on_train_epoch_end(self, *args):
        super().on_train_epoch_end(*args)


def killed_in(number):
    """Return a callback that simulates a kill in the validation with this number, counted from 1."""
    run, callback = Mock(side_effect=[*[None] * (number - 1), Killed]), Callback()
    callback.on_validation_batch_start = lambda trainer, *_: trainer.sanity_checking or run()
    return callback


def fit(folder, *callbacks, manual=False, batches=5, **arguments):
    """Fit in ``folder``, from ``ckpt_path`` if it is given. Returns the module, also after a simulated end."""
    ckpt_path, module = arguments.pop("ckpt_path", None), Scored(manual)
    torch.manual_seed(1)
    trainer = make_trainer(folder, callbacks=[*callbacks], enable_checkpointing=True, **{"max_epochs": 2} | arguments)
    with suppress(Killed, SIGTERMException):
        trainer.fit(module, loader_of(make_batches(batches)), loader_of(BATCHES[:1]), ckpt_path=ckpt_path)
    return module


def steps_of(events, every):
    """Return the steps that a monitored saver writes, with their scores."""
    saved, metric, waits = {}, None, False
    events = [event for event in events if event[0] != "save"]
    for (kind, step), (following, _) in pairwise([*events, ("end", 0)]):
        if kind == "validation":
            metric = score(step)
        is_due = kind == "batch" and step > 0 and step % every == 0 and step not in saved
        if is_due and (metric is None or following == "validation"):
            waits = True
        elif is_due or (kind == "validation" and waits and step not in saved):
            assert metric is not None
            saved[step], waits = metric, False
    return saved


def contents(folder):
    """Return the content of each checkpoint in ``folder``, without paths and the states of the run's own callbacks."""
    files = {path.name: torch.load(path, weights_only=True) for path in sorted(folder.glob("*.ckpt"))}
    keys = ("epoch", "global_step", "state_dict", "optimizer_states")
    return {name: {key: file[key] for key in keys} for name, file in files.items()}


@pytest.mark.filterwarnings("ignore:.*could not find the monitored key")  # without a validation
@pytest.mark.parametrize(
    ("kind", "every", "manual", "arguments"),
    [
        (ModelCheckpoint, 2, False, {"val_check_interval": 2, "check_val_every_n_epoch": None}),
        (Counts, 1, False, {"val_check_interval": 3, "accumulate_grad_batches": 2}),
        (ModelCheckpoint, 5, True, {}),
        (Counts, 2, True, {"val_check_interval": 0.4}),
        (ModelCheckpoint, 5, False, {"check_val_every_n_epoch": 2, "max_epochs": 4}),
        (ModelCheckpoint, 1, True, {"val_check_interval": timedelta(microseconds=1)}),
        (ModelCheckpoint, 4, False, {"limit_val_batches": 0, "max_epochs": 2}),
    ],
)
def test_score_is_that_of_the_validation_after_the_same_batch(tmp_path, kind, every, manual, arguments):
    saver = kind(tmp_path / "kept", monitor="val_loss", save_top_k=-1, every_n_train_steps=every, filename="{step}")
    expected = steps_of(fit(tmp_path, saver, manual=manual, **arguments).events, every)
    found = {int(Path(path).stem.removeprefix("step=")): value.item() for path, value in saver.best_k_models.items()}
    assert found == expected
    for name, file in contents(tmp_path / "kept").items():
        assert name == f"step={file['global_step']}.ckpt"
    assert bool(expected) == ("limit_val_batches" not in arguments)


@pytest.mark.parametrize(
    ("options", "waits", "manual"),
    [
        ({"every_n_train_steps": 2}, False, True),
        ({"every_n_train_steps": 2, "monitor": "loss"}, True, False),
        ({"every_n_train_steps": 2, "monitor": "step", "mode": "max"}, False, False),
        ({"train_time_interval": timedelta(0), "monitor": "loss"}, False, True),
    ],
)
def test_only_monitored_saves_by_steps_are_postponed(tmp_path, options, waits, manual):
    saver = ModelCheckpoint(tmp_path / "kept", save_top_k=-1, **options)
    events = fit(tmp_path, saver, manual=manual, batches=4, val_check_interval=2, max_epochs=2).events
    saved = [before for before, event in pairwise(events) if event[0] == "save"]
    steps = range(1, 9) if "train_time_interval" in options else range(2, 9, 2)
    assert saved == [("validation" if waits else "batch", step) for step in steps]


METHODS = ("_monitor_candidates", "on_train_batch_end", "on_train_epoch_end", "on_validation_end")


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_methods_are_replaced_on_the_savers_of_the_run_until_its_end(tmp_path, error):
    def end(*_):
        replaced.append([sorted(set(vars(one)) & set(METHODS)) for one in (saver, other)])
        if error is not None:
            raise error

    def add(trainer, _):
        trainer.callbacks.append(other)  # in a hook

    saver, other, stranger = (ModelCheckpoint(tmp_path / name, every_n_train_steps=1) for name in "abc")
    given, replaced = [vars(ModelCheckpoint)[name] for name in METHODS], []
    with suppress(RuntimeError):
        fit(tmp_path, saver, LambdaCallback(on_fit_start=add, on_train_end=end, on_train_batch_end=error and end))
    assert replaced == [[sorted(METHODS)] * 2]
    assert not any(set(vars(one)) & set(METHODS) for one in (saver, other, stranger))
    assert all(given[i].__module__ == ModelCheckpoint.__module__ for i in range(4))
    assert [vars(ModelCheckpoint)[name] for name in METHODS] == given


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("manual", [False, True])
def test_lightnings_trainer_saves_as_without_ours(tmp_path, manual):
    """So does a saver with its own ``on_train_batch_end``, with our Trainer, too."""

    class Overrides(ModelCheckpoint):
        def on_train_batch_end(self, *args):
            super().on_train_batch_end(*args)

    class OnTheInstance(ModelCheckpoint):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.on_train_batch_end = partial(ModelCheckpoint.on_train_batch_end, self)

    def save(make, kind):
        saver = kind(
            tmp_path / make.__module__ / kind.__name__, monitor="val_loss", save_top_k=-1, every_n_train_steps=2
        )
        options = {"val_check_interval": 2, "max_epochs": 1, "logger": False, "enable_progress_bar": False}
        trainer = make(accelerator="cpu", callbacks=[saver], enable_model_summary=False, **options)
        trainer.fit(Scored(manual), loader_of(make_batches(5)), loader_of(BATCHES[:1]))
        return [value.item() for value in saver.best_k_models.values()]

    stale = [score(2)] * 2  # the weights of step 4 with the metric of step 2
    assert save(Trainer, ModelCheckpoint) == [score(2), score(4)]
    assert save(lightning.Trainer, ModelCheckpoint) == stale
    assert save(Trainer, Overrides) == save(Trainer, OnTheInstance) == stale


def test_score_of_a_training_metric_is_that_of_its_batch(tmp_path):
    saver = ModelCheckpoint(tmp_path / "kept", monitor="loss", save_top_k=-1, every_n_train_steps=2, filename="{step}")
    module = fit(tmp_path, saver, val_check_interval=2, check_val_every_n_epoch=None)
    scores = {int(Path(path).stem.removeprefix("step=")): value.item() for path, value in saver.best_k_models.items()}
    assert scores == {step: module.losses[step] for step in range(2, 11, 2)}


@pytest.mark.parametrize("validates", [True, False])
def test_metric_that_is_never_logged_is_reported_after_an_epoch(tmp_path, validates):
    """Also for saves by steps, which wait for the metric."""
    name = f"missing_{validates}"  # Lightning warns once for each text
    saver = ModelCheckpoint(tmp_path, monitor=name, every_n_train_steps=2)
    given = {"callbacks": [saver], "enable_checkpointing": True, "limit_val_batches": float(validates)}
    trainer, message = make_trainer(tmp_path, max_epochs=3, **given), f"monitor='{name}'.*could not find"
    raises = partial(pytest.raises, MisconfigurationException) if validates else partial(pytest.warns, UserWarning)
    with raises(match=message):
        trainer.fit(Scored(), loader_of(BATCHES), loader_of(BATCHES[:2]))
    assert trainer.current_epoch == (0 if validates else 3)


def savers(folder, order):
    """Return a saver that waits for validations, one that does not, and one of the ends of epochs, in this order."""
    kinds = {
        "w": {"monitor": "val_loss", "save_top_k": 2, "every_n_train_steps": 2, "save_last": True},
        "n": {"save_top_k": -1, "every_n_train_steps": 2},
        "e": {"monitor": "val_loss", "save_top_k": 2, "every_n_epochs": 1},
    }
    return [Counts(folder / "kept" / kind, filename="{step}", **kinds[kind]) for kind in order]


@pytest.mark.parametrize(
    ("order", "manual", "killed", "arguments"),
    [
        ("wn", False, 2, {"val_check_interval": 2}),
        ("nw", True, 5, {"val_check_interval": 2, "check_val_every_n_epoch": None}),
        ("ewn", True, 1, {}),
        ("wne", False, 3, {"val_check_interval": 2, "accumulate_grad_batches": 2, "precision": "bf16-mixed"}),
    ],
)
def test_kill_in_a_validation_changes_no_file(tmp_path, order, manual, killed, arguments):
    def run(name, *callbacks):
        options = {"manual": manual, "batches": 6, "resume": "auto", **arguments}
        events = fit(tmp_path / name, *callbacks, *savers(tmp_path / name, order), **options).events
        return events, [contents(tmp_path / name / "kept" / kind) for kind in order]

    whole, expected = run("whole")
    run("run", killed_in(killed))
    resumed, files = run("run")
    assert whole[-len(resumed) :] == resumed
    assert [list(kept) for kept in files] == [list(kept) for kept in expected]
    assert differences(files, expected) == []


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize(
    ("options", "interval"),
    [
        ({"every_n_train_steps": 2, "monitor": "val_loss", "save_last": True}, 2),
        ({"train_time_interval": timedelta(0), "save_last": "link"}, 3),
        ({"every_n_epochs": 1, "save_on_train_epoch_end": True, "save_last": True}, 2),
        ({"every_n_epochs": 1, "save_on_train_epoch_end": False, "monitor": "val_loss"}, 3),
    ],
)
def test_manual_optimization_saves_as_automatic_optimization_does(tmp_path, options, interval):
    def save(manual, ckpt_path=None):
        folder = tmp_path / f"{manual}-{ckpt_path and ckpt_path.stem}"
        saver = Counts(folder / "kept", save_top_k=-1, filename="{step}", **options)
        module = fit(folder, saver, manual=manual, ckpt_path=ckpt_path, val_check_interval=interval, max_epochs=2)
        return module, contents(folder / "kept")

    (module, files), (automatic, expected) = save(manual=True), save(manual=False)
    assert module.events == automatic.events
    assert list(files) == list(expected)
    assert differences(files, expected) == []
    for name in sorted(set(files) - {"last.ckpt"})[::3]:
        _, rest = save(True, tmp_path / "True-None" / "kept" / name)
        later = {other: file for other, file in files.items() if file["global_step"] > files[name]["global_step"]}
        assert differences({other: rest[other] for other in later}, later) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"monitor": "acc", "mode": "max", "save_last": True}, {"monitor": "val_loss"}),
        ({"monitor": "val_loss", "save_last": True}, {"monitor": "acc", "mode": "max", "save_last": "link"}),
        ({"monitor": "acc", "save_on_train_epoch_end": True}, {"monitor": "val_loss", "save_on_train_epoch_end": True}),
        ({"every_n_train_steps": 2, "save_last": True}, {"every_n_train_steps": 1}),
    ],
)
def test_each_file_has_the_states_of_all_savers_after_its_hook(tmp_path, first, second):
    """All names collide, because the savers share a folder."""
    found = []

    class Values(Regression):
        def validation_step(self, batch, batch_idx):
            epoch = self.trainer.current_epoch
            self.log_dict(
                batch_size=4, dictionary={"acc": [0.2, 0.6, 0.5, 0.7][epoch], "val_loss": [0.5, 0.45, 0.4, 0.42][epoch]}
            )

    class Reads(Callback):
        def compare(self, trainer):
            savers = {saver.state_key: saver.state_dict() for saver in trainer.checkpoint_callbacks}
            for file in (tmp_path / "kept").glob("*.ckpt"):
                checkpoint = torch.load(file, weights_only=True)
                if checkpoint["global_step"] == trainer.global_step:
                    found.append(file)
                    if "last" in file.name:
                        assert checkpoint["callbacks"] == savers
                    for key, state in savers.items():  # a file is written before the last one of the same saver
                        for one in (state, checkpoint["callbacks"][key]):
                            assert one["best_model_path"] in ("", *map(str, (tmp_path / "kept").glob("*.ckpt")))
                        assert checkpoint["callbacks"][key] == state

        def on_train_epoch_start(self, trainer, module):
            self.compare(trainer)

    callbacks = [Reads(), *(ModelCheckpoint(tmp_path / "kept", **options) for options in (first, second))]
    trainer = make_trainer(tmp_path, callbacks=callbacks, enable_checkpointing=True, max_epochs=4)
    trainer.fit(Values(), loader_of(make_batches(2)), loader_of(make_batches(1)))
    Reads().compare(trainer)
    assert len(found) >= 4
