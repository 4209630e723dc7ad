"""Lists of batches are divided among the processes; other batch samplers work or are refused."""

import pytest
import torch
import torch.distributed as distributed
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from tests.distributed.ranks import RankError
from tests.distributed.setups import only_these_warnings
from tests.support import make_trainer

BATCHES = [[6, 2], [4], [0, 1, 5]]


class CustomSampler:
    """A batch sampler without the attributes of torch's."""

    def __iter__(self):
        return iter(BATCHES)

    def __len__(self):
        return len(BATCHES)


class Seen(LightningModule):
    """Records the numbers in its batches."""

    def __init__(self):
        super().__init__()
        self.net, self.seen, self.indices = nn.Linear(1, 1), [], []

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.seen.append(batch.flatten().tolist())
        return batch

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("mean", batch.mean(), batch_size=len(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        self.indices.append([int(index) for index in self.trainer.predict_loop.current_batch_indices])
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class WithDataloaders(Seen):
    """Makes its dataloaders."""

    def train_dataloader(self):
        return make_loader("shuffled")


def make_loader(kind):
    numbers = torch.arange(8.0).reshape(8, 1)
    samplers = {
        "list": BATCHES,
        "custom": CustomSampler(),
        "shuffled": BatchSampler(RandomSampler(numbers), 2, drop_last=False),
        "in order": BatchSampler(SequentialSampler(numbers), 2, drop_last=False),
    }
    return DataLoader(numbers, batch_sampler=samplers[kind])


def run(command, kind="list"):
    """Return the batches of this process, the indices that the predict loop reports, and the metrics."""
    module, loaders = (WithDataloaders(), ()) if kind == "made by the module" else (Seen(), (make_loader(kind),))
    with only_these_warnings():
        trainer = make_trainer(
            None, devices=distributed.get_world_size(), strategy="ddp", limit_val_batches=float(command != "fit")
        )
        getattr(trainer, command)(module, *loaders)
    return module.seen, module.indices, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("command", ["fit", "validate", "predict"])
def test_each_batch_of_a_list_goes_to_one_process(ranks, command):
    (first, *first_results), (second, *second_results) = ranks.call(run, command)
    assert (first, second) == ([[6, 2], [0, 1, 5]], [[4]])
    if command == "predict":
        assert (first_results[0], second_results[0]) == ([[6, 2], [0, 1, 5]], [[4]])
    elif command != "fit":
        assert first_results[1] == second_results[1] == {"mean": pytest.approx((6 + 2 + 4 + 0 + 1 + 5) / 6)}


@pytest.mark.parametrize(
    ("command", "kind"), [("fit", "shuffled"), ("fit", "made by the module"), ("validate", "in order")]
)
def test_torchs_batch_sampler_keeps_its_batch_size_and_its_order(ranks, command, kind):
    (first, *_), (second, *_) = ranks.call(run, command, kind)
    assert [len(batch) for batch in (*first, *second)] == [2, 2, 2, 2]
    if command == "fit":
        assert sorted(number for batch in (*first, *second) for number in batch) == [0, 1, 2, 3, 4, 5, 6, 7]
        assert first != [[0, 2], [4, 6]]
    else:
        assert (first, second) == ([[0, 2], [4, 6]], [[1, 3], [5, 7]])


@pytest.mark.parametrize(
    ("command", "remedy"), [("fit", "use_distributed_sampler=False"), ("predict", "Pass a list of batches")]
)
def test_batch_sampler_that_cannot_be_divided_is_refused(ranks, command, remedy):
    with pytest.raises(RankError, match=remedy):
        ranks.call(run, command, "custom")


class Curriculum(Sampler):
    """From easy to hard, and in each epoch from another sample on."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return 7

    def __iter__(self):
        return iter([(number + self.epoch) % 7 for number in range(7)])

    def set_epoch(self, epoch):
        self.epoch = epoch


class Pairs(BatchSampler):
    """A custom batch sampler."""

    def __init__(self, sampler, batch_size=2, drop_last=False):
        super().__init__(sampler, batch_size, drop_last)


NUMBERS = torch.arange(8.0).reshape(8, 1)
SAMPLERS = {
    "shuffle=False": {}, "curriculum": {"sampler": Curriculum()}, "subset": {"sampler": range(1, 7)},
    "weighted": {"sampler": WeightedRandomSampler([1.0] * 8, 6)},
    "replacement": {"sampler": RandomSampler(NUMBERS, replacement=True, num_samples=6)},
    "custom batches": {"batch_sampler": Pairs(Curriculum())},
    "custom batches, in order": {"batch_sampler": Pairs(SequentialSampler(NUMBERS))},
    "shuffle=True": {"shuffle": True}, "custom batches, shuffled": {"batch_sampler": Pairs(RandomSampler(NUMBERS))},
}  # fmt: skip


def train_in(kind):
    """Return the order of the samples of this process in each of two epochs."""
    module, epochs = Seen(), []
    module.on_train_epoch_end = lambda: epochs.append([int(n) for batch in module.seen for n in batch])
    module.on_train_epoch_start = module.seen.clear
    options = {"batch_size": 1, **SAMPLERS[kind]}
    if "batch_sampler" in options:
        del options["batch_size"]
    size = distributed.get_world_size()
    with only_these_warnings():
        trainer = make_trainer(None, devices=size, strategy="ddp", max_epochs=2, limit_val_batches=0)
        torch.manual_seed(distributed.get_rank())  # ranks draw different random numbers
        trainer.fit(module, DataLoader(NUMBERS, **options))
    return epochs


ORDERS = {
    "shuffle=False": [[*range(8)]] * 2, "subset": [[*range(1, 7)]] * 2,
    "custom batches, in order": [[*range(8)]] * 2,
    "curriculum": [[0, 1, 2, 3, 4, 5, 6, 0], [1, 2, 3, 4, 5, 6, 0, 1]],
    "custom batches": [[0, 1, 2, 3, 4, 5, 6, 0], [1, 2, 3, 4, 5, 6, 0, 1]],
}  # fmt: skip


@pytest.mark.parametrize("kind", SAMPLERS)
def test_training_has_the_order_of_one_process_dealt_out(ranks, kind):
    found = [
        [n for pair in zip(*epoch, strict=True) for n in pair]
        for epoch in zip(*ranks.call(train_in, kind), strict=True)
    ]
    if kind in ORDERS:
        assert found == ORDERS[kind]
    elif kind in ("weighted", "replacement"):  # drawn by the seed and the epoch, as `WeightedRandomSampler` draws
        for epoch, row in enumerate(found):
            torch.manual_seed(epoch)
            assert row == list(SAMPLERS[kind]["sampler"])
    else:  # as in Lightning
        for epoch, row in enumerate(found):
            samplers = [DistributedSampler(NUMBERS, 2, rank, shuffle=True, seed=0) for rank in range(2)]
            for sampler in samplers:
                sampler.set_epoch(epoch)
            assert row == [n for pair in zip(*samplers, strict=True) for n in pair]


def validate_a_part():
    """Return the samples of this process in each validation of two epochs, two per epoch."""
    module, passes = Seen(), []
    module.on_validation_epoch_start = module.seen.clear
    module.on_validation_end = lambda: passes.append([int(n) for batch in module.seen for n in batch])
    options = {"limit_val_batches": 2, "num_sanity_val_steps": 0, "val_check_interval": 2, "max_epochs": 2}
    with only_these_warnings():
        trainer = make_trainer(None, devices=distributed.get_world_size(), strategy="ddp", **options)
        trainer.fit(module, DataLoader(NUMBERS), DataLoader(torch.arange(64.0).reshape(64, 1), shuffle=True))
    return passes


def test_limited_shuffled_validation_reads_another_part_each_time(ranks):
    first, second = ranks.call(validate_a_part)
    found = [frozenset(pass_) for pass_ in (*first, *second)]
    assert len(set(found)) == len(found) == 8
    assert all(not set(a) & set(b) for a, b in zip(first, second, strict=True))
