"""Any iterable of batches of indices is a batch sampler, in each kind of run."""

from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader

from tests.distributed.test_batch_samplers import Seen
from tests.support import Regression, make_trainer
from trainer.data.unpadded import BatchShare

BATCHES = [[6, 2], [4, 0]]


KINDS = {
    "list": lambda: BATCHES,
    "generator": lambda: (batch for batch in BATCHES),
    "slots": type("Slots", (), {"__slots__": (), "__iter__": lambda self: iter(BATCHES)}),  # no `__dict__`
    "object": type("Own", (), {"__iter__": lambda self: iter(BATCHES)}),
}


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
@pytest.mark.filterwarnings("ignore:You are using a custom batch sampler `Own` for prediction")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["fit", "validate", "test", "predict"])
def test_any_iterable_is_a_batch_sampler(tmp_path, what, kind):
    module, loader = Seen(), DataLoader(torch.arange(8.0).reshape(8, 1), batch_sampler=KINDS[kind]())
    given = loader.batch_sampler
    result = getattr(make_trainer(tmp_path), what)(module, loader)
    assert module.seen == BATCHES
    if what == "predict":
        assert [batch.flatten().tolist() for batch in result] == BATCHES
        assert module.indices == BATCHES
    assert loader.batch_sampler is given


@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled")
@pytest.mark.parametrize(("what", "arguments"), [("fit", {"overfit_batches": 2}), ("predict", {})])
def test_arguments_of_a_dataloader_may_be_positional(tmp_path, what, arguments):
    class Makes(Seen):
        validation_step = None

        def train_dataloader(self):
            return DataLoader(torch.arange(5.0).reshape(5, 1), 2, what == "fit", num_workers=0)

        predict_dataloader = train_dataloader

    module = Makes()
    getattr(make_trainer(tmp_path, **arguments), what)(module)
    assert module.seen == [[0, 1], [2, 3], [4]][: 2 if what == "fit" else 3]


class Changing:
    """Has another number of batches in each epoch."""

    def __init__(self, lengths):
        self.lengths, self.epoch = lengths, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.lengths[self.epoch]

    def __iter__(self):
        return ([index, index + 1] for index in range(len(self)))


@pytest.mark.parametrize(
    ("arguments", "trained", "validations", "steps"),
    [
        ({"val_check_interval": 0.5}, [2, 4, 1], [2, 2, 1], 7),
        ({"val_check_interval": 2}, [2, 4, 1], [1, 2, 0], 7),
        ({"accumulate_grad_batches": 3}, [2, 4, 1], [1, 1, 1], 4),
        ({"limit_train_batches": 3}, [2, 3, 1], [1, 1, 1], 6),
    ],
    ids=str,
)
def test_each_epoch_has_the_batches_of_its_length(tmp_path, arguments, trained, validations, steps):
    counts, lengths = Counter(), [2, 4, 1]

    class Counts(Regression):
        def training_step(self, batch, batch_idx):
            counts["train", self.current_epoch] += 1
            assert self.trainer.is_last_batch == (batch_idx == trained[self.current_epoch] - 1)
            return self.net(batch).mean()

        def validation_step(self, batch, batch_idx):
            counts["val", self.current_epoch] += 1

    trainer = make_trainer(tmp_path, max_epochs=3, num_sanity_val_steps=0, **arguments)
    loaders = [DataLoader(torch.arange(8.0).reshape(8, 1), batch_sampler=Changing(lengths)) for _ in range(2)]
    trainer.fit(Counts(torch.nn.Linear(1, 1)), *loaders)
    assert [counts["train", epoch] for epoch in range(3)] == trained
    assert [counts["val", epoch] for epoch in range(3)] == [n * m for n, m in zip(validations, lengths, strict=True)]
    assert trainer.global_step == steps


@pytest.mark.parametrize(("count", "replicas"), [(0, 2), (4, 1), (4, 2), (5, 3)])
def test_shares_of_all_ranks_are_all_batches_once(count, replicas):
    batches = [[i] for i in range(count)]
    shares = [BatchShare(batches, replicas, rank) for rank in range(replicas)]
    assert sorted(batch for share in shares for batch in share) == batches
    assert [len(share) for share in shares] == [len([*share]) for share in shares]
    padded = [BatchShare(batches, replicas, rank, padded=True) for rank in range(replicas)]
    assert {len(share) for share in padded} == {len([*share]) for share in padded} == {-(-count // replicas)}
    assert {batch[0] for share in padded for batch in share} == set(range(count))
