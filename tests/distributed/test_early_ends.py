"""If the length of dataloaders is an estimate or unknown, all ranks end an epoch together."""

import warnings

import pytest
import torch
import torch.distributed as distributed
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset

from tests.distributed.ranks import RankError
from tests.distributed.setups import Uneven, only_these_warnings
from tests.support import assert_identical, loader_of, make_trainer, needs_fsdp2


class Stream(IterableDataset):
    """Yields ``counts[epoch]`` batches that differ between processes."""

    def __init__(self, counts):
        self.counts, self.epoch = counts, -1

    def __iter__(self):
        self.epoch += 1
        rank = distributed.get_rank()
        for number in range(self.counts[self.epoch]):
            yield torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * self.epoch + 10 * number + rank))


class Estimated(Stream):
    """Reports a length."""

    def __init__(self, length, counts):
        super().__init__(counts)
        self.length = length

    def __len__(self):
        return self.length


class Module(Uneven):
    """Validates, records the batches, steps, and learning rate at each validation, and has a schedule by epochs.

    ``stop_after`` is the batch after which the fit stops; -1 for none.
    """

    stop_after = -1

    def configure_optimizers(self):
        self.validations = []
        optimizer = super().configure_optimizers()
        return [optimizer], [StepLR(optimizer, 1, 0.5)]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.should_stop |= batch_idx == self.stop_after

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch).square().mean(), sync_dist=True)

    def on_validation_end(self):
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.validations.append((self.trainer.progress.batches, self.trainer.global_step, rate))


def fit(strategy, length, counts, window=1, module=(), stop_after=-1):
    """Fit on ``counts[rank][epoch]`` batches in each process.

    Args:
        strategy: ``"ddp"`` or ``"fsdp"``.
        length: the length that dataloaders report; None for no length, ``"own"`` for that of the first epoch,
            ``"exact"`` for new loaders with the correct length in each epoch.
        counts: batches by rank and epoch.
        window: ``accumulate_grad_batches``.
        module: arguments of :class:`Uneven`.
        stop_after: the batch after which the fit stops; -1 for none.
    """
    own = counts[distributed.get_rank()]
    torch.manual_seed(0)
    made = Module(*module)
    made.stop_after = stop_after

    def exact():
        epoch = trainer.current_epoch
        counts = [0] * epoch + own[epoch : epoch + 1]
        stream = Stream(counts)
        stream.epoch = epoch - 1
        return loader_of(stream)

    if length == "exact":
        made.train_dataloader = exact
    with only_these_warnings():
        warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")
        trainer = make_trainer(
            None, devices=distributed.get_world_size(), strategy=strategy, max_epochs=len(own),
            use_distributed_sampler=False, accumulate_grad_batches=window, num_sanity_val_steps=0,
            reload_dataloaders_every_n_epochs=int(length == "exact"),
        )  # fmt: skip
        loader = None
        if length != "exact":
            stream = Stream(own) if length is None else Estimated(own[0] if length == "own" else length, own)
            loader = DataLoader(stream, batch_size=None)
        trainer.fit(made, loader, DataLoader(torch.ones(4, 6), batch_size=2))
    return {
        "seen": made.seen,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "validations": made.validations,
        "counts": (trainer.global_step, trainer.progress.updates, trainer.progress.batches),
        **({"length": trainer.num_training_batches} if length == "own" else {}),
        "weights": {name: value.clone() for name, value in made.state_dict().items()},
    }


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=needs_fsdp2)])
def test_uneven_inputs_train_all_batches(ranks, engine):
    """A rank without further batches takes part in the others' steps; values of single batches are not reduced."""
    first, second = ranks.call(fit, engine, "own", [[2], [5]], 2)
    assert (first["seen"], second["seen"]) == ([0, 1], [0, 1, 2, 3, 4])
    for rank, last in ((first, 1.0), (second, 4.0)):
        assert (rank["counts"][0], rank["length"], rank["metrics"]["number_step"]) == (3, 5, last)
        assert rank["metrics"]["number_epoch"] == pytest.approx((0 + 1 + 0 + 1 + 2 + 3 + 4) / 7)


@pytest.mark.parametrize(
    ("engine", "counts", "window", "length"),
    [
        ("ddp", [[6, 5], [6, 5]], 4, 8),
        ("ddp", [[8, 2], [3, 1]], 2, 8),
        ("ddp", [[2, 7], [6, 3]], 2, None),
        pytest.param("fsdp", [[2, 7], [6, 3]], 2, 8, marks=needs_fsdp2),
        pytest.param("fsdp", [[2, 7], [6, 3]], 2, None, marks=needs_fsdp2),
    ],
)
def test_all_ranks_end_with_the_last_batch_of_any(ranks, engine, counts, window, length):
    found, expected = (ranks.call(fit, engine, one, counts, window) for one in (length, "exact"))
    assert_identical(found, expected)


@pytest.mark.parametrize(
    ("engine", "length", "module", "named"),
    [
        ("ddp", "own", ("SGD", True), "Manual optimization"),
        ("ddp", 8, ("SGD", True), "Manual optimization"),
        ("ddp", None, ("LBFGS",), "an optimizer that evaluates the loss itself"),
        ("ddp", None, ("SGD", False, "metric"), "The metric 'mean', with dist_sync_on_step=True,"),
        pytest.param("fsdp", "own", ("SGD", False, "norm"), "'net.1', which is a SyncBatchNorm,", marks=needs_fsdp2),
    ],
)
def test_runs_that_need_as_many_batches_in_each_process(ranks, engine, length, module, named):
    """Uneven inputs are refused if a process without a batch cannot take part in a forward pass of the others."""
    start = "Got 2 to 5 training batches per process" if length == "own" else "A process has 2 training batches"
    with pytest.raises(RankError, match=rf"{start}.*{named}.*limit_train_batches=2"):
        ranks.call(fit, engine, length, [[2], [5]], 1, module)
    if "norm" in module:  # it would need a GPU
        return
    for rank in ranks.call(fit, engine, length, [[3], [3]], 1, module):
        assert (rank["counts"][-1], len(rank["validations"])) == (3, 1)


@pytest.mark.parametrize("length", [8, None])
def test_epoch_without_a_batch_on_any_rank_is_an_error_on_all(ranks, length):
    with pytest.raises(RankError) as error:
        ranks.call(fit, "ddp", length, [[0], [0]])
    assert str(error.value).count("yielded no batch in epoch 0. There is nothing to train on") >= 2
    with pytest.raises(RankError) as error:
        ranks.call(fit, "ddp", length, [[2, 2], [2, 0]])
    assert str(error.value).count("A process has no training batch in this epoch, and others have some.") >= 2


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=needs_fsdp2)])
def test_window_that_stops_early_is_used(ranks, engine):
    stopped = ranks.call(fit, engine, "exact", [[8], [8]], 4, (), 5)
    for found, whole in zip(stopped, ranks.call(fit, engine, "exact", [[6], [6]], 4), strict=True):
        assert found["counts"] == whole["counts"] == (2, 2, 6)
        for name in ("net.0.weight", "net.1.weight", "net.2.bias"):  # DDP makes buffers equal once more
            assert torch.equal(found["weights"][name], whole["weights"][name]), name
