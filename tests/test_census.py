"""Compares every reachable value of a resumed run and the uninterrupted run, in training and after it."""

from __future__ import annotations

import random
import warnings
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanMetric

from tests import census
from tests.parity import looks_in
from tests.support import adamw, make_trainer, manual_step, tiered
from trainer.callbacks import Curves, NonFiniteGuard, OverflowReport, ScaleMonitor
from trainer.record.run_recorder import RunRecorder

EPOCHS, BATCHES = 3, 4


class Points(Dataset[Tensor]):
    """Augmented at random with the global generators and its own generator."""

    def __init__(self, number=8):
        self.number, self.loaded = number, 0
        self.noise = np.random.default_rng(3)

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        self.loaded += 1
        shift = random.random() + np.random.rand() + self.noise.random()
        return torch.arange(4.0).add(index).sin() + 0.1 * torch.rand(4) + 0.01 * shift


class Stream(IterableDataset[Tensor]):
    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        for index in range(8):
            yield torch.arange(4.0).add(index + self.passes).cos() + 0.1 * torch.rand(4)


class CountsEpochs(Sampler[int]):
    epochs = 0

    def __len__(self):
        return 8

    def __iter__(self):
        self.epochs += 1
        return iter(torch.randperm(8, generator=torch.Generator().manual_seed(self.epochs)).tolist())


class Net(LightningModule):
    """Has batch norm, dropout, a metric, a schedule, and batches that overflow."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))
        self.head = nn.Linear(8, 1)
        self.mean = MeanMetric()
        self.register_buffer("seen", torch.zeros(4), persistent=False)  # differs between ranks
        self.automatic_optimization = not case.manual

    def loss(self, batch):
        return self.head(self.backbone(self.rows(batch))).float().square().mean()

    def rows(self, batch):
        rows = torch.cat([one for one in torch.utils._pytree.tree_leaves(batch) if one is not None])
        return rows.to(self.head.weight.dtype)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.seen += self.rows(batch).mean(0)
        if self.trainer.progress.batches in self.case.overflows:
            loss = loss * 1e30
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        if not self.case.manual:
            return loss
        manual_step(self, loss)
        return None

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return self.case.optimizer([one for one in self.parameters() if one.requires_grad])


def plateau(parameters):
    optimizer = torch.optim.SGD(parameters, 0.01, momentum=0.9)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def nested(parameters):
    optimizer = torch.optim.AdamW(parameters, 0.01, fused=True)
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    decay = lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (number + 1))
    return [optimizer], [{"scheduler": lr_scheduler.SequentialLR(optimizer, [warmup, decay], [3]), "interval": "step"}]


@dataclass
class Case:
    """A training, and the moments of the checkpoints from which it is resumed."""

    loader: Callable[[], Any] = lambda: DataLoader(Points(), 2, shuffle=True)
    validation: Callable[[], Any] = lambda: DataLoader(Points(4), 2)
    optimizer: Callable[[Any], Any] = adamw
    callbacks: Callable[[], list[Callback]] = list
    manual: bool = False
    overflows: tuple[int, ...] = ()
    places: tuple[str, ...] = ("batch 2", "batch 6")
    arguments: dict[str, Any] = field(default_factory=dict)


MOMENTS = {
    "on_train_batch_start": "before batch",
    "on_train_batch_end": "batch",
    "on_validation_batch_end": "inside validation",
    "on_validation_end": "validation",
    "on_train_epoch_end": "epoch",
}


@looks_in(*MOMENTS)
class Probe(Checkpoint):
    """Saves at each place, and takes the census before some batches."""

    def __init__(self, folder, places, probes):
        self.folder, self.places, self.probes = folder, places, probes
        self.taken = UserDict[str, census.Census]()

    def look(self, hook, trainer):
        place = f"{MOMENTS[hook]} {trainer.progress.batches}"
        if place in self.probes:
            self.taken[place] = take(trainer, trainer.lightning_module)
        if place in self.places:
            trainer.save_checkpoint(self.folder / f"{place}.ckpt")


def take(trainer, module):
    loop = trainer.loop
    published = [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics]  # brought up to date
    return census.take({
        "published": published,
        "module": module,
        "optimizers": trainer.optimizers,
        "schedules": [config.scheduler for config in trainer.lr_scheduler_configs],
        "callbacks": {type(one).__name__: one for one in trainer.callbacks if not isinstance(one, Probe)},
        "progress": trainer.progress,
        "scaler": trainer.scaler,
        "window": loop.window,
        "metrics": {key: one for key, one in loop.metrics.entries.items() if one.has_value or one._weight},
        "workers": [one.state_dict().get("workers") for one in getattr(loop.batches.loaders, "_loaders", ())],
        "batches": loop.batches,
        "loop": loop,
        "eval_loops": trainer.eval_loops,
        "strategy": trainer.strategy,
        "trainer": trainer,
    }, without=(Probe, RunRecorder, Curves))  # fmt: skip  # these have times


def train(case, folder, seed, start=None):
    folder.mkdir(exist_ok=True)
    torch.manual_seed(5)
    module = Net(case)
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(seed)
    probe = Probe(folder, () if start else case.places, ("before batch 5", "before batch 9"))
    options = {"max_epochs": EPOCHS, "enable_checkpointing": True, "log_every_n_steps": 1}
    for name, value in case.arguments.items():
        options[name] = value() if isinstance(value, partial) else value
    trainer = make_trainer(folder, callbacks=[*case.callbacks(), probe], num_sanity_val_steps=0, **options)
    trainer.fit(module, case.loader(), case.validation(), ckpt_path=start)
    return {**probe.taken, "after the fit": take(trainer, module)}


KEPT_WORKER = {"num_workers": 1, "persistent_workers": True}

CASES = {
    "16-mixed, after an overflow, inside a window": Case(
        overflows=(2, 3), places=("batch 3", "batch 5"), optimizer=nested,
        callbacks=lambda: [ScaleMonitor(), OverflowReport(after=None)],
        arguments={"precision": "16-mixed", "accumulate_grad_batches": 3},
    ),
    "bf16-mixed, averages": Case(
        callbacks=lambda: [EMAWeightAveraging(decay=0.9), LearningRateMonitor()], optimizer=plateau,
        places=("validation 4",),
        arguments={"precision": "bf16-mixed", "logger": CSVLogger},
    ),
    "bf16-true, callbacks": Case(
        callbacks=lambda: [
            EarlyStopping("val_loss", patience=5), Timer(), DeviceStatsMonitor(), Curves(), NonFiniteGuard()
        ],
        optimizer=plateau, places=("epoch 8",), arguments={"precision": "bf16-true", "logger": CSVLogger},
    ),
    "manual": Case(manual=True, overflows=(1,), arguments={"precision": "16-mixed"}, places=("epoch 4",)),
    "workers": Case(
        loader=lambda: DataLoader(Points(), 2, shuffle=True, **KEPT_WORKER), places=("batch 6",)
    ),
    "stateful": Case(loader=lambda: StatefulDataLoader(Points(), 2, shuffle=True), places=("batch 3",)),
    "iterable": Case(loader=lambda: DataLoader(Stream(), 2), places=("batch 3",)),
    "combined": Case(
        loader=lambda: CombinedLoader(
            [DataLoader(Points(), 2, sampler=CountsEpochs()), DataLoader(Points(4), 2, shuffle=True)], "max_size_cycle"
        ),
        places=("batch 6",), arguments={"accumulate_grad_batches": 2},
    ),
    "validation": Case(
        validation=lambda: DataLoader(
            Points(4), 2, shuffle=True, generator=torch.Generator().manual_seed(3), **KEPT_WORKER
        ),
        places=("inside validation 8",),
    ),
    "swa": Case(callbacks=lambda: [StochasticWeightAveraging(0.01, swa_epoch_start=1)], places=("epoch 8",)),
    "finetuning": Case(callbacks=lambda: [BackboneFinetuning(1, lambda _: 1.5)], places=("batch 6",)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", tiered(CASES, quick=("16-mixed, after an overflow, inside a window", "manual", "stateful"))
)
def test_state_is_equal_after_a_resume(name, tmp_path):
    case = CASES[name]
    if case.arguments.get("logger") is CSVLogger:
        case.arguments["logger"] = CSVLogger(tmp_path)
    with warnings.catch_warnings(action="ignore"):
        whole = train(case, tmp_path / "whole", 0)
        found = {}
        for place in case.places:
            resumed = train(case, tmp_path / place, 1, tmp_path / "whole" / f"{place}.ckpt")
            for moment, taken in resumed.items():
                if lines := census.differences(whole[moment], taken):
                    found[f"resumed after {place}, {moment}"] = lines
    assert found == {}, "\n".join(f"{moment}\n  " + "\n  ".join(lines) for moment, lines in found.items())


def test_census_sees_everything():
    class Slots:
        __slots__ = ("number",)

    def state(number):
        slots = Slots()
        slots.number = number
        tensor = nn.Parameter(torch.full((2,), 1.0))
        tensor.grad = torch.full((2,), float(number))
        generators = [random.Random(number), np.random.default_rng(number), torch.Generator().manual_seed(number)]
        kinds = {"slots": slots, "grads": {1: (tensor,)}, "array": np.full(3, number)}
        return {**kinds, "generators": generators, "same": 5}

    found = [line.partition(":")[0] for line in census.differences(census.take(state(1)), census.take(state(2)))]
    assert found == ["array", "generators[0]", "generators[1]", "generators[2]", "grads[1][0].grad", "slots.number"]
    one, other = (census.take({"tensor": torch.zeros(2, dtype=dtype)}) for dtype in (torch.float32, torch.bfloat16))
    assert len(census.differences(one, other)) == 1
