"""The training run: a small classifier in a set-up with every kind of state that could be lost."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics.classification import MulticlassAccuracy

FEATURES, CLASSES = 8, 4


@dataclass(frozen=True)
class Setup:
    """The configuration of a training run.

    Attributes:
        batches, epochs, batch_size: sizes of the training data.
        loader: ``"map"``, ``"stateful"`` (torchdata's dataloader) or ``"iterable"`` (data without a length or a state).
        workers: number of workers of the training dataloader.
        augment: change each sample at random, by numpy's, Python's and torch's random numbers.
        overflows: batches, counted from the start of the run, with a loss multiplied by 1e30, so that fp16 skips the
            step.
        optimizers: 1 or 2; with 2, each trains a part of the net's layers.
        manual: use manual optimization.
        schedule: ``""``, ``"step"``, ``"epoch"`` or ``"plateau"``.
        average: ``""``, ``"ema"`` or ``"mean"``, by Lightning's callbacks.
        metrics: log the loss and a torchmetrics accuracy, at each step and each epoch.
        validate_every: batches between two validations; 0 disables validation.
        ballast: additional megabytes of a checkpoint.
        pace: additional seconds per batch.
        batch_norm: use BatchNorm instead of LayerNorm.
    """

    batches: int = 12
    epochs: int = 2
    batch_size: int = 4
    loader: str = "map"
    shuffle: bool = True
    workers: int = 0
    augment: bool = False
    dropout: float = 0.0
    accumulate: int = 1
    precision: str = "32-true"
    overflows: tuple[int, ...] = ()
    optimizers: int = 1
    manual: bool = False
    schedule: str = ""
    average: str = ""
    metrics: bool = False
    validate_every: int = 0
    ballast: int = 0
    pace: float = 0.0
    batch_norm: bool = True

    def for_lightning(self) -> Setup:
        """Return the nearest set-up for Lightning on a CPU: without fp16 and skipped steps."""
        if self.precision != "16-mixed":
            return self
        return replace(self, precision="bf16-mixed", overflows=())


EVERYTHING = Setup(
    batches=40, epochs=3, workers=2, augment=True, dropout=0.2, accumulate=3, precision="16-mixed",
    overflows=(1, 7, 50, 51, 52, 90), schedule="step", average="ema", metrics=True, validate_every=15,
)  # fmt: skip
"""The set-up of runs that are killed."""


class Samples(Dataset[tuple[Tensor, Tensor, int]]):
    """Points and their class; with ``augment``, different at each access.

    Args:
        number: number of samples.
        augment: see :class:`Setup`.
        fault: called with the index before a sample is created, to cause a fault in a worker.
    """

    def __init__(self, number: int, augment: bool, fault: Callable[[int], None] | None = None) -> None:
        generator = torch.Generator().manual_seed(3)
        self.points = torch.randn(number, FEATURES, generator=generator)
        self.labels = torch.randint(0, CLASSES, (number,), generator=generator)
        self.augment, self.fault = augment, fault

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        if self.fault is not None:
            self.fault(index)
        x = self.points[index]
        if self.augment:
            noise = torch.from_numpy(np.random.randn(FEATURES).astype(np.float32))
            x = x * (1 + 0.1 * random.random()) + 0.1 * noise + 0.1 * torch.randn(FEATURES)
        return x, self.labels[index], index


class Stream(IterableDataset[tuple[Tensor, Tensor, int]]):
    """Yield the same samples in order, without a length or a state."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        return (self.samples[i] for i in range(len(self.samples)))


def training_data(setup: Setup, ranks: int = 1, fault: Callable[[int], None] | None = None) -> Any:
    """Return the training dataloader; ``setup.batches`` is the number of batches of each of ``ranks`` ranks."""
    samples = Samples(setup.batches * setup.batch_size * ranks, setup.augment, fault)
    options: dict[str, Any] = {"batch_size": setup.batch_size, "num_workers": setup.workers}
    if setup.workers:
        options["multiprocessing_context"] = "fork"
    if setup.loader == "iterable":
        return DataLoader(Stream(samples), **options)
    if setup.loader == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(samples, shuffle=setup.shuffle, **options)
    return DataLoader(samples, shuffle=setup.shuffle, **options)


def validation_data(setup: Setup) -> Any:
    """Return a dataloader with three batches, or None without validation."""
    return DataLoader(Samples(12, augment=False), batch_size=4) if setup.validate_every else None


class Classifier(LightningModule):
    """The net, its losses and its optimizers.

    Args:
        setup: the set-up.
        diary: called after each batch with (epoch, batch_idx, sample ids, loss).
    """

    def __init__(self, setup: Setup, diary: Callable[..., None] | None = None) -> None:
        super().__init__()
        generator_state = torch.get_rng_state()
        torch.manual_seed(5)
        norm = nn.BatchNorm1d(16) if setup.batch_norm else nn.LayerNorm(16)
        self.first = nn.Sequential(nn.Linear(FEATURES, 16), norm, nn.ReLU(), nn.Dropout(setup.dropout))
        self.last = nn.Linear(16, CLASSES)
        torch.set_rng_state(generator_state)
        self.setup_, self.diary = setup, diary
        self.automatic_optimization = not setup.manual
        if setup.metrics:
            self.accuracy = MulticlassAccuracy(CLASSES)
            self.val_accuracy = MulticlassAccuracy(CLASSES)
        if setup.ballast:
            self.register_buffer("ballast", torch.zeros(setup.ballast << 18))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, labels, ids = batch
        logits = self(x)
        loss = F.cross_entropy(logits, labels)
        if self.setup_.metrics:
            self.accuracy(logits, labels)
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            self.log("loss", loss, on_step=True, on_epoch=True)
        self.line = self.current_epoch, batch_idx, ids.tolist(), loss.item()
        if self.current_epoch * self.setup_.batches + batch_idx in self.setup_.overflows:
            loss = loss * 1e30
        if self.automatic_optimization:
            return loss
        self.step_by_hand(loss, batch_idx)
        return None

    def on_train_batch_end(self, *_: Any) -> None:
        if self.diary is not None:  # not in training_step, which a diagnosis may run again
            self.diary(*self.line)

    def step_by_hand(self, loss: Tensor, batch_idx: int) -> None:
        """Use manual optimization: the second optimizer steps at every second batch only."""
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for i, optimizer in enumerate(optimizers):
            if batch_idx % (i + 1) == 0:
                optimizer.step()
        if self.setup_.schedule == "step":
            schedules = self.lr_schedulers()
            for schedule in schedules if isinstance(schedules, list) else [schedules]:
                schedule.step()  # type: ignore[union-attr]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, labels, _ = batch
        logits = self(x)
        loss = F.cross_entropy(logits, labels)
        self.log("val_loss", loss)
        if self.setup_.metrics:
            self.val_accuracy(logits, labels)
            self.log("val_accuracy", self.val_accuracy)

    def configure_optimizers(self) -> Any:
        setup, lr = self.setup_, torch.optim.lr_scheduler
        if setup.optimizers == 1:
            optimizers: list[Any] = [torch.optim.AdamW(self.parameters(), lr=0.02)]
        else:
            optimizers = [
                torch.optim.SGD(self.first.parameters(), lr=0.05, momentum=0.9),
                torch.optim.Adam(self.last.parameters(), lr=0.01),
            ]
        schedules: list[Any] = []
        for optimizer in optimizers:
            if setup.schedule == "step":
                total = setup.batches * setup.epochs + 1
                schedules.append(
                    {"scheduler": lr.OneCycleLR(optimizer, max_lr=0.05, total_steps=total), "interval": "step"}
                )
            elif setup.schedule == "epoch":
                schedules.append(lr.ExponentialLR(optimizer, 0.7))
            elif setup.schedule == "plateau":
                plateau = lr.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
                schedules.append(
                    {"scheduler": plateau, "monitor": "val_loss" if setup.validate_every else "loss_epoch"}
                )
        return optimizers, schedules


class Averaging:
    """Lightning's weight averaging for this set-up."""

    @staticmethod
    def callbacks(setup: Setup) -> list[Callback]:
        """Return the callbacks."""
        from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging

        if setup.average == "ema":
            return [EMAWeightAveraging(decay=0.9)]
        return [WeightAveraging()] if setup.average == "mean" else []


class Diary:
    """Append one line of JSON per batch to ``<folder>/batches_<rank>.jsonl``, also in runs that are killed."""

    def __init__(self, folder: Path, rank: int = 0, pace: float = 0.0) -> None:
        self.file = os.open(folder / f"batches_{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.pace = pace

    def __call__(self, epoch: int, batch: int, ids: list[int], loss: float) -> None:
        line = json.dumps([epoch, batch, ids, loss.hex(), os.getpid()])
        os.write(self.file, f"{line}\n".encode())
        if self.pace:
            time.sleep(self.pace)


def read_diary(path: Path) -> list[tuple[int, int, list[int], str, int]]:
    """Read the lines of a diary: (epoch, batch_idx, sample ids, loss, process)."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [tuple(json.loads(line)) for line in lines if line.endswith("]")]  # type: ignore[misc]


def arguments_of(setup: Setup) -> dict[str, Any]:
    """Return the set-up as arguments of a Trainer."""
    checks: dict[str, Any] = {"limit_val_batches": 0}
    if setup.validate_every:
        checks = {"val_check_interval": setup.validate_every, "check_val_every_n_epoch": 1, "num_sanity_val_steps": 1}
        if setup.loader == "iterable" or setup.validate_every > setup.batches:
            checks["check_val_every_n_epoch"] = None
    return {
        "max_epochs": setup.epochs,
        "precision": setup.precision,
        "accumulate_grad_batches": 1 if setup.manual else setup.accumulate,
        **checks,
    }


def state_of(trainer: Any, module: Classifier) -> dict[str, Any]:
    """Return the state by which two runs are compared at the end."""
    scaler = getattr(trainer, "scaler", None) or getattr(trainer.precision_plugin, "scaler", None)
    averages = [vars(callback).get("_average_model") for callback in trainer.callbacks]
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "averages": [parts(average.state_dict()) for average in averages if average is not None],
        "optimizers": [parts(optimizer.state_dict()) for optimizer in trainer.optimizers],
        "schedules": [
            {k: v for k, v in config.scheduler.state_dict().items() if not callable(v)}
            for config in trainer.lr_scheduler_configs
        ],
        "scaler": scaler.state_dict() if scaler is not None else {},
        "metrics": {name: float(value).hex() for name, value in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
    }


def parts(state: Any) -> Any:
    """Return ``state`` with this rank's part of each sharded tensor."""
    if isinstance(state, Mapping):
        return {key: parts(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [parts(value) for value in state]
    return state.to_local() if isinstance(state, DTensor) else state


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Return the places at which two states differ, bit for bit (NaN equals NaN)."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        same = same and one.cpu().numpy().tobytes() == other.cpu().numpy().tobytes()
        return [] if same else [where]
    if isinstance(one, dict) and isinstance(other, dict):
        found = [f"{where}.{key}" for key in one.keys() ^ other.keys()]
        for key in one.keys() & other.keys():
            found += differences(one[key], other[key], f"{where}.{key}")
        return sorted(found)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return [where]
        return [
            line for i, (a, b) in enumerate(zip(one, other, strict=True)) for line in differences(a, b, f"{where}.{i}")
        ]
    same = one == other or (one != one and other != other)
    return [] if same else [where]
