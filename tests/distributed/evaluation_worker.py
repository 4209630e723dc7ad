"""Evaluations of ``test_evaluation.py`` with uneven inputs.

``torchrun ... evaluation_worker.py FOLDER`` saves the results of each rank to ``FOLDER/rank_R.pt``. :func:`scenarios`
runs the same in one process, for comparison.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
)
from torchmetrics import MeanMetric, MetricCollection, MinMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score
from torchmetrics.retrieval import RetrievalMAP

from trainer import Trainer
from trainer.engine import async_max


class Numbers(Dataset[Tensor]):
    """The numbers 0, 1, 2, ..."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index))


class Stream(IterableDataset[Tensor]):
    """The same samples without a length, divided among ranks by the iterator."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        rank, size = 0, 1
        if torch.distributed.is_initialized():
            rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return (torch.tensor(float(i)) for i in range(rank, self.count, size))


class Module(LightningModule):
    """Logs in all supported ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.mean = MeanMetric()
        self.least = MinMetric()
        self.auroc = BinaryAUROC()
        self.scores = MetricCollection(
            {"accuracy": MulticlassAccuracy(num_classes=3), "f1": MulticlassF1Score(num_classes=3)}
        )
        self.own = MeanMetric()
        self.seen: list[float] = []
        self.running: list[float] = []
        self.hooks: list[str] = []

    def forward(self, batch: Tensor) -> Tensor:
        output: Tensor = self.net(batch.reshape(-1, 1)).sum(1)
        return output

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch) - 1).square().mean()

    def evaluate(self, batch: Tensor, dataloader_idx: int = 0) -> None:
        self.seen += batch.tolist()
        self.running.append(float(self.net[1].running_mean.sum()))
        more = {"on_step": False, "on_epoch": True}
        self.log("mean", batch.mean(), sync_dist=True, **more)
        self.log("plain", batch.mean(), **more)
        self.log("sum", batch.sum(), sync_dist=True, reduce_fx="sum", **more)
        self.log("plain_sum", float(batch.sum()), reduce_fx="sum", **more)
        self.log("max", batch.max(), sync_dist=True, reduce_fx="max", **more)
        self.log("min", batch.min() - 10, reduce_fx="min", **more)
        self.log("weighted", batch.double().mean(), sync_dist=True, batch_size=3 * len(batch), **more)
        self.log("each", batch.mean(), sync_dist=True, on_step=True, on_epoch=True)
        self.log("output", self(batch).mean(), sync_dist=True, **more)
        if 4.0 in batch.tolist():
            self.log("rare", batch.max(), **more)
        label = batch.long() % 3
        scores = nn.functional.one_hot((batch.long() // 2) % 3, 3).float()
        self.mean(batch)
        self.least(batch)
        self.auroc(batch / 100, batch.long() % 2)
        self.scores(scores, label)
        self.own.update(batch)
        self.log("mean_object", self.mean, **more)
        self.log("min_object", self.least, **more)
        self.log("auroc", self.auroc, **more)
        self.log_dict(self.scores, **more)

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate(batch, dataloader_idx)

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate(batch, dataloader_idx)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.hooks.append(f"start {dataloader_idx} {batch_idx}")

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.hooks.append(f"end {dataloader_idx} {batch_idx}")
        self.log("in_hook", torch.cat([*batch]).mean() if isinstance(batch, list) else batch.mean(), on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.log("own", self.own.compute(), sync_dist=True)
        self.log("of_rank", float(self.global_rank))
        self.own.reset()

    def on_train_epoch_end(self) -> None:
        self.hooks.append("train")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "of_rank"}}


class OneBatch(Module):
    """One batch for several dataloaders side by side."""

    def evaluate(self, batch: Any, dataloader_idx: int = 0) -> None:
        super().evaluate(torch.cat(batch))


class Drawing(LightningModule):
    """Uses ``dataloader_iter``."""

    def validation_step(self, dataloader_iter: Any) -> None:
        self.log("mean", next(dataloader_iter)[0].mean(), batch_size=1)


class Watching(Module):
    """Calls a collective in each batch, or in one batch."""

    how = ""

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        if self.how == "gather" or (self.how == "gather in the first" and batch_idx == 0):
            self.all_gather(torch.ones(1))
        if self.how == "raw":
            torch.distributed.all_reduce(torch.ones(1))
        self.log("mean", batch.mean() + 0 * self(batch).mean())


class Lists(Module):
    """A metric with lists of tensors, which are gathered one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.lists = RetrievalMAP()
        self.lists._reductions = dict.fromkeys(self.lists._reductions)

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.lists.update(batch / 10, batch.long() % 2, indexes=batch.long() % 1)


class OnStep(Module):
    """A metric that is synchronized at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.eager = MeanMetric(dist_sync_on_step=True)

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.eager(batch)


class Rows(Callback):
    """The per-batch values of one rank."""

    def __init__(self) -> None:
        self.each: list[float] = []

    def on_validation_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        if not trainer.sanity_checking:
            self.each += [float(v) for name, v in trainer._results.metrics(True)["log"].items() if name == "each_step"]


def build(strategy: str, world_size: int, **arguments: Any) -> Trainer:
    quiet = {
        "accelerator": "cpu", "devices": world_size, "strategy": strategy if world_size > 1 else "auto",
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "max_epochs": 1,
    }  # fmt: skip
    return Trainer(**{**quiet, **arguments})


def sizes(*counts: int, batch_size: int = 1, **options: Any) -> Any:
    loaders = [DataLoader(Numbers(count), batch_size=batch_size, **options) for count in counts]
    return loaders if len(loaders) > 1 else loaders[0]


class Evens(BatchSampler):
    """A custom batch sampler."""


# name: (dataloaders, arguments of the Trainer)
PASSES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "five": (lambda: sizes(5), {}),
    "four": (lambda: sizes(4), {}),
    "one": (lambda: sizes(1), {}),
    "seven by two": (lambda: sizes(7, batch_size=2), {}),
    "several": (lambda: sizes(3, 1, 4), {}),
    "several, the first small": (lambda: sizes(1, 5), {}),
    "shuffled": (lambda: sizes(5, shuffle=True), {}),
    "subset": (lambda: DataLoader(Numbers(20), sampler=SubsetRandomSampler([3, 1, 4, 15, 9])), {}),
    "batch sampler": (lambda: DataLoader(Numbers(5), batch_sampler=Evens(SequentialSampler(Numbers(5)), 1, False)), {}),
    "stream": (lambda: DataLoader(Stream(5)), {}),
    "stream of one": (lambda: DataLoader(Stream(1)), {}),
    "streams": (lambda: [DataLoader(Stream(1)), DataLoader(Stream(3))], {}),
    "side by side": (lambda: CombinedLoader(sizes(5, 5), "max_size"), {}),
    "workers": (lambda: sizes(5, num_workers=1), {}),
}  # fmt: skip
LIMITED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "limit 1": (lambda: sizes(5), {"limit_val_batches": 1}),
    "limit 0.5": (lambda: sizes(5), {"limit_val_batches": 0.5}),
    "limit 0.5 of three": (lambda: sizes(3), {"limit_val_batches": 0.5}),
    "padded": (lambda: sizes(5), {"pad_evaluation": True}),
    "own sampler": (lambda: sizes(5, sampler=DistributedSampler(Numbers(5), shuffle=False)), {}),
    "not divided": (lambda: sizes(5), {"use_distributed_sampler": False}),
}


MORE = ("five", "four", "one", "several", "shuffled", "streams")
"""On three processes, too."""
SHARDED = ("five", "one", "several", "several, the first small", "stream", "stream of one", "streams", "side by side")


def validate(strategy: str, world_size: int, make: Callable[[], Any], arguments: dict[str, Any]) -> dict[str, Any]:
    module, rows = Module(), Rows()
    given = make()
    if isinstance(given, CombinedLoader) and given._mode != "sequential":
        module = OneBatch()
    trainer = build(strategy, world_size, callbacks=[rows], **arguments)
    results = trainer.validate(module, given, verbose=False)
    return {
        "results": results,
        "seen": module.seen,
        "callback_metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "num_val_batches": trainer.num_val_batches,
        "hooks": module.hooks,
        "each": rows.each,
    }


def fit(strategy: str, world_size: int, counts: tuple[int, ...], folder: Path, **arguments: Any) -> dict[str, Any]:
    module, rows = Module(), Rows()
    monitor = arguments.pop("monitor", "plain")
    saver = ModelCheckpoint(folder / f"{strategy}_{world_size}", monitor=monitor, filename="{epoch}-{plain:.3f}")
    arguments = {"max_epochs": 3, "enable_checkpointing": True, "callbacks": [rows, saver], **arguments}
    trainer = build(strategy, world_size, **arguments)
    trainer.fit(module, sizes(8, batch_size=4 // world_size), sizes(*counts))
    return {
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "best": saver.best_model_path,
        "score": float(saver.best_model_score),
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "seen": module.seen,
        "hooks": module.hooks,
        "each": rows.each,
        "running": module.running,
    }


def failure(strategy: str, world_size: int, module: Watching, count: int, **arguments: Any) -> dict[str, Any]:
    """Return the errors and warnings of an evaluation with collectives in its batches."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            results = build(strategy, world_size, **arguments).validate(module, sizes(count), verbose=False)
        except Exception as error:
            return {"raised": f"{type(error).__name__}: {error}", "warned": []}
    return {"results": results, "warned": [str(one.message) for one in caught]}


def watching(how: str) -> Watching:
    module = Watching()
    module.how = how
    return module


FAILURES: dict[str, tuple[Callable[[], Module], int, dict[str, Any]]] = {
    "gather": (lambda: watching("gather"), 5, {}),
    "raw": (lambda: watching("raw"), 5, {}),
    "gather in the first": (lambda: watching("gather in the first"), 5, {}),
    "gather, even": (lambda: watching("gather"), 4, {}),
    "gather, padded": (lambda: watching("gather"), 5, {"pad_evaluation": True}),
    "on step": (OnStep, 5, {}),
    "on step, padded": (OnStep, 5, {"pad_evaluation": True}),
    "lists": (Lists, 5, {}),
    "lists, even": (Lists, 4, {}),
}


def scenarios(folder: Path, world_size: int, strategy: str = "ddp") -> dict[str, Any]:
    """Run all scenarios in this order on all ranks."""
    found: dict[str, Any] = {}
    for name, (make, arguments) in {**PASSES, **(LIMITED if world_size > 1 else {})}.items():
        found[name] = validate(strategy, world_size, make, arguments)
    module = Module()
    results = build(strategy, world_size).test(module, sizes(5), verbose=False)
    found["test"] = {"results": results, "seen": module.seen}
    for count in (5, 1):
        predictions = build(strategy, world_size).predict(Module(), sizes(count))
        found[f"predict {count}"] = [float(one) for one in predictions or []]
    for count in (5, 1):
        found[f"fit {count}"] = fit(strategy, world_size, (count,), folder / f"fit_{count}")
    found["fit interval"] = fit(
        strategy, world_size, (5,), folder / "interval", val_check_interval=1, limit_val_batches=3
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_max, "SECONDS", 0.0)  # emulates slow batches: ranks agree before each one whether to stop
        found["fit several"] = fit(
            strategy, world_size, (5, 5, 5), folder / "several", monitor="plain/dataloader_idx_2"
        )
    for count in (5, 1):
        found[f"drawn {count}"] = build(strategy, world_size).validate(Drawing(), sizes(count), verbose=False)
    if world_size > 1:
        for name, (make, count, arguments) in FAILURES.items():
            found[f"failure {name}"] = failure(strategy, world_size, make(), count, **arguments)
    if world_size == 2 and hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        for name in SHARDED:
            found[f"sharded {name}"] = validate("fsdp", world_size, *PASSES[name])
        for name in ("gather", "raw", "gather, even"):
            make, count, arguments = FAILURES[name]
            found[f"failure sharded {name}"] = failure("fsdp", world_size, make(), count, **arguments)
        for count in (5, 1):
            found[f"sharded fit {count}"] = fit("fsdp", world_size, (count,), folder / f"sharded_fit_{count}")
        predictions = build("fsdp", world_size).predict(Module(), sizes(5))
        found["sharded predict"] = [float(one) for one in predictions or []]
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    warnings.filterwarnings("ignore", ".*smaller than the logging interval")
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size == 2:
        found = scenarios(folder, world_size)
    else:
        found = {name: validate("ddp", world_size, *PASSES[name]) for name in MORE}
    torch.save(found, folder / f"rank_{torch.distributed.get_rank()}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
