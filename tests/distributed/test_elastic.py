"""Runs resumed with another number of ranks end within 1e-5 of uninterrupted runs."""

import warnings
from collections import Counter, UserList
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric

from tests.distributed.ranks import Ranks
from tests.support import HAS_FSDP2, make_trainer, needs_fsdp2
from trainer import CheckpointFiles

SAMPLES = 50
EPOCHS = 3


@dataclass(frozen=True)
class Run:
    """A run. ``start`` is the name of another run, and the optimizer step to resume it from.

    Groups of ``sharing`` ranks have the same batches: they divide layers (tensor parallelism).
    """

    name: str
    processes: int
    batch_size: int
    start: tuple[str, int] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    drop_last: bool = False
    workers: int = 0
    strategy: str = "ddp"
    sharded: bool = False
    sharing: int = 1


VALIDATES = {"val_check_interval": 2}
RUNS = [
    # 12 samples per optimizer step; 5 steps per epoch, the last of 2 samples
    Run("one", 1, 12),
    Run("one, in windows", 1, 3, arguments={"accumulate_grad_batches": 4, "val_check_interval": 8}),
    Run("one, dropping", 1, 4, arguments={"accumulate_grad_batches": 3}, drop_last=True, workers=1),
    Run("two", 2, 6, arguments=VALIDATES),
    Run("one on two", 2, 3, ("one", 2)),  # windows of 2
    Run("one on two from the start", 2, 3, ("one", 0)),
    Run("windows on two", 2, 6, ("one, in windows", 3), {"accumulate_grad_batches": 4, "val_check_interval": 8}),
    Run("dropping on two", 2, 3, ("one, dropping", 6), {"accumulate_grad_batches": 3}, drop_last=True),  # windows of 2
    Run("one on two, then three", 3, 4, ("one on two", 3)),
    Run("two on three", 3, 4, ("two", 6), VALIDATES),
    Run("two on three at an epoch's end", 3, 2, ("two", 5), {**VALIDATES, "accumulate_grad_batches": 2}),
    Run("two, sharded", 2, 6, ("two", 7), VALIDATES, strategy="fsdp", sharded=True),
    Run("two, sharded, then three", 3, 4, ("two, sharded", 9), VALIDATES, strategy="fsdp", sharded=True),
    Run("two, sharded, then three, then one", 1, 12, ("two, sharded, then three", 12), VALIDATES),
    Run("one on two, three, one", 1, 6, ("one on two, then three", 7), {"accumulate_grad_batches": 2}),
    Run("sharing two", 2, 12, arguments=VALIDATES, sharing=2),
    Run("sharing two, sharded", 2, 12, ("sharing two", 2), VALIDATES, sharded=True, sharing=2),
    Run("sharing two on three", 3, 4, ("sharing two, sharded", 8), VALIDATES),
    Run("two on one", 1, 6, ("two", 3), VALIDATES),  # windows of 2, a validation after 4
    Run("two on one again", 1, 6, ("two on one", 8), VALIDATES),
    Run("two, deepspeed", 2, 6, ("two", 7), VALIDATES, strategy="deepspeed_stage_2", sharded=True),
    Run("two, deepspeed, then one", 1, 12, ("two, deepspeed", 9), VALIDATES),
    Run("two, deepspeed, then three", 3, 4, ("two, deepspeed", 9), VALIDATES, strategy="deepspeed_stage_3"),
]
if find_spec("deepspeed") is None:
    RUNS = [run for run in RUNS if "deepspeed" not in run.name]
if not HAS_FSDP2:
    RUNS = [run for run in RUNS if "shar" not in run.name]  # neither shards nor shares


def numbered(number):
    """Return samples with their index."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.arange(number), *(torch.randn(number, size, generator=generator) for size in (6, 2)))


class Net(LightningModule):
    """Records the samples of each optimizer step, and the logged values."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        self.mean, self.all, self.numbers = MeanMetric(), MeanMetric(), CatMetric()
        self.seen = UserList()  # not restored: the class is not the user's
        self.validated = UserList()
        self.epochs = {}

    def loss(self, batch):
        _, x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_model(self):
        if self.device_mesh is not None and "tensor_parallel" in self.device_mesh.mesh_dim_names:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)

    def training_step(self, batch, batch_idx):
        numbers, loss = batch[0], self.loss(batch)
        weight = self.trainer.loop.mean.batch_weight
        self.seen.append((self.trainer.progress.updates, numbers.tolist(), weight))
        counts = weight is None or weight > 0  # a padded sample has weight 0
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(numbers) * counts)
        self.log("largest", numbers.max().float(), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
        self.mean.update(loss.detach(), len(numbers) * counts)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        if counts:
            self.numbers.update(numbers.float())
        return loss

    def on_validation_epoch_start(self):
        if not self.trainer.sanity_checking:
            self.validated.append(self.trainer.global_step)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_train_epoch_end(self):
        values = {name: float(value) for name, value in self.trainer.callback_metrics.items() if name != "val_loss"}
        numbers = sorted(self.numbers.compute().tolist())
        self.numbers.reset()
        self.epochs[self.trainer.current_epoch] = values | {f"number {i}": n for i, n in enumerate(numbers)}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7), "interval": "step"}]


class Saver(Checkpoint):
    """Writes a checkpoint before the first batch and after batches, named after the number of optimizer steps.

    Args:
        folder: the folder of the checkpoints.
        steps: numbers of steps to save at, at the end of a window.
    """

    def __init__(self, folder, steps):
        self.folder, self.steps = folder, steps

    def save(self, trainer, *_):
        if trainer.global_step in self.steps and not trainer.loop.window.is_open:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")

    on_train_start = on_train_batch_end = save


def strategy_of(run):
    if run.sharing > 1:
        return ModelParallelStrategy(run.processes // run.sharing, run.sharing)
    return run.strategy if run.processes > 1 else "auto"


def train(run, folder):
    """Return the results of this rank."""
    seed_everything(7, verbose=False)
    module = Net()
    saver = Saver(folder / run.name, {one.start[1] for one in RUNS if one.start and one.start[0] == run.name})
    data = numbered(SAMPLES)
    with warnings.catch_warnings(action="ignore"):
        trainer = make_trainer(
            folder, devices=run.processes, strategy=strategy_of(run), max_epochs=EPOCHS, num_sanity_val_steps=0,
            enable_checkpointing=True, callbacks=[saver], plugins=[CheckpointFiles(sharded=run.sharded)],
            **run.arguments,
        )  # fmt: skip
        train_data = DataLoader(data, run.batch_size, shuffle=True, drop_last=run.drop_last, num_workers=run.workers)
        val = DataLoader(numbered(6), batch_size=1) if "val_check_interval" in run.arguments else None
        start = None if run.start is None else folder / run.start[0] / f"{run.start[1]}.ckpt"
        trainer.fit(module, train_data, val, ckpt_path=start)
    return {
        "weights": {name: value.clone() for name, value in module.net.state_dict().items()},
        "seen": module.seen, "validated": module.validated, "epochs": module.epochs,
        "global_step": trainer.global_step, "accumulate": trainer.accumulate_grad_batches,
        "lr": trainer.optimizers[0].param_groups[0]["lr"], "progress": trainer.progress.state_dict(),
    }  # fmt: skip


BY_NAME = {run.name: run for run in RUNS}
RESUMED = [
    pytest.param(run, marks=[pytest.mark.nightly] * (run.name == "two, deepspeed, then three"), id=run.name)
    for run in RUNS
    if run.start is not None
]


@pytest.fixture(scope="module")
def three(python_with_deepspeed):
    with Ranks(python_with_deepspeed, 3) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def results(ranks_with_deepspeed, three, tmp_path_factory):
    """Return the results of each rank of a run by name. Each run, and those that it starts from, run once."""
    folder = tmp_path_factory.mktemp("elastic")

    @cache
    def result(name):
        run = BY_NAME[name]
        if run.start is not None:
            result(run.start[0])
        if run.processes == 1:
            return [train(run, folder)]
        return {2: ranks_with_deepspeed, 3: three}[run.processes].call(train, run, folder)

    return result


def origin(run):
    """Return the run that ``run`` resumes."""
    return run if run.start is None else origin(BY_NAME[run.start[0]])


def updates(ranks):
    """Return the samples of each optimizer step over all ranks."""
    found = {}
    for rank in ranks:
        for update, numbers, weight in rank["seen"]:
            if weight != 0:
                found.setdefault(update, Counter()).update(numbers)
    return found


@pytest.mark.parametrize("run", RESUMED)
def test_resumed_run_equals_the_uninterrupted_run(results, run):
    """Compares the samples of each step, weights, counters, metrics, validations, and the accumulation."""
    first, ranks = origin(run), results(run.name)
    whole, *_ = wholes = results(first.name)
    expected = updates(wholes[:: first.sharing])
    assert updates(ranks[:: run.sharing]) == {step: one for step, one in expected.items() if step >= run.start[1]}
    assert len(expected) == (12 if run.drop_last else 15)
    full = 11 if run.drop_last else 13  # the last update of 12 samples
    for rank in ranks:
        torch.testing.assert_close(rank["weights"], whole["weights"], rtol=0, atol=1e-5)
        torch.testing.assert_close(rank["weights"], ranks[0]["weights"], rtol=0, atol=0)
        assert rank["global_step"] == whole["global_step"]
        assert rank["lr"] == pytest.approx(whole["lr"])
        for name in ("updates", "schedule_steps", "epoch"):
            assert rank["progress"][name] == whole["progress"][name]
        batches = Counter(update for update, *_ in rank["seen"])
        assert batches[full] == 12 // (run.processes // run.sharing * run.batch_size)
        assert rank["accumulate"] == run.arguments.get("accumulate_grad_batches", 1)  # the argument is unchanged
        if "val_check_interval" in run.arguments:
            assert rank["validated"] == [step for step in whole["validated"] if step >= run.start[1]]
            assert whole["validated"] == [2, 4, 7, 9, 12, 14]
    assert 2 in ranks[0]["epochs"]
    for epoch, values in ranks[0]["epochs"].items():  # with the batches before the checkpoint
        assert values == pytest.approx(whole["epochs"][epoch], abs=1e-5)
        assert values["loss"] == pytest.approx(values["mean"], abs=1e-5)


@needs_fsdp2
def test_processes_that_share_their_samples_count_them_once(results):
    shared, whole = results("sharing two"), results("two")[0]
    assert updates(shared[:1]) == updates(shared[1:])
    for rank in shared:
        for epoch, values in whole["epochs"].items():
            assert rank["epochs"][epoch] == pytest.approx(values, abs=1e-5)
