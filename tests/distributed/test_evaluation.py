"""Several ranks evaluate each sample once with uneven inputs, and log the values of one process."""

import warnings
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score
from torchmetrics.retrieval import RetrievalMAP

from tests.support import Stream, make_trainer, needs_fsdp2
from trainer.common import async_max


class Module(LightningModule):
    """Logs in all supported ways."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        # of each dataloader
        self.means = nn.ModuleList(MeanMetric() for _ in range(3))
        self.auroc = nn.ModuleList(BinaryAUROC() for _ in range(3))
        scores = {"accuracy": MulticlassAccuracy(num_classes=3), "f1": MulticlassF1Score(num_classes=3)}
        self.scores = nn.ModuleList(MetricCollection(scores).clone() for _ in range(3))
        self.unlogged = MeanMetric()
        self.seen = []
        self.running = []
        self.hooks = []

    def forward(self, batch):
        return self.net(batch.reshape(-1, 1)).sum(1)

    def training_step(self, batch, batch_idx):
        return (self(batch) - 1).square().mean()

    def evaluate(self, batch, dataloader_idx=0):
        self.seen += batch.tolist()
        self.running.append(float(self.net[1].running_mean.sum()))
        epoch = {"on_step": False, "on_epoch": True}
        self.log("mean", batch.mean(), sync_dist=True, **epoch)
        self.log("plain", batch.mean(), **epoch)
        self.log("sum", batch.sum(), sync_dist=True, reduce_fx="sum", **epoch)
        self.log("plain_sum", float(batch.sum()), reduce_fx="sum", **epoch)
        self.log("max", batch.max(), sync_dist=True, reduce_fx="max", **epoch)
        self.log("min", batch.min() - 10, reduce_fx="min", **epoch)
        self.log("weighted", batch.double().mean(), sync_dist=True, batch_size=3 * len(batch), **epoch)
        self.log("each", batch.mean(), sync_dist=True, on_step=True, on_epoch=True)
        self.log("output", self(batch).mean(), sync_dist=True, **epoch)
        if 4.0 in batch.tolist():
            self.log("rare", batch.max(), **epoch)
        scores = nn.functional.one_hot((batch.long() // 2) % 3, 3).float()
        self.means[dataloader_idx](batch)
        self.auroc[dataloader_idx](batch / 100, batch.long() % 2)
        self.scores[dataloader_idx](scores, batch.long() % 3)
        self.unlogged.update(batch)
        self.log("mean_object", self.means[dataloader_idx], **epoch)
        self.log("auroc", self.auroc[dataloader_idx], **epoch)
        self.log_dict(self.scores[dataloader_idx], **epoch)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.evaluate(batch, dataloader_idx)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return batch + 0 * self(batch)

    def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
        self.hooks.append(f"start {dataloader_idx} {batch_idx}")

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.hooks.append(f"end {dataloader_idx} {batch_idx}")
        self.log("in_hook", torch.cat([*batch]).mean() if isinstance(batch, list) else batch.mean(), on_epoch=True)

    def on_validation_epoch_end(self):
        self.log("unlogged", self.unlogged.compute(), sync_dist=True)
        self.log("of_rank", float(self.global_rank))
        self.unlogged.reset()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "of_rank"}}


class OneBatch(Module):
    """One batch for several dataloaders side by side."""

    def evaluate(self, batch, dataloader_idx=0):
        super().evaluate(torch.cat(batch))


class Drawing(LightningModule):
    """Uses ``dataloader_iter``."""

    def validation_step(self, dataloader_iter):
        self.log("mean", next(dataloader_iter)[0].mean(), batch_size=1)


class Collective(Module):
    """Calls a collective in each batch, or in one batch: ``"gather"``, ``"gather in the first"`` or ``"raw"``."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        if self.kind == "gather" or (self.kind == "gather in the first" and batch_idx == 0):
            self.all_gather(torch.ones(1))
        if self.kind == "raw":
            torch.distributed.all_reduce(torch.ones(1))
        self.log("mean", batch.mean() + 0 * self(batch).mean())


class GathersAtTheEnd(Module):
    """Gathers the samples of all ranks after the last batch: in one tensor, or in one for each batch."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def on_validation_epoch_end(self):
        self.log("gathered", torch.as_tensor(sum(self.all_gather(self.make(self.seen)))).float().sum())


class Lists(Module):
    """A metric with lists of tensors, which are gathered one by one."""

    def __init__(self):
        super().__init__()
        self.lists = RetrievalMAP()
        self.lists._reductions = dict.fromkeys(self.lists._reductions)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.lists.update(batch / 10, batch.long() % 2, indexes=batch.long() % 1)


class OnStep(Module):
    """A metric that is synchronized at each step."""

    def __init__(self):
        super().__init__()
        self.eager = MeanMetric(dist_sync_on_step=True)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.eager(batch)


class Rows(Callback):
    """The per-batch values of one rank."""

    def __init__(self):
        self.each = []

    def on_validation_batch_end(self, trainer, *_, **__):
        if not trainer.sanity_checking:
            self.each += [float(v) for name, v in trainer._results.metrics(True)["log"].items() if name == "each_step"]


def build(engine, **arguments):
    """Return a Trainer for all ranks, or for one process (``"auto"``)."""
    return make_trainer(None, devices=1 if engine == "auto" else 2, strategy=engine, **arguments)


def sizes(*counts, batch_size=1, **options):
    loaders = [DataLoader(torch.arange(float(count)), batch_size=batch_size, **options) for count in counts]
    return loaders if len(loaders) > 1 else loaders[0]


def stream(count):
    """Return a dataloader of the same samples without a length, divided among the ranks."""
    is_split = torch.distributed.is_initialized()
    rank, size = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if is_split else (0, 1)
    return DataLoader(Stream(torch.arange(float(count))[rank::size]))


class Evens(BatchSampler):
    """A custom batch sampler."""


# name: (dataloaders, arguments of the Trainer)
PASSES = {
    "five": (lambda: sizes(5), {}),
    "one": (lambda: sizes(1), {}),
    "seven by two": (lambda: sizes(7, batch_size=2), {}),
    "several": (lambda: sizes(3, 1, 4), {}),
    "shuffled": (lambda: sizes(5, shuffle=True), {}),
    "batch sampler": (
        lambda: DataLoader(torch.arange(5.0), batch_sampler=Evens(SequentialSampler(torch.arange(5.0)), 1, False)),
        {},
    ),
    "stream": (lambda: stream(5), {}),
    "streams": (lambda: [stream(1), stream(3)], {}),
    "side by side": (lambda: CombinedLoader(sizes(5, 5), "max_size"), {}),
}
LIMITED = {
    "limit 1": (lambda: sizes(5), {"limit_val_batches": 1}),
    "limit 0.5 of three": (lambda: sizes(3), {"limit_val_batches": 0.5}),
    "padded": (lambda: sizes(5), {"pad_evaluation": True}),
    "distributed sampler": (lambda: sizes(5, sampler=DistributedSampler(range(5), shuffle=False)), {}),
    "not divided": (lambda: sizes(5), {"use_distributed_sampler": False}),
}
SHARDED = ("one", "several", "stream", "streams", "side by side")


def validate(name, engine):
    make, arguments = (PASSES | LIMITED)[name]
    loaders, rows = make(), Rows()
    module = OneBatch() if isinstance(loaders, CombinedLoader) else Module()
    trainer = build(engine, callbacks=[rows], **arguments)
    with warnings.catch_warnings(action="ignore"):
        results = trainer.validate(module, loaders, verbose=False)
    return {
        "results": results, "seen": module.seen, "num_val_batches": trainer.num_val_batches, "hooks": module.hooks,
        "callback_metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "each": rows.each,
    }  # fmt: skip


def evaluate(engine):
    """Test, predict, and draw batches."""
    module, found = Module(), {}
    with warnings.catch_warnings(action="ignore"):
        found["test"] = build(engine).test(module, sizes(5), verbose=False)
        found["seen"] = module.seen
        for count in (5, 1):
            found[f"predict {count}"] = [float(one) for one in build(engine).predict(Module(), sizes(count)) or []]
            if engine != "fsdp":
                found[f"drawn {count}"] = build(engine).validate(Drawing(), sizes(count), verbose=False)
    return found


def fit(engine, folder, counts, arguments=(), monitor="plain"):
    """Fit three epochs, with a checkpoint of the best. Ranks agree before each batch whether to stop."""
    module, rows = Module(), Rows()
    saver = ModelCheckpoint(folder / engine, monitor=monitor, filename="{epoch}-{plain:.3f}")
    trainer = build(engine, max_epochs=3, enable_checkpointing=True, callbacks=[rows, saver], **dict(arguments))
    with warnings.catch_warnings(action="ignore"), patch.object(async_max, "SECONDS", 0.0):
        trainer.fit(module, sizes(8, batch_size=4 // trainer.world_size), sizes(*counts))
    return {
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "best": Path(saver.best_model_path).name, "score": float(saver.best_model_score),
        "lr": trainer.optimizers[0].param_groups[0]["lr"], "seen": module.seen, "running": module.running,
    }  # fmt: skip


PADDED = {"pad_evaluation": True}
REMEDY = "Trainer(pad_evaluation=True)"
UNEVEN = ("ConfigurationError: The ", "the processes have different numbers of batches (2 to 3)", REMEDY)
SHAPES = ("different tensors on the ranks: (3,), torch.float32; (2,), torch.float32", REMEDY)
LENGTHS = ("The metric 'lists' (RetrievalMAP) keeps 'indexes' as a list of tensors, 3, 2 of them", REMEDY)
COLLECTIVES = {
    "gather": (partial(Collective, "gather"), 5, {}, UNEVEN),
    "raw": (partial(Collective, "raw"), 5, {}, UNEVEN),
    "gather in the first": (partial(Collective, "gather in the first"), 5, {}, ()),
    "gather in a sanity check": (partial(Collective, "gather"), 5, {"num_sanity_val_steps": 1}, UNEVEN),
    "gather, even": (partial(Collective, "gather"), 4, {}, ()),
    "gather at the end": (partial(GathersAtTheEnd, torch.tensor), 5, {}, SHAPES),
    "gather at the end, padded": (partial(GathersAtTheEnd, torch.tensor), 5, PADDED, ()),
    "gather a list at the end": (partial(GathersAtTheEnd, list), 5, {}, ("the ranks: 3 tensors; 2 tensors", REMEDY)),
    "gather an empty list at the end": (partial(GathersAtTheEnd, list), 1, {}, ("1 tensors; 0 tensors", REMEDY)),
    "gather a list at the end, padded": (partial(GathersAtTheEnd, list), 5, PADDED, ()),
    "on step": (OnStep, 5, {}, (*UNEVEN, "'eager', with dist_sync_on_step=True")),
    "on step, padded": (OnStep, 5, PADDED, ()),
    "lists": (Lists, 5, {}, LENGTHS),
    "lists, even": (Lists, 4, {}, ()),
}


def evaluate_with_collectives(name, engine):
    """Return the results, the error and the warnings of an evaluation with collectives in its batches."""
    make, count, arguments, _ = COLLECTIVES[name]
    trainer, module, found = build(engine, **arguments), make(), {}
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            if "num_sanity_val_steps" in arguments:
                trainer.fit(module, sizes(8, batch_size=2), sizes(count))
            else:
                found["results"] = trainer.validate(module, sizes(count), verbose=False)
        except Exception as error:
            found["raised"] = f"{type(error).__name__}: {error}"
    return found | {"warned": [str(one.message) for one in caught]}


@pytest.fixture(scope="module")
def validated(ranks):
    """Return the results of each rank for a pass and an engine (``"auto"``: one process), which are run once."""
    return cache(
        lambda name, engine: [validate(name, engine)] if engine == "auto" else ranks.call(validate, name, engine)
    )


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


@pytest.mark.parametrize("name", PASSES)
def test_logged_values_of_several_ranks_equal_those_of_one_process(validated, name):
    """Means, sums, extremes and metric objects, with and without ``sync_dist``; a rank may have no batch."""
    (expected,) = validated(name, "auto")
    ranks = validated(name, "ddp")
    assert sorted(x for rank in ranks for x in rank["seen"]) == sorted(expected["seen"])
    results = expected["results"]
    if name == "seven by two":
        results = [results[0] | {"rare": 6.0}]  # the largest sample of the batch
    for rank in ranks:
        assert_same(rank["results"], results)
        assert rank["callback_metrics"] == pytest.approx(ranks[0]["callback_metrics"], abs=1e-6)


def test_hooks_run_for_the_batches_of_a_process(validated):
    """Callbacks decide by ``num_val_batches``, the largest of all processes, whether there is a validation."""
    five, one = validated("five", "ddp"), validated("one", "ddp")
    assert [rank["seen"] for rank in five + one] == [[0.0, 2.0, 4.0], [1.0, 3.0], [0.0], []]
    for rank, batches in zip(five + one, (3, 2, 1, 0), strict=True):
        assert rank["hooks"] == [f"{hook} 0 {i}" for i in range(batches) for hook in ("start", "end")]
    assert [rank["num_val_batches"] for rank in five + one] == [[3], [3], [1], [1]]


def test_values_of_single_batches_are_reduced_if_both_ranks_have_the_batch(validated):
    """Ranks have the values 0 and 1, 2 and 3, and 4 alone. With unknown lengths no value is reduced."""
    assert [rank["each"] for rank in validated("five", "ddp")] == [[0.5, 2.5, 4.0], [0.5, 2.5]]
    assert [rank["each"] for rank in validated("stream", "ddp")] == [[0.0, 2.0, 4.0], [1.0, 3.0]]


@pytest.mark.parametrize("name", ["limit 1", "limit 0.5 of three"])
def test_limits_count_the_batches_of_a_process(validated, name):
    for number, rank in enumerate(validated(name, "ddp")):
        assert rank["seen"] == [float(number)]
        assert rank["results"][0]["mean"] == 0.5


def test_padding_and_samplers_divided_by_the_user_equal_lightnings(validated):
    """Padded, both ranks have three samples. Without ``sync_dist`` each rank has its own value."""
    assert [rank["seen"] for rank in validated("distributed sampler", "ddp")] == [[0.0, 2.0, 4.0], [1.0, 3.0, 0.0]]
    assert [rank["seen"] for rank in validated("not divided", "ddp")] == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2
    padded = validated("padded", "ddp")
    assert [rank["seen"] for rank in padded] == [[0.0, 2.0, 4.0], [1.0, 3.0, 0.0]]
    for rank, plain in zip(padded, (2.0, 4 / 3), strict=True):
        assert rank["results"][0]["mean"] == pytest.approx(10 / 6, abs=1e-6)
        assert rank["results"][0]["plain"] == pytest.approx(plain, abs=1e-6)


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=needs_fsdp2)])
def test_test_predict_and_steps_that_draw_their_batches(ranks, engine):
    expected, found = evaluate("auto"), ranks.call(evaluate, engine)
    assert sorted(x for rank in found for x in rank["seen"]) == expected["seen"]
    for rank in found:
        assert_same(rank["test"], expected["test"])
    assert [rank["predict 5"] for rank in found] == [[0.0, 2.0, 4.0], [1.0, 3.0]]
    assert [rank["predict 1"] for rank in found] == [[0.0], []]
    for count, mean in ((5, 2.0), (1, 0.0)):
        for one in (expected, *(found if engine == "ddp" else ())):
            assert one[f"drawn {count}"] == [{"mean": mean}]


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=needs_fsdp2)])
def test_fit_chooses_its_checkpoint_by_the_whole_data(ranks, tmp_path, engine):
    """All ranks evaluate with the buffers of the first. The schedule monitors ``of_rank``, 0 and 1 on the ranks."""
    expected = fit("auto", tmp_path, (5,))
    first, second = ranks.call(fit, engine, tmp_path, (5,))
    for key in ("best", "score", "lr"):
        assert first[key] == second[key] == expected[key]
    assert first["metrics"] == pytest.approx(second["metrics"], abs=1e-6)
    assert first["metrics"]["of_rank"] == 0.0
    for key in first["metrics"].keys() - {"train_loss", "of_rank", "output"}:  # another BatchNorm
        assert first["metrics"][key] == pytest.approx(expected["metrics"][key], abs=1e-6)
    first, second = first["running"], second["running"]
    assert first[2:5] == first[2:3] * 3  # after two batches of the sanity check
    assert second[2:4] == first[2:4]
    assert second[4:6] == first[5:7]
    assert first[2] != first[5]


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=needs_fsdp2)])
def test_rank_without_a_batch_takes_part_in_a_fit(ranks, tmp_path, engine):
    expected = fit("auto", tmp_path, (1,))
    for rank in ranks.call(fit, engine, tmp_path, (1,)):
        assert (rank["best"], rank["score"]) == (expected["best"], expected["score"])


def test_several_dataloaders_and_validations_inside_an_epoch(ranks, tmp_path):
    """In each of three dataloaders, one rank has one batch more."""
    for rank in ranks.call(fit, "ddp", tmp_path, (5, 5, 5), (), "plain/dataloader_idx_2"):
        assert rank["score"] == 2.0
    found = ranks.call(fit, "ddp", tmp_path, (5,), {"val_check_interval": 1, "limit_val_batches": 3})
    assert [len(rank["seen"]) for rank in found] == [2 + 6 * 3, 2 + 6 * 2]  # 2 in the sanity check


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *((name, "ddp") for name in COLLECTIVES),
        *(pytest.param(name, "fsdp", marks=needs_fsdp2) for name in ("gather", "gather, even")),
    ],
)
def test_collectives_in_an_evaluation_with_uneven_inputs(ranks, name, engine):
    """By ``self.all_gather``, ``torch.distributed``, and metric objects. Under FSDP, those of forwards do not count.

    Gathered tensors of different shapes would end a process of gloo, and wait or have wrong values with NCCL.
    """
    *_, parts = COLLECTIVES[name]
    number = {"gather": 1, "raw": 1, "gather in the first": 1, "gather in a sanity check": 2}.get(name, 0)
    for rank in ranks.call(evaluate_with_collectives, name, engine):
        assert ("raised" in rank) is bool(parts)
        assert all(part in rank["raised"] for part in parts)
        assert sum("different numbers of batches (2 to 3)" in text for text in rank["warned"]) == number
        number = 0  # on rank 0 only
        if "padded" in name and "end" in name:
            assert rank["results"][0]["gathered"] == 0 + 2 + 4 + 1 + 3 + 0


@needs_fsdp2
@pytest.mark.parametrize("name", SHARDED)
def test_sharded_ranks_run_the_same_collectives(validated, name):
    (expected,) = validated(name, "auto")
    for found, ddp in zip(validated(name, "fsdp"), validated(name, "ddp"), strict=True):
        assert found["seen"] == ddp["seen"]
        assert_same(found["results"], expected["results"])
