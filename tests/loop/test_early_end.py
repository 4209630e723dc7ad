"""Epochs with fewer batches than the length of their dataloaders equal epochs with the correct length."""

from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from tests.support import (
    SMALL,
    Regression,
    SavesEverywhere,
    assert_identical,
    loader_of,
    loss_of,
    make_batches,
    make_trainer,
    native_fp16,
)
from trainer.callbacks import GradientAccumulation

pytestmark = pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")


class Stream(IterableDataset):
    """Yields ``counts[epoch]`` batches, and reports ``length``. The last count is repeated in later epochs."""

    def __init__(self, batches, length, counts):
        self.batches, self.length, self.counts, self.epoch = batches, length, counts, -1

    def __len__(self):
        return self.length

    def __iter__(self):
        self.epoch += 1
        return iter(self.batches[: self.counts[min(self.epoch, len(self.counts) - 1)]])


class Loader(Stream):
    """A custom loader: an iterable over batches with a length."""


class Batches(BatchSampler):
    """A batch sampler with a length that is an estimate."""

    def __init__(self, length, counts):
        super().__init__(SequentialSampler(range(4 * length)), 4, drop_last=False)
        self.length, self.counts, self.epoch = length, counts, -1

    def __len__(self):
        return self.length

    def __iter__(self):
        self.epoch += 1
        count = self.counts[min(self.epoch, len(self.counts) - 1)]
        return iter([[*range(4 * i, 4 * i + 4)] for i in range(count)])


def iterable_dataset(batches, length, counts):
    return DataLoader(Stream(batches, length, counts), batch_size=None)


def batch_sampler(batches, length, counts):
    x, y = (torch.cat([batch[i] for batch in batches]) for i in (0, 1))
    gains = torch.stack([batch[2] for batch in batches]).repeat_interleave(4)[:, None]
    return DataLoader(TensorDataset(x, y, gains), batch_sampler=Batches(length, counts))


def min_size(batches, length, counts):
    members = {"a": iterable_dataset(batches, length, counts), "b": DataLoader(batches * 2, batch_size=None)}
    return CombinedLoader(members, "min_size")


LOADERS = {
    "IterableDataset": iterable_dataset,
    "batch sampler": batch_sampler,
    "min_size": min_size,
    "iterable": Loader,
}


class Module(Regression):
    """Logs its loss, of a batch of any loader here, and that of a validation, for schedules and checkpoints."""

    def training_step(self, batch, batch_idx):
        batch = batch["a"] if isinstance(batch, dict) else batch
        x, y, gain = batch
        loss = loss_of(self.net, [x, y, gain.reshape(-1)[0]])
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=4)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", loss_of(self.net, batch), batch_size=4)


class Steps(Module):
    """Steps its optimizer itself in a hook."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)


class Events(Callback):
    """Records batches, validations, epochs and optimizer steps, with metrics and learning rates."""

    def __init__(self):
        self.batches, self.validations, self.epochs, self.steps = [], [], [], []

    def on_train_batch_end(self, trainer, *_):
        self.batches.append(trainer.current_epoch)

    def on_validation_end(self, trainer, *_):
        if not trainer.sanity_checking:
            seen = len(self.batches), trainer.global_step, trainer.current_epoch
            self.validations.append((*seen, float(trainer.callback_metrics["val_loss"])))

    def on_train_epoch_end(self, trainer, *_):
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.epochs.append((trainer.global_step, trainer.is_last_batch, metrics))

    def on_after_optimizer_step(self, trainer, module, optimizer, outcome):
        self.steps.append((optimizer.param_groups[0]["lr"], outcome.skipped))


def ran(folder, loader, module, **arguments):
    """Run a fit. Returns its events, schedules, checkpoints, counters and weights."""
    events, more, ckpt_path = Events(), arguments.pop("callbacks", []), arguments.pop("ckpt_path", None)
    step_saver = ModelCheckpoint(folder / "steps", save_top_k=-1, every_n_train_steps=2)
    end_saver = ModelCheckpoint(folder / "ends", save_top_k=-1, monitor="val_loss")
    arguments = {"max_epochs": 3, "enable_checkpointing": True, **arguments}
    trainer = make_trainer(folder, callbacks=[events, step_saver, end_saver, *more], **arguments)
    trainer.fit(module, loader, loader_of(make_batches(2, seed=5)), ckpt_path=ckpt_path)
    schedules = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    return {
        **vars(events),
        "schedules": [{k: v for k, v in one.items() if not callable(v)} for one in schedules],
        "files": sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.ckpt")),
        "counters": (trainer.global_step, trainer.current_epoch, trainer.progress.updates, trainer.progress.batches),
        "weights": [p.detach().clone() for p in module.parameters()],
    }


class Manual(Module):
    """Manual optimization with a step every second batch."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx) / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class Draws(Module):
    """Uses ``dataloader_iter``."""

    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


lbfgs = partial(torch.optim.LBFGS, lr=0.1, max_iter=3)
plateau = partial(ReduceLROnPlateau, patience=0, threshold=1e9, factor=0.5)
every_step = partial(StepLR, step_size=1, gamma=0.5)
by_steps, WINDOW = partial(Module, interval="step"), {"accumulate_grad_batches": 4}


@pytest.mark.parametrize(
    ("loader", "make_module", "arguments"),
    [
        ("IterableDataset", lambda: Module(schedule=every_step), {}),
        ("batch sampler", lambda: Module(schedule=plateau, monitor="val_loss"), {"val_check_interval": 3}),
        ("min_size", lambda: Module(schedule=every_step), {"accumulate_grad_batches": 4}),
        ("iterable", lambda: Steps(schedule=every_step), {"accumulate_grad_batches": 4}),
        ("batch sampler", lambda: by_steps(schedule=every_step), WINDOW | {"precision": native_fp16(**SMALL)}),
        ("IterableDataset", lambda: by_steps(schedule=plateau, monitor="loss"), WINDOW | {"precision": "bf16-mixed"}),
        ("batch sampler", Module, {"check_val_every_n_epoch": 2, "limit_train_batches": 8}),
        ("IterableDataset", Module, {"max_steps": 13, "max_epochs": -1}),
        ("min_size", Module, {"check_val_every_n_epoch": None, "val_check_interval": 4}),
        ("IterableDataset", Module, {"callbacks": [GradientAccumulation(4, straddles_epochs=True)]}),
        ("IterableDataset", partial(Module, optimizer=lbfgs), {"accumulate_grad_batches": 4}),
        ("IterableDataset", Manual, {}),
        ("IterableDataset", lambda: Draws(schedule=every_step), {"accumulate_grad_batches": 4}),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument")
def test_end_of_the_data_is_the_end_of_the_epoch(tmp_path, loader, make_module, arguments):
    batches, make = make_batches(12, gains={1: 0.5}), LOADERS[loader]
    early = ran(tmp_path / "early", make(batches, 12, [6]), make_module(), **arguments)
    assert_identical(early, ran(tmp_path / "exact", make(batches, 6, [6]), make_module(), **arguments))
    assert early["validations"]


@pytest.mark.parametrize(
    ("arguments", "after"),
    [
        ({}, [7, 12, 12, 16]),
        ({"val_check_interval": 0.25}, [3, 6, 7, 10, 12, 12, 15, 16]),
        ({"val_check_interval": 5}, [5, 12]),  # no validation at the end of 12 batches, either
        ({"val_check_interval": 5, "check_val_every_n_epoch": None}, [5, 10, 15]),
        ({"limit_train_batches": 0.5, "val_check_interval": 0.5}, [3, 6, 9, 11, 11, 14, 15]),
        ({"check_val_every_n_epoch": 2}, [12, 16]),
    ],
)
@pytest.mark.filterwarnings("ignore:.* yielded no batch in epoch 2")
@pytest.mark.parametrize("loader", ["IterableDataset", "batch sampler"])
def test_validations_that_were_due_by_the_end_of_an_epoch(tmp_path, loader, arguments, after):
    """The epochs have different numbers of batches; one has none."""
    events = Events()
    trainer = make_trainer(tmp_path, max_epochs=4, callbacks=[events], **arguments)
    trainer.fit(Module(), LOADERS[loader](make_batches(12), 12, [7, 5, 0, 4]), loader_of(make_batches(1)))
    assert [validation[0] for validation in events.validations] == after
    assert (trainer.current_epoch, len(events.epochs)) == (4, 4)
    assert all(is_last for _, is_last, _ in events.epochs)


def test_additional_validation_if_the_window_was_open_at_the_last_one(tmp_path):
    events = Events()
    trainer = make_trainer(tmp_path, callbacks=[events], val_check_interval=2, accumulate_grad_batches=4)
    trainer.fit(Module(), iterable_dataset(make_batches(12), 12, [6]), loader_of(make_batches(1)))
    assert [validation[:2] for validation in events.validations] == [(2, 0), (4, 1), (6, 1), (6, 2)]
    assert events.validations[-1][-1] != events.validations[-2][-1]


@pytest.mark.filterwarnings("ignore:Resuming inside an epoch", "ignore:Checkpoint directory")
@pytest.mark.parametrize(
    ("loader", "make_module", "arguments"),
    [
        ("IterableDataset", lambda: Module(schedule=every_step), {"accumulate_grad_batches": 4}),
        ("batch sampler", lambda: Module(schedule=plateau, monitor="val_loss"), {"val_check_interval": 0.25}),
        ("min_size", lambda: Module(schedule=every_step, interval="step"), {"accumulate_grad_batches": 2}),
        ("IterableDataset", lambda: Steps(schedule=every_step), {"accumulate_grad_batches": 4}),
    ],
)
def test_resume_around_an_early_end_is_exact(tmp_path, loader, make_module, arguments):
    def run(*callbacks, **more):
        data, more = LOADERS[loader](make_batches(8), 8, [5]), {"callbacks": callbacks, **more}
        found = ran(tmp_path, data, make_module(), max_epochs=2, **arguments, **more)
        return found | {"files": ()}  # those of the whole run are there, too

    saver = SavesEverywhere(tmp_path / "saved")
    whole = run(saver)
    assert len(saver.files) >= 14
    for file in saver.files[::3]:
        assert_identical(run(ckpt_path=file), whole, file.name)
