"""Dataloaders made ready: prepared by Lightning's connector, counted, limited, iterated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

from tests.parity import Classifier, Learner, data, ours
from trainer.compat.data import LoaderSet
from trainer.data import TrainingBatches
from trainer.errors import UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


def set_of(iterables: Any, mode: Any = "sequential", *limits: float) -> LoaderSet:
    combined = CombinedLoader(iterables, mode)
    return LoaderSet(combined, list(limits) or [float(len(loader)) for loader in combined.flattened], has_length=True)


def test_one_plain_loader_is_iterated_as_it_is() -> None:
    loader = data(6)
    loaders = set_of(loader)
    assert loaders.only() is loader
    assert loaders.num_batches() == 3
    assert [(batch_idx, dataloader_idx) for _, batch_idx, dataloader_idx in loaders.batches()] == [
        (0, 0),
        (1, 0),
        (2, 0),
    ]
    assert set_of([loader]).only() is None


def test_limits_end_the_pass() -> None:
    assert len(list(set_of(data(6), "sequential", 2.0).batches())) == 2
    assert len(list(set_of(data(6), "sequential", float("inf")).batches())) == 3
    several = set_of([data(6), data(4)], "sequential", 1.0, 2.0)
    assert [where for _, *where in several.batches()] == [[0, 0], [0, 1], [1, 1]]


@pytest.mark.parametrize(("mode", "expected"), [("min_size", 2), ("max_size", 3), ("max_size_cycle", 3)])
def test_loaders_side_by_side(mode: str, expected: int) -> None:
    loaders = set_of({"a": data(6), "b": data(4)}, mode)
    assert not loaders.is_sequential
    assert loaders.num_batches() == expected
    batches = TrainingBatches(loaders)
    batches.start_epoch(0, 0)
    seen = list(batches)
    assert [is_last for *_, is_last in seen] == [False] * (expected - 1) + [True]
    assert set(seen[0][0]) == {"a", "b"}


def test_epochs_reach_the_samplers() -> None:
    class Sampler(SequentialSampler):
        epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    dataset = TensorDataset(torch.zeros(4))
    loaders = set_of([DataLoader(dataset, sampler=Sampler(dataset)),
                      DataLoader(dataset, batch_sampler=BatchSampler(Sampler(dataset), 2, False))])  # fmt: skip
    loaders.start_epoch(5)
    assert Sampler.epochs == [5, 5]


def test_dataloaders_are_asked_for_once_a_run() -> None:
    class Counts(Classifier):
        asked: list[str] = []

        def train_dataloader(self) -> Any:
            self.asked.append("train")
            return data(4)

        def val_dataloader(self) -> Any:
            self.asked.append("val")
            return data(4)

    trainer = ours(max_epochs=3)
    trainer.fit(Counts())
    assert Counts.asked == ["val", "train"]


def test_what_the_trainer_shows_of_them() -> None:
    class Two(Classifier):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None: ...

    train, val = data(8), [data(4), data(6)]
    trainer = ours(max_epochs=1, limit_val_batches=2)
    assert (trainer.num_training_batches, trainer.num_val_batches, trainer.train_dataloader) == (float("inf"), [], None)
    trainer.fit(Two(), train, val)
    assert trainer.train_dataloader is train
    assert trainer.val_dataloaders == val
    assert (trainer.num_training_batches, trainer.num_val_batches) == (4, [2, 2])
    assert trainer.num_sanity_val_batches == [2, 2]


def test_the_users_transfer_hooks_are_found_where_they_are() -> None:
    class Module(Learner):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [part.clone() for part in batch]

    trainer = ours(max_epochs=1)
    module = Module()
    trainer.fit(module, data(2))
    assert trainer.data.transfer_hook("on_before_batch_transfer") == module.on_before_batch_transfer
    assert trainer.data.transfer_hook("transfer_batch_to_device") is None


def test_missing_data_is_named() -> None:
    with pytest.raises(MisconfigurationException, match="`train_dataloader`"):
        ours(max_epochs=1).fit(Learner())
    trainer = ours()
    with pytest.raises(MisconfigurationException, match="`test_dataloader` must be implemented"):
        trainer.test(Classifier())
    assert not trainer.data.is_ready(RunningStage.TESTING)


@pytest.mark.parametrize("name", ["training_step", "validation_step"])
def test_steps_that_draw_their_own_batches_are_refused(name: str) -> None:
    module = type("Draws", (Classifier,), {name: lambda self, dataloader_iter: None})()
    with pytest.raises(UnsupportedError, match=f"Draws.{name}\\(dataloader_iter\\)"):
        ours(max_epochs=1).fit(module, data(2), data(2))


def test_the_order_of_a_shuffled_loader_follows_the_seed() -> None:
    class Sees(Learner):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(batch[1].tolist())
            return self.loss(batch)

    orders = []
    for _ in range(2):
        torch.manual_seed(7)
        module = Sees()
        loader = data(12, shuffle=True)
        assert isinstance(loader.sampler, RandomSampler)
        ours(max_epochs=2).fit(module, loader)
        orders.append(module.seen)
    assert orders[0] == orders[1]
    assert orders[0][:6] != orders[0][6:]
