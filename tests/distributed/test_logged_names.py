"""Processes may log different names in training: values over the epoch are reduced as in evaluation."""

import warnings

import pytest
import torch
from lightning.pytorch import Callback
from torch import distributed, nn
from torch.utils.data import DataLoader

from tests.distributed.setups import Uneven
from tests.support import make_trainer


class Names(Uneven):
    """Logs batch_idx + 1 under the names of its rank.

    Args:
        names: names by rank, in the order in which they are logged.
        how: arguments of ``self.log``.
    """

    def __init__(self, names, how):
        super().__init__()
        self.net = nn.Linear(6, 2)
        self.names, self.how = names[distributed.get_rank()], how

    def training_step(self, batch, batch_idx):
        for number, name in enumerate(self.names):
            value = 10.0 * number + batch_idx + distributed.get_rank()
            self.log(name, value, sync_dist=True, batch_size=1, **self.how)
        return self.net(batch).square().mean()


class ReadsOnRank0(Callback):
    """Reads the metrics of the epoch on one process, as a progress bar does."""

    def on_train_epoch_end(self, trainer, pl_module):
        assert not trainer.is_global_zero or {*trainer.callback_metrics} >= {*pl_module.names}


def fit(names, how, kind=Names):
    """Fit two epochs of two batches. Return the metrics and the warnings about names."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer = make_trainer(
            None, devices=2, strategy="ddp", use_distributed_sampler=False, max_epochs=2, callbacks=[ReadsOnRank0()]
        )
        loader = DataLoader(torch.ones(4, 6), batch_size=2)
        trainer.fit(kind(names, how), loader, loader)
    messages = [str(one.message) for one in caught if "the processes logged different names" in str(one.message)]
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, messages


EPOCH = {"on_step": False, "on_epoch": True}


@pytest.mark.parametrize(
    ("names", "how", "expected"),
    [
        ([["a"], []], EPOCH, {"a": 0.5}),
        ([[], ["a"]], EPOCH | {"reduce_fx": "max"}, {"a": 2.0}),
        ([["a"], ["b"]], EPOCH, {"a": 0.5, "b": 1.5}),
        ([["a", "b"], ["b", "a"]], EPOCH | {"reduce_fx": "sum"}, {"a": 1 + 23, "b": 21 + 3}),
    ],
)
def test_values_over_the_epoch_are_those_of_the_processes_that_logged_the_name(ranks, names, how, expected):
    assert ranks.call(fit, names, how) == [(expected, [])] * 2


@pytest.mark.parametrize(
    ("names", "warned"), [([["a"], ["b"]], True), ([["a", "b"], ["b", "a"]], True), ([["a", "b"]] * 2, False)]
)
def test_different_names_of_values_of_single_batches_are_reported(ranks, names, warned):
    """Lightning #21409: the values of several names are averaged without a message. The names differ in each epoch."""
    messages = [found for _, found in ranks.call(fit, names, {"on_step": True})]
    assert [len(found) for found in messages] == [2 * warned, 0]  # only on rank 0
    assert all(f"({', '.join(sorted(names[0]))} on this process)" in text for text in messages[0])


class ReadsLate(Names):
    """Logs a value in a hook at the end of an epoch, and reads it on one process."""

    def validation_step(self, batch, batch_idx):
        self.log("val", 1.0)

    def log_and_read(self, name):
        self.log(name, float(distributed.get_rank()), sync_dist=True)
        assert not self.trainer.is_global_zero or self.trainer.callback_metrics[name] == 0.5

    def on_train_epoch_end(self):
        self.log_and_read("late")

    def on_validation_epoch_end(self):
        self.log_and_read("late_val")


def test_one_process_reads_a_value_in_the_hook_that_logs_it(ranks):
    expected = {"a": 1.0, "val": 1.0, "late": 0.5, "late_val": 0.5}
    assert ranks.call(fit, [["a"]] * 2, EPOCH, ReadsLate) == [(expected, [])] * 2
