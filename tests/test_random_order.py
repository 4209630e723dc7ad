"""Random numbers are drawn at the same points as in Lightning: the generators' states at each hook and step are equal.

Each hook draws, too, so that additional draws before or after it are detected.
"""

import inspect
import random
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.parity import (
    CALLBACK_HOOKS,
    CLASSES,
    FEATURES,
    MODULE_HOOKS,
    Classifier,
    lightning,
    lightnings_noise_ignored,
    ours,
    run_both,
    weights,
)
from tests.support import tiered
from trainer.state import random_states

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's CombinedLoader on torch 2.15
    pytest.mark.filterwarnings("ignore:Your `[a-z]*_dataloader`'s sampler has shuffling enabled"),
    pytest.mark.filterwarnings("ignore:You requested to overfit"),
]

Trace = list[tuple[str, int]]


def states():
    """Return a digest of the states of the generators of the process."""
    return hash(repr(random_states.capture()))


def drawing(base, names, owner):
    """Return a subclass of ``base`` with methods that append the generators' states to ``instance.trace``, and draw."""

    def make(name):
        original = getattr(base, name)

        def method(self, *args, **kwargs):
            self.trace.append((f"{owner}.{name}", states()))
            torch.rand(1), np.random.rand(), random.random()
            return original(self, *args, **kwargs)

        method.__name__ = name
        method.__signature__ = inspect.signature(original)
        return method

    return type(f"Drawing{base.__name__}", (base,), {name: make(name) for name in names if hasattr(base, name)})


class Samples(Dataset[Any]):
    """Random samples."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.rand(FEATURES) + np.random.rand() + random.random() + index, index % CLASSES


class Stream(IterableDataset[Any]):
    """The same samples without a length, with a draw at the start of the iteration."""

    def __init__(self, count):
        self.samples = Samples(count)

    def __iter__(self):
        start = torch.randint(100, ()).item()
        for index in range(len(self.samples)):
            yield self.samples[start + index]


def loader(count=6, **options):
    return DataLoader(Samples(count), batch_size=2, **options)


def stream(count=6, **options):
    return DataLoader(Stream(count), batch_size=2, **options)


class Several(Classifier):
    """Accepts several evaluation dataloaders."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return self.loss(batch)

    test_step = predict_step = validation_step


class Model(drawing(Several, MODULE_HOOKS, "module")):
    """Draws in every hook; optionally uses ``dataloader_iter``, and reads the estimated length of the fit."""

    def __init__(self, trace, estimates=False):
        super().__init__()
        self.trace, self.estimates = trace, estimates

    def loss(self, batch):
        parts = [*batch.values()] if isinstance(batch, dict) else batch if isinstance(batch[0], list) else [batch]
        return sum(super(Model, self).loss(part) for part in parts if part is not None)

    def configure_optimizers(self):
        if self.estimates:
            assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class Drawer(Model):
    """Uses ``dataloader_iter`` in its steps."""

    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)

    def validation_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().validation_step(batch, batch_idx)


def check(run, kind=Model, **module):
    """Check that ``run(make_trainer, model)`` draws the same numbers at the same points under both Trainers."""

    def scenario(make):
        random.seed(1)
        np.random.seed(1)
        trace = []
        callback = drawing(Callback, CALLBACK_HOOKS, "callback")()
        callback.trace = trace
        model = kind(trace, **module)
        run(lambda **arguments: make(callbacks=[callback], **arguments), model)
        return trace, weights(model)

    (theirs, their_weights), (mine, my_weights) = run_both(scenario)
    assert [entry[0] for entry in mine] == [entry[0] for entry in theirs]
    for number, (a, b) in enumerate(zip(theirs, mine, strict=True)):
        assert a == b, f"call {number}, {a[0]}"
    assert all(map(torch.equal, their_weights, my_weights))


TRAIN = {
    "in order": loader,
    "shuffled": lambda: loader(shuffle=True),
    "its own generator": lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(5)),
    "workers": lambda: loader(shuffle=True, num_workers=1),
    "persistent workers": lambda: loader(shuffle=True, num_workers=2, persistent_workers=True),
    "stream": stream,
    "stream with a worker": lambda: stream(num_workers=1),
    "two": lambda: {"a": loader(shuffle=True), "b": loader(4, shuffle=True)},
    "two, one a stream": lambda: {"a": loader(shuffle=True), "b": stream(4)},
    "the shorter of two": lambda: CombinedLoader({"a": loader(shuffle=True), "b": loader(8)}, "min_size"),
}

FIT = {
    "plain": {},
    "sanity check of all": {"num_sanity_val_steps": -1},
    "reloading": {"reload_dataloaders_every_n_epochs": 1},
    "validating after each": {"val_check_interval": 1},
    "accumulating": {"accumulate_grad_batches": 3},
    "overfitting": {"overfit_batches": 2},
    "stopping": {"max_steps": 4},
}


class Data(LightningDataModule):
    """Creates its dataloaders at each request, and draws then."""

    def __init__(self, train, val=lambda: loader(4, shuffle=True)):
        super().__init__()
        self.train, self.val = train, val

    def train_dataloader(self):
        torch.rand(1)
        return self.train()

    def val_dataloader(self):
        torch.rand(1)
        return self.val()

    test_dataloader = predict_dataloader = val_dataloader


def fit_of(data, **arguments):
    return lambda make, model: make(**{"max_epochs": 2, **arguments}).fit(model, datamodule=Data(TRAIN[data]))


def kinds(names):
    """Parametrize a test by kinds of data; workers are processes, which ``scripts/test`` does not start."""
    names = list(names)
    return pytest.mark.parametrize("data", tiered(names, quick=[name for name in names if "worker" not in name]))


@kinds(TRAIN)
def test_fit_of_any_data(data):
    check(fit_of(data, reload_dataloaders_every_n_epochs=int("worker" not in data)))


@pytest.mark.parametrize("setting", FIT)
def test_any_fit(setting):
    check(fit_of("two", **FIT[setting]))


VAL = {
    "workers": lambda: loader(4, shuffle=True, num_workers=1),
    "stream": lambda: stream(4),
    "several": lambda: [loader(4, shuffle=True), loader(2), loader(6, shuffle=True)],
    "several, one a stream": lambda: [loader(4), stream(4)],
    "side by side": lambda: CombinedLoader([loader(4, shuffle=True), loader(2)], "max_size"),
}


@pytest.mark.parametrize(
    ("data", "command"),
    [
        ("stream", "fit"), ("several", "validate"), ("several, one a stream", "fit"), ("several", "predict"),
        ("side by side", "fit"), ("side by side", "test"), pytest.param("workers", "fit", marks=pytest.mark.whole),
    ],
)  # fmt: skip
def test_evaluation(data, command):
    def run(make, model):
        trainer = make(max_epochs=2, val_check_interval=2 if command == "fit" else None)
        getattr(trainer, command)(model, datamodule=Data(TRAIN["shuffled"], VAL[data]))

    check(run)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
@kinds(["stream", "two"])
def test_steps_that_draw_their_own_batches(data):
    limit = 0 if data == "stream" else None  # a validation follows the stream, but not in Lightning
    check(fit_of(data, limit_val_batches=limit), kind=Drawer)


def test_second_fit_opens_another_pass():
    def run(make, model):
        trainer, source = make(max_epochs=1), Data(TRAIN["shuffled"])
        trainer.fit(model, datamodule=source)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(model, datamodule=source)

    check(run)


@kinds(["shuffled", "stream"])
def test_estimate_of_the_fits_length_opens_the_first_pass(data):
    check(fit_of(data), estimates=True)


@kinds(["shuffled", "stream"])
def test_resuming_a_checkpoint_of_lightning(data, tmp_path):
    first = lightning(max_epochs=1)
    with lightnings_noise_ignored():
        first.fit(Model([]), datamodule=Data(TRAIN[data]))
    first.save_checkpoint(tmp_path / "first.ckpt")

    def run(make, model):
        make(max_epochs=3).fit(model, datamodule=Data(TRAIN[data]), ckpt_path=tmp_path / "first.ckpt")

    check(run)


@pytest.mark.parametrize(
    ("data", "hook"),
    [
        ("shuffled", "on_train_start"), ("its own generator", "on_train_epoch_start"), ("stream", "on_train_start"),
        pytest.param("persistent workers", "on_train_start", marks=pytest.mark.whole),
    ],
)  # fmt: skip
def test_resume_from_before_the_first_batch_is_exact(data, hook, tmp_path):
    path, saves = tmp_path / "start.ckpt", Checkpoint()
    setattr(saves, hook, lambda trainer, *_: trainer.current_epoch or trainer.save_checkpoint(path))
    whole, resumed = Classifier(), Classifier()
    for seed, module, more in ((1, whole, {"callbacks": saves, "enable_checkpointing": True}), (2, resumed, {})):
        torch.manual_seed(seed)
        trainer = ours(max_epochs=2, num_sanity_val_steps=0, **more)
        trainer.fit(module, TRAIN[data](), loader(4, shuffle=True), ckpt_path=None if more else path)
    assert all(map(torch.equal, weights(resumed), weights(whole)))
