"""A run started by one Trainer and resumed by the other: the same hooks, weights and counters."""

import warnings
from collections import UserList
from functools import partial, partialmethod

import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.parity import MAKERS, Classifier, assert_same_weights, data, lightning, ours
from tests.support import manual_step, tiered


@pytest.fixture(autouse=True)
def _without_noise():
    with warnings.catch_warnings(action="ignore"):
        yield


class Diary(Classifier):
    """Records hooks, and has schedules of each kind. All batches are equal, because Lightning repeats them."""

    def __init__(self, by_hand=False, watches=False):
        super().__init__(momentum=0.9)
        self.automatic_optimization = not by_hand
        self.watches = watches
        self.entries = UserList()  # not restored, because this class is not the user's

    def note(self, what, *more):
        self.entries.append((what, self.current_epoch, self.global_step, *more))

    on_train_start = partialmethod(note, "train")
    on_train_epoch_start = partialmethod(note, "epoch start")
    on_train_epoch_end = partialmethod(note, "epoch end")

    def training_step(self, batch, batch_idx):
        self.note("batch", batch_idx)
        loss = self.loss(batch)
        if not self.automatic_optimization:
            manual_step(self, loss)
        return loss

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.note("validation", batch_idx)
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        lr = torch.optim.lr_scheduler
        return [optimizer], [
            {"scheduler": lr.StepLR(optimizer, 3, 0.5), "interval": "step"},
            lr.ExponentialLR(optimizer, 0.9),
            *([{"scheduler": lr.ReduceLROnPlateau(optimizer), "monitor": "val_loss"}] if self.watches else []),
        ]


def same_batches(number):
    features, labels = next(iter(data(2)))
    return DataLoader(TensorDataset(features.repeat(number, 1), labels.repeat(number)), batch_size=2)


def write(make, folder, module, options, **arguments):
    saver = ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}-{step}", **options)
    trainer = make(callbacks=[saver], enable_checkpointing=True, default_root_dir=folder, **arguments)
    trainer.fit(module(), same_batches(4), same_batches(2))
    trainer.save_checkpoint(folder / "end.ckpt")


def resume(make, path, module, **arguments):
    trainer, module = make(default_root_dir=path.parent, **arguments), module()
    trainer.fit(module, same_batches(4), same_batches(2), ckpt_path=path)
    rates = [config.scheduler.get_last_lr() for config in trainer.lr_scheduler_configs]
    counters = trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop._batches_that_stepped
    return module, (module.entries, rates, counters)


RUNS = {
    "epoch ends": (partial(Diary, watches=True), {}, {}, ("epoch=0-step=4", "epoch=1-step=8", "end")),
    "validations": (Diary, {}, {"val_check_interval": 0.5}, ("epoch=0-step=2", "epoch=1-step=6", "epoch=1-step=8")),
    "manual": (
        partial(Diary, by_hand=True), {"every_n_train_steps": 1}, {}, ("epoch=0-step=3", "epoch=1-step=6", "end")
    ),
    "windows": (Diary, {"every_n_train_steps": 1}, {"accumulate_grad_batches": 2}, ("epoch=0-step=1", "end")),
    "steps": (
        Diary, {"save_on_train_epoch_end": True}, {"max_epochs": -1, "max_steps": 6, "num_sanity_val_steps": 0},
        ("epoch=1-step=6",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", tiered(RUNS, quick=["windows", "manual"]))
def test_both_trainers_resume_checkpoints_of_the_other(tmp_path, name):
    module, options, arguments, files = RUNS[name]
    for make in MAKERS:
        write(make, tmp_path / make.__name__, module, options, **{"max_epochs": 2, **arguments})
    counted = ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.state_dict")
    longer = {**arguments, "max_steps": 11} if "max_steps" in arguments else {**arguments, "max_epochs": 3}
    for file in files:
        loops = [
            torch.load(tmp_path / make.__name__ / f"{file}.ckpt", weights_only=True)["loops"]["fit_loop"]
            for make in MAKERS
        ]
        assert {k: loops[0][k] for k in counted} == {k: loops[1][k] for k in counted}, file
        theirs, expected = resume(lightning, tmp_path / "lightning" / f"{file}.ckpt", module, **longer)
        for writer, reader in (("lightning", ours), ("ours", lightning), ("ours", ours)):
            mine, seen = resume(reader, tmp_path / writer / f"{file}.ckpt", module, **longer)
            assert seen == expected, (file, writer, reader.__name__)
            assert_same_weights(theirs, mine)


# --- Lightning's checkpoints from the end of a batch ------------------------------------------------------------------


class Averaged(Diary):
    def configure_callbacks(self):
        return [callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1)]

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Scheduled(Diary):
    def configure_callbacks(self):
        return [callbacks.GradientAccumulationScheduler({0: 2, 2: 4})]


@pytest.mark.parametrize(
    ("module", "name"),
    [(partial(Diary, watches=True), "epoch=0-step=4"), (Averaged, "epoch=0-step=2"), (Scheduled, "epoch=1-step=3")],
)
def test_rest_of_a_batch_and_of_an_epoch_follows(tmp_path, module, name):
    write(lightning, tmp_path, module, {"every_n_train_steps": 1}, max_epochs=2)
    whole = module()
    ours(max_epochs=3).fit(whole, same_batches(4), same_batches(2))
    resumed, (entries, *_) = resume(ours, tmp_path / f"{name}.ckpt", module, max_epochs=3)
    assert entries[1:] == whole.entries[-len(entries[1:]) :]
    assert_same_weights(whole, resumed)


# --- checkpoints of older versions ------------------------------------------------------------------------------------

RENAMED = {
    ".automatic_optimization.": ".batch_loop.optimizer_loop.",
    ".manual_optimization.": ".batch_loop.manual_loop.",
    "val_loop.batch_progress": "val_loop.epoch_loop.batch_progress",
}
"""Parts of the names of loops since Lightning 2.0, and before."""


@pytest.mark.parametrize(
    ("version", "name"), [("1.9.5", "epoch=0-step=4"), ("1.9.5", "epoch=1-step=6"), ("1.5.10", "epoch=0-step=4")]
)
def test_run_of_an_older_lightning_is_resumed(tmp_path, version, name):
    write(lightning, tmp_path, Diary, {"every_n_train_steps": 2} if version == "1.9.5" else {}, max_epochs=2)
    checkpoint = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
    checkpoint["pytorch-lightning_version"] = version
    if version == "1.5.10":  # which stored the next epoch, and no loops
        checkpoint["epoch"] += 1
        del checkpoint["loops"]
    else:
        loop = checkpoint["loops"]["fit_loop"]
        for new, old in RENAMED.items():
            loop = {key.replace(new, old): value for key, value in loop.items()}
        checkpoint["loops"]["fit_loop"] = loop
    torch.save(checkpoint, tmp_path / "old.ckpt")
    expected = resume(ours, tmp_path / f"{name}.ckpt", Diary, max_epochs=3)
    resumed = resume(ours, tmp_path / "old.ckpt", Diary, max_epochs=3)
    assert resumed[1] == expected[1]
    assert_same_weights(expected[0], resumed[0])


# --- an epoch ended by max_steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loader", "after_fit"), [(DataLoader, False), (DataLoader, True), (StatefulDataLoader, True)])
def test_run_by_steps_is_resumed_inside_its_epoch(tmp_path, loader, after_fit):
    def fit(module, path=None, **arguments):
        trainer = ours(**{"max_epochs": -1, **arguments})
        trainer.fit(module, loader(data(8).dataset, 2), same_batches(2), ckpt_path=path)
        return trainer

    module, resumed, by_epochs, file = Diary(), Diary(), Diary(), tmp_path / "left.ckpt"
    fit(module, max_steps=7)
    saver = ModelCheckpoint(tmp_path, filename="left", save_on_train_epoch_end=True)
    first = fit(Diary(), max_steps=6, callbacks=[saver], enable_checkpointing=True)
    if after_fit:
        first.save_checkpoint(file)
    fit(resumed, file, max_steps=7)
    assert resumed.entries == [("train", 1, 6), *module.entries[-2:]]
    assert resumed.entries[1] == ("batch", 1, 6, 2)
    assert_same_weights(module, resumed)
    fit(by_epochs, file, max_epochs=3)
    assert by_epochs.entries[:2] == [("train", 2, 6), ("epoch start", 2, 6)]


# --- an interrupted validation ----------------------------------------------------------------------------------------


class Failing(Diary):
    """Fails once in a batch of the first validation after ``steps`` optimizer steps."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def validation_step(self, batch, batch_idx):
        if self.global_step == self.steps and batch_idx == 1 and not self.trainer.sanity_checking:
            self.steps = -1
            raise ArithmeticError("in a validation")
        return super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("writer", MAKERS)
@pytest.mark.parametrize(("interval", "steps"), [(0.5, 2), (1.0, 4)])
def test_validation_that_failed_is_run_again(tmp_path, writer, interval, steps):
    arguments = {"max_epochs": 2, "val_check_interval": interval, "num_sanity_val_steps": 0}
    whole, module = ours(**arguments), Diary()
    whole.fit(module, same_batches(4), same_batches(3))
    saver = callbacks.OnExceptionCheckpoint(tmp_path)
    failing = writer(**arguments, callbacks=[saver], enable_checkpointing=True, default_root_dir=tmp_path)
    with pytest.raises(ArithmeticError):
        failing.fit(Failing(steps), same_batches(4), same_batches(3))
    trainer, resumed = ours(**arguments), Diary()
    trainer.fit(resumed, same_batches(4), same_batches(3), ckpt_path=tmp_path / "on_exception.ckpt")
    again = next(i for i, entry in enumerate(module.entries) if entry[0] == "validation" and entry[2] == steps)
    assert [entry for entry in resumed.entries if entry[0] != "train"] == module.entries[again:]
    assert_same_weights(module, resumed)
    theirs, mine = (one.fit_loop.epoch_loop.val_loop.batch_progress for one in (whole, trainer))
    assert (mine.total.completed, mine.current, mine.is_last_batch) == (theirs.total.completed, theirs.current, True)


# --- dataloaders with a state -----------------------------------------------------------------------------------------


class StatefulCounter:
    """Yields ten numbers from ``start``."""

    def __init__(self, start=0):
        self.next = start

    def __len__(self):
        return 10

    def __iter__(self):
        for _ in range(len(self)):
            self.next += 1
            yield torch.tensor([float(self.next)])

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Reader(Diary):
    def training_step(self, batch, batch_idx):
        self.entries.append(([float(part) for part in torch.utils._pytree.tree_leaves(batch)], batch_idx))
        return self(torch.ones(1, 4)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "loaders", [StatefulCounter, lambda: CombinedLoader([StatefulCounter(3), StatefulCounter(1)]), list]
)
def test_stateful_dataloaders_resume_at_their_position(tmp_path, loaders):
    seen = []
    for make in MAKERS:
        path = tmp_path / f"{make.__name__}.ckpt"
        first, module = make(max_steps=2), Reader()
        first.fit(module, loaders())
        first.save_checkpoint(path)
        second, resumed = make(max_steps=4), Reader()
        second.fit(resumed, loaders(), ckpt_path=path)
        states = torch.load(path, weights_only=True)["loops"]["fit_loop"]["state_dict"]
        batches = [entry[0] for entry in module.entries + resumed.entries if isinstance(entry[0], list)]
        seen.append((states, batches))
    assert seen[0] == seen[1]
    assert len(seen[1][1]) == (0 if loaders is list else 4)
