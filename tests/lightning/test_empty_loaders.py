"""A fit without a batch is an error that names the empty dataloader."""

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.support import Regression, loader_of, loss_of, make_batches, make_trainer
from trainer.errors import ConfigurationError


class Stream(IterableDataset):
    """Yields ``counts[epoch]`` batches."""

    def __init__(self, *counts):
        self.counts = iter(counts)

    def __iter__(self):
        return iter(make_batches(next(self.counts)))


class Sized(Stream):
    def __len__(self):
        return 3


class First(Regression):
    """Trains on the first member of a collection."""

    def training_step(self, batch, batch_idx):
        while isinstance(batch, dict) or isinstance(batch[0], list):
            batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        return loss_of(self.net, batch)


def stream(kind, *counts):
    return DataLoader(kind(*counts), batch_size=None)


def full():
    return loader_of(make_batches(3))


TOO_SHORT = DataLoader(TensorDataset(torch.ones(2, 1)), batch_size=4, drop_last=True)


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: TOO_SHORT, "`, a DataLoader of 2 samples with batch_size=4 and drop_last=True, has no"),
        (lambda: [full(), {"c": TOO_SHORT}], r"\[1\]\['c'\]`, .* has no batch"),
        (lambda: [[1], []], r"\[1\]`, a list, has no batch"),
        (lambda: stream(Stream, 0), "`, a DataLoader, yielded no batch in epoch 0"),
        (lambda: stream(Sized, 0), "`, a DataLoader.*, yielded no batch in epoch 0"),
        (lambda: {"a": full(), "b": stream(Sized, *[0] * 9)}, r"\['b'\]`, .*no batch in epoch 0"),
        (lambda: CombinedLoader([stream(Stream, 0)] * 1, "max_size"), r"\[0\]`, .*no batch in epoch 0"),
        (lambda: CombinedLoader([stream(Stream, 2), stream(Stream, 0)], "min_size"), r"\[1\]`"),
    ],
)
def test_fit_without_a_batch_names_the_empty_dataloader(tmp_path, make, named):
    trainer = make_trainer(tmp_path, max_epochs=2)
    with pytest.raises(ConfigurationError, match=f"`train_dataloader{named}.*There is nothing to train on"):
        trainer.fit(First(), make())
    assert (trainer.current_epoch, trainer.global_step) == (0, 0)
    trainer = make_trainer(tmp_path, max_epochs=2, limit_train_batches=0)  # the advice
    trainer.fit(First(), make())
    assert trainer.global_step == 0


@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")
def test_fit_without_training_is_not_an_error(tmp_path):
    make_trainer(tmp_path).fit(Regression(), [])
    make_trainer(tmp_path, max_steps=0).fit(Regression(), DataLoader([]))


@pytest.mark.filterwarnings("ignore:Total length of `DataLoader` across ranks is zero")
def test_empty_member_of_a_max_size_collection(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.fit(First(), CombinedLoader({"a": full(), "b": DataLoader([])}, "max_size"))
    assert trainer.global_step == 3


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_epoch_without_a_batch_warns_and_two_in_succession_are_an_error(tmp_path):
    trainer = make_trainer(tmp_path, max_epochs=4)
    with pytest.warns(UserWarning, match="yielded no batch in epoch 1. The epoch ends without training"):
        trainer.fit(Regression(), stream(Sized, 2, 0, 3, 1))
    assert (trainer.current_epoch, trainer.global_step) == (4, 6)
    trainer = make_trainer(tmp_path, max_epochs=-1, max_steps=9)
    with (
        pytest.warns(UserWarning, match="no batch in epoch 1"),
        pytest.raises(ConfigurationError, match=r"no batch in epoch 2.*can be iterated only once"),
    ):
        trainer.fit(Regression(), (batch for batch in make_batches(2)))  # which would never reach its last step
    assert trainer.global_step == 2
