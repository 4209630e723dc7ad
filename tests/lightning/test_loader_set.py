"""Dataloaders made ready: prepared by Lightning's connector, counted, limited, iterated."""

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset, TensorDataset

from tests.parity import DATAMODULE_HOOKS, Classifier, Learner, assert_agree, data, ours, recording, weights
from tests.support import stream_of
from trainer.data.batches import LoaderPlan
from trainer.data.unpadded import Span
from trainer.lightning.loaders import LoaderSet


def test_limit_of_an_unknown_length_promises_no_batches():
    """Ranks exchange the number of batches that all of them have."""
    found, stage = [], RunningStage.TESTING
    looks = LambdaCallback(on_test_start=lambda trainer, _: found.extend(trainer.data.loaders(stage).plan.spans))
    for given in (stream_of(data(3, batch_size=1)), data(20)):
        ours(limit_test_batches=5, callbacks=[looks]).test(Classifier(), given, verbose=False)
    assert found == [Span(0, 5), Span(5, 5)]


def test_epochs_reach_everything_that_has_set_epoch_once():
    epochs = []

    def having(name, base, **methods):
        return type(name, (base,), {"set_epoch": lambda _, epoch: epochs.append((name, epoch)), **methods})

    dataset, other = (having("Data", TensorDataset)(torch.zeros(4)) for _ in range(2))
    order = having("Order", SequentialSampler)(dataset)
    stream = having("Stream", IterableDataset, __iter__=lambda _: iter([torch.zeros(1)]), __len__=lambda _: 1)()
    one = DataLoader(dataset, batch_sampler=having("Batches", BatchSampler)(order, 2, False))
    two = DataLoader(dataset + Subset(other, [0]), sampler=order)
    combined = CombinedLoader([one, two, DataLoader(stream), having("Loader", list)([1])], "sequential")
    LoaderSet(combined, LoaderPlan([float(len(loader)) for loader in combined.flattened], has_length=True)).start_epoch(
        3
    )
    assert sorted(epochs) == [("Batches", 3), ("Data", 3), ("Data", 3), ("Loader", 3), ("Order", 3), ("Stream", 3)]


def test_datamodule_stays_attached_in_runs_without_one():
    def scenario(make):
        class Data(recording(LightningDataModule, DATAMODULE_HOOKS, "data")):
            def train_dataloader(self):
                return data(4)

        trainer, own = make(max_epochs=1, limit_val_batches=0), Data()
        trainer.fit(Classifier(), datamodule=own)
        trainer.test(Classifier(), data(2), verbose=False)
        return own.calls, trainer.datamodule is own

    assert_agree(scenario)


class Reloads(Classifier):
    """Records requests for data, and validations."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def note(self, what):
        trainer = self.trainer
        self.seen.append((what, self.current_epoch, trainer.state.stage.value, trainer.val_check_batch))

    def train_dataloader(self):
        self.note("train")
        return data(4 + 2 * self.current_epoch)

    def val_dataloader(self):
        self.note("val")
        return data(4)

    def on_train_epoch_start(self):
        self.note(f"{self.trainer.num_training_batches} batches")

    def on_validation_start(self):
        self.note("validates")


@pytest.mark.parametrize(
    ("sanity", "arguments"),
    [
        (1, {"reload_dataloaders_every_n_epochs": 2}),
        (1, {"reload_dataloaders_every_n_epochs": 4, "check_val_every_n_epoch": 3}),
        (0, {"reload_dataloaders_every_n_epochs": 1, "val_check_interval": 0.5}),
        (0, {"check_val_every_n_epoch": 2}),
        (1, {"limit_val_batches": 0}),
    ],
    ids=str,
)
def test_data_is_requested_at_the_same_points_as_in_lightning(sanity, arguments):
    def scenario(make):
        module = Reloads()
        make(max_epochs=6, num_sanity_val_steps=sanity, **arguments).fit(module)
        return module.seen

    assert_agree(scenario)


@pytest.mark.parametrize("limits", [(1, 0, 0, 1, 2), (0, 1, 0, 2, 1)])
def test_validations_end_and_begin_with_their_limit_during_a_fit(limits):
    def scenario(make):
        def set_limit(trainer, *_):
            trainer.limit_val_batches = limits[trainer.current_epoch]

        trainer = make(max_epochs=5, callbacks=[LambdaCallback(on_train_epoch_start=set_limit)])
        trainer.limit_val_batches = limits[0]
        module = Reloads()
        trainer.fit(module)
        return [epoch for what, epoch, *_ in module.seen if what == "validates"]

    assert_agree(scenario)


@pytest.mark.parametrize(("every", "saved_after", "expected"), [(2, 0, [0, 2, 4]), (2, 1, [0, 2, 4]), (3, 1, [0, 3])])
def test_resumed_run_requests_data_at_the_same_points(every, saved_after, expected, tmp_path):
    def save(trainer, _):
        if trainer.current_epoch == saved_after:
            trainer.save_checkpoint(tmp_path / "saved.ckpt")

    arguments = {"reload_dataloaders_every_n_epochs": every, "max_epochs": 5, "limit_val_batches": 0}
    ours(callbacks=LambdaCallback(on_train_epoch_end=save), **arguments).fit(Reloads())
    ours(**arguments).fit(resumed := Reloads(), ckpt_path=tmp_path / "saved.ckpt")
    assert [epoch for what, epoch, *_ in resumed.seen if what == "train"] == expected


def test_dataloaders_are_recreated_on_request():
    class Asks(Reloads):
        def on_train_batch_end(self, *args):
            if self.current_epoch in (1, 2):
                self.trainer.reload_dataloaders(train=self.current_epoch == 1, val=self.current_epoch == 2)

    module, trainer = Asks(), ours(max_epochs=5)
    trainer.fit(module)
    requested = [(what, epoch) for what, epoch, *_ in module.seen if what in ("train", "val")]
    assert requested == [("val", 0), ("train", 0), ("train", 2), ("val", 2)]
    with pytest.raises(RuntimeError, match="can only be called during training"):
        trainer.reload_dataloaders()


def test_workers_of_dataloaders_that_are_replaced_are_shut_down():
    made = []

    class Workers(Learner):
        def train_dataloader(self):
            made.append(data(4, num_workers=1, persistent_workers=True))
            return made[-1]

        def on_train_epoch_start(self):
            assert [loader._iterator for loader in made[:-1]] == [None] * (len(made) - 1)

    ours(max_epochs=2, reload_dataloaders_every_n_epochs=1).fit(Workers())
    assert len(made) == 2
    assert made[-1]._iterator is None


def test_dataloader_of_two_stages_may_have_persistent_workers():
    """A validation inside an epoch does not take the training batches away."""
    trained, validated = [], []
    notes = LambdaCallback(
        on_train_batch_end=lambda _, __, outputs, batch, *where: trained.append(batch[0].tolist()),
        on_validation_batch_end=lambda _, __, outputs, batch, *where: validated.append(batch[0].tolist()),
    )
    loader = data(8, num_workers=1, persistent_workers=True)
    expected = [batch[0].tolist() for batch in data(8)]
    trainer = ours(max_epochs=1, val_check_interval=2, num_sanity_val_steps=0, callbacks=[notes])
    trainer.fit(Classifier(), loader, loader)
    assert (trained, validated) == (expected, expected * 2)


def test_modes_of_several_dataloaders_are_refused_as_by_lightning():
    trainer = ours(max_epochs=1)
    with pytest.raises(ValueError, match='`CombinedLoader\\(mode="sequential"\\)`'):
        trainer.fit(Learner(), CombinedLoader([data(8), data(4)], "sequential"))
    assert trainer.num_training_batches == 6
    with pytest.raises(ValueError, match="only supports the `CombinedLoader"):
        trainer.predict(Classifier(), CombinedLoader([data(4), data(4)], "min_size"))


@pytest.mark.parametrize("in_a_closure", [True, False])
def test_batch_none_is_not_trained(in_a_closure):
    class InAClosure(Learner):
        def optimizer_step(self, *args, **kwargs):
            super().optimizer_step(*args, **kwargs)

    def scenario(make):
        events, module = [], InAClosure() if in_a_closure else Learner()
        records = LambdaCallback(
            on_train_batch_start=lambda *args: events.append(("start", args[-1])),
            on_train_batch_end=lambda _, __, outputs, batch, i: events.append((i, batch is None, [*(outputs or ())])),
        )
        trainer = make(max_epochs=1, callbacks=[records])
        with pytest.warns(UserWarning, match="train_dataloader yielded None"):
            trainer.fit(module, stream_of([next(iter(data(2))), None, next(iter(data(2)))]))
        return events, trainer.global_step, [w.tolist() for w in weights(module)]

    assert (1, True, []) in assert_agree(scenario)[0]
