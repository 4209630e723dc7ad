"""Small fits of ``test_ddp.py`` on two ranks, started by each launcher.

``python worker.py FOLDER LAUNCHER`` trains a few small models on two gloo processes, one after the other, and saves the
results of each rank to ``FOLDER/rank_R.pt``. ``LAUNCHER`` is ``own`` (the Trainer starts the second process:
``devices=2, strategy="ddp"``), ``torchrun``, or ``fails``: one rank raises.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torchmetrics import MeanMetric

from trainer import Trainer
from trainer.precision import MixedPrecision

PRECISIONS: dict[str, Any] = {
    "32-true": "32-true",
    "16-mixed": lambda: MixedPrecision("float16", init_scale=1024.0),
    "bf16-mixed": "bf16-mixed",
}
WORLD_SIZE = 2
BATCH = 8
"""Samples in a batch over all processes."""


def precision_of(name: str) -> Any:
    given = PRECISIONS[name]
    return given() if callable(given) else given


def samples(number: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(number, 6, generator=generator), torch.randn(number, 2, generator=generator))


class Shard(Sampler[int]):
    """This rank's part of each global batch, so that any number of processes sees the same global batches."""

    def __init__(self, world_size: int) -> None:
        rank, size = int(os.environ.get("LOCAL_RANK", "0")), BATCH // world_size
        order = list(range(len(samples())))
        self.order = [i for batch in range(0, len(order), BATCH) for i in order[batch + rank * size :][:size]]

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Any:
        return iter(self.order)


class Regression(LightningModule):
    """Automatic optimization. Returns None or an infinite loss at configured ranks and batches."""

    def __init__(self, none_at: Any = (), inf_at: Any = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        self.none_at = set(none_at)
        self.inf_at = set(inf_at)

    def loss(self, batch: Any) -> Tensor:
        features, target = batch
        return nn.functional.mse_loss(self.net(features), target)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        where = (self.global_rank, batch_idx)
        if where in self.none_at:
            return None
        loss = self.loss(batch)
        if not self.none_at:  # synchronised logging waits for all ranks, in Lightning too
            self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss * float("inf") if where in self.inf_at else loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rank_mean", float(self.global_rank), sync_dist=True, batch_size=1 + 2 * self.global_rank)
        self.log("rank_sum", float(self.global_rank + 1), sync_dist=True, reduce_fx="sum")
        self.log("rank_max", float(self.global_rank), sync_dist=True, reduce_fx="max")
        self.log("own", float(self.global_rank), rank_zero_only=True)
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Changing(Regression):
    """Has buffers, random numbers and metrics that differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 2))
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.mean.update(loss.detach())
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.mean.compute(), sync_dist=True)
        self.mean.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), sync_dist=True)


class SavesEachBatch(Checkpoint):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.folder / f"batch_{batch_idx}.ckpt")


class Weighted(Regression):
    """Returns the mean over a number of samples configured by rank and batch, with that number as weight."""

    @staticmethod
    def count(rank: int, batch_idx: int) -> int:
        return (3, 1, 4, 0, 2, 4, 1, 3, 2, 2)[2 * batch_idx + rank]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        count = self.count(self.global_rank, batch_idx)
        features, target = (tensor[:count] for tensor in batch)
        return {"loss": self.loss((features, target)), "weight": torch.tensor(count)}


class Manual(Regression):
    """Manual optimization with two optimizers. Each step uses the parameters of one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.05) for i in (0, 2)]


class Seen(Callback):
    """The results of one rank."""

    def __init__(self) -> None:
        self.outcomes: list[bool] = []
        self.norms: list[float] = []
        self.synced: list[bool] = []

    def on_after_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any, outcome: Any) -> None:
        self.outcomes.append(outcome.skipped)
        if outcome.grad_norm is not None:
            self.norms.append(outcome.grad_norm.item())

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.synced.append(getattr(trainer.model, "require_backward_grad_sync", True))


class Fails(Regression):
    """Raises on one rank while the other waits for it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if (self.global_rank, batch_idx) == (1, 1):
            raise RuntimeError("rank 1 has had enough")
        return self.loss(batch)


def fit(
    module: LightningModule,
    *,
    world_size: int = WORLD_SIZE,
    batches: int = 5,
    val_batches: int = 2,
    ckpt_path: Path | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Train on ``world_size`` ranks with the same global batches for any number of ranks. Returns the results."""
    seen = Seen()
    callbacks = [seen, *arguments.pop("callbacks", [])]
    quiet = {
        "accelerator": "cpu",
        "devices": world_size,
        "strategy": "ddp" if world_size > 1 else "auto",
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "limit_train_batches": batches,
        "use_distributed_sampler": False,
    }
    trainer = Trainer(**{**quiet, **arguments, "callbacks": callbacks})
    own = arguments.get("use_distributed_sampler", False)
    train = DataLoader(samples(), batch_size=BATCH // world_size, sampler=None if own else Shard(world_size))
    has_validation = arguments.get("limit_val_batches", 1) != 0
    val = DataLoader(samples(4 * val_batches), batch_size=4) if has_validation else None
    trainer.fit(module, train, val, ckpt_path=ckpt_path)
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "outcomes": seen.outcomes,
        "norms": seen.norms,
        "synced": seen.synced,
        "global_step": trainer.global_step,
        "skipped_steps": trainer.skipped_steps,
        "scale": trainer.scaler.get_scale(),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "trainer": trainer,
        "sampler": type(trainer.train_dataloader.sampler).__name__,
    }


class Thaws(Callback):
    """Trains the first layer's weight from the second epoch on, and the last layer's before."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.net[0].weight.requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[0].weight.requires_grad_(trainer.current_epoch > 0)
        pl_module.net[2].weight.requires_grad_(trainer.current_epoch == 0)


def none_everywhere() -> dict[str, set[tuple[int, int]]]:
    """Returns None on one rank, at each position of a window of 3 (batches 0..4: a full window and one of 2)."""
    cases = {f"none at {i} on rank {rank}": {(rank, i)} for rank in range(2) for i in range(5)}
    return {**cases, "none in a whole window on one rank": {(1, 0), (1, 1), (1, 2)}, "none on both": {(0, 1), (1, 1)},
            "none in a whole window on both": {(rank, i) for rank in range(2) for i in range(3)}}  # fmt: skip


def scenarios(folder: Path) -> dict[str, Any]:
    """Run all scenarios in this order on all ranks."""
    both = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    found: dict[str, Any] = {}
    for name in PRECISIONS:
        found[f"automatic {name}"] = fit(Regression(), precision=precision_of(name), **both)
    found["fp32_modules"] = fit(Regression(), precision=MixedPrecision("bfloat16", fp32_modules=["net"]))
    found["bf16-true"] = fit(Regression(), precision="bf16-true")
    found["plain"] = fit(Regression())
    unused = DDPStrategy(find_unused_parameters=True)
    found["manual 32-true"] = fit(Manual(), strategy=unused, limit_val_batches=0)
    for name in ("16-mixed", "bf16-mixed"):
        strategy = DDPStrategy(find_unused_parameters=True)
        found[f"manual {name}"] = fit(Manual(), strategy=strategy, precision=precision_of(name), limit_val_batches=0)
    for name, where in none_everywhere().items():
        found[name] = fit(Regression(none_at=where), accumulate_grad_batches=3, max_epochs=1, limit_val_batches=0)
    unused = DDPStrategy(find_unused_parameters=True)
    found["none, looking for unused"] = fit(
        Regression(none_at={(1, 1), (0, 2)}), accumulate_grad_batches=3, max_epochs=1, strategy=unused,
        limit_val_batches=0,
    )  # fmt: skip
    for name in ("32-true", "16-mixed"):
        arguments = {"accumulate_grad_batches": 3, "precision": precision_of(name), "limit_val_batches": 0}
        found[f"weighted {name}"] = fit(Weighted(), **arguments)
    for name, ckpt_path in {"thawed": None, "thawed, resumed": folder / "thawed" / "middle.ckpt"}.items():
        saver = ModelCheckpoint(folder / "thawed", every_n_train_steps=7, filename="middle")
        arguments = {"callbacks": [Thaws(), saver], "enable_checkpointing": True, "limit_val_batches": 0}
        found[name] = fit(Regression(), ckpt_path=ckpt_path, **arguments)
    found["overflow"] = fit(Regression(inf_at={(1, 2)}), precision=precision_of("16-mixed"))
    saver = ModelCheckpoint(folder / "checkpoints", monitor="val_loss", filename="{epoch}", save_top_k=1)
    arguments = {"callbacks": [saver], "enable_checkpointing": True, "use_distributed_sampler": True}
    found["checkpoint"] = fit(Regression(), **arguments)
    found["checkpoint"]["best"] = saver.best_model_path
    trainer = found["checkpoint"]["trainer"]
    loader = DataLoader(samples(8), batch_size=4)
    found["validate"] = trainer.validate(Regression(), loader, ckpt_path=saver.best_model_path, verbose=False)
    found["resumed"] = fit(Regression(), max_epochs=1, limit_val_batches=0)
    found["resumed"]["trainer"].save_checkpoint(folder / "one_epoch.ckpt")
    found["resumed"] = resume(folder / "one_epoch.ckpt")
    torch.manual_seed(trainer.global_rank)
    arguments = {**both, "use_distributed_sampler": True, "val_check_interval": 2}
    found["whole"] = fit(Changing(), callbacks=[SavesEachBatch(folder)], enable_checkpointing=True, **arguments)
    for batch_idx in (1, 2, 4):  # between two windows, before a validation; inside a window; at the epoch's end
        path = folder / f"batch_{batch_idx}.ckpt"
        found[f"resumed after {batch_idx}"] = fit(Changing(), ckpt_path=path, **arguments)
    warnings.filterwarnings("ignore", "The checkpoint was written by a run of 1 processes")
    found["from one process"] = resume(folder / ALONE, precision=precision_of("16-mixed"), exact_resume=False)
    return found


ALONE = "alone.ckpt"


def one_epoch_alone(folder: Path) -> dict[str, Any]:
    """Train in this process with a reduced scale: a checkpoint to resume on several ranks, and the whole run."""
    arguments = {"world_size": 1, "precision": precision_of("16-mixed"), "limit_val_batches": 0}
    first = fit(Regression(inf_at={(0, 1)}), max_epochs=1, **arguments)
    first["trainer"].save_checkpoint(folder / ALONE)
    return resume(folder / ALONE, world_size=1, precision=precision_of("16-mixed"))


def resume(
    path: Path, world_size: int = WORLD_SIZE, precision: Any = "32-true", exact_resume: bool = True
) -> dict[str, Any]:
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy="ddp" if world_size > 1 else "auto", max_epochs=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, limit_train_batches=5,
        limit_val_batches=0, use_distributed_sampler=False, precision=precision, exact_resume=exact_resume,
    )  # fmt: skip
    module = Regression()
    train = DataLoader(samples(), batch_size=BATCH // world_size, sampler=Shard(world_size))
    trainer.fit(module, train, ckpt_path=path)
    scale, tracker = trainer.scaler.get_scale(), trainer.scaler.state_dict().get("_growth_tracker", 0)
    return {
        "weights": dict(module.state_dict()), "global_step": trainer.global_step, "scale": scale, "tracker": tracker
    }  # fmt: skip


def main() -> None:
    folder, launcher = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    if launcher == "fails":
        fit(Fails())
    found: dict[str, Any]
    if launcher == "own":
        found = scenarios(folder)
    else:
        found = {"automatic 32-true": fit(Regression(), accumulate_grad_batches=2, gradient_clip_val=0.5)}
    rank = torch.distributed.get_rank()
    for result in found.values():
        if isinstance(result, dict):
            result.pop("trainer", None)
    torch.save(found, folder / f"rank_{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # else gloo's threads may be alive when the interpreter ends: an abort


if __name__ == "__main__":
    main()
