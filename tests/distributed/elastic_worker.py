"""Runs resumed with another number of ranks, started by torchrun or called in one process (see ``test_elastic.py``).

``elastic_worker.py FOLDER`` runs the entries of :data:`RUNS` for this world size in turn, and saves the results of each
rank to ``FOLDER/NUMBER_rank_R.pt``.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset
from torchmetrics import CatMetric, MeanMetric

from tests.support import HAS_FSDP2
from trainer import CheckpointFiles, Trainer

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
    shuffle: bool = True
    drop_last: bool = False
    workers: int = 0
    strategy: str = "ddp"
    sharded: bool = False
    sharing: int = 1


VALIDATES: dict[str, Any] = {"val_check_interval": 2}
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
    Run("two, sharded from the start", 2, 6, arguments=VALIDATES, strategy="fsdp", sharded=True),
    Run("two, sharded", 2, 6, ("two", 7), VALIDATES, strategy="fsdp", sharded=True),
    Run("two, sharded, then three", 3, 4, ("two, sharded", 9), VALIDATES, strategy="fsdp", sharded=True),
    Run("two, sharded, then three, then three", 3, 4, ("two, sharded, then three", 11), VALIDATES),
    Run("two, sharded, then three, then one", 1, 12, ("two, sharded, then three", 12), VALIDATES),
    Run("one on two, three, one", 1, 6, ("one on two, then three", 7), {"accumulate_grad_batches": 2}),
    Run("two that share", 2, 12, arguments=VALIDATES, sharing=2),
    Run("two that share, sharded", 2, 12, ("two that share", 2), VALIDATES, sharded=True, sharing=2),
    Run("two that share on three", 3, 4, ("two that share, sharded", 8), VALIDATES),
    Run("two that share on one", 1, 6, ("two that share", 3), VALIDATES),
    Run("two on one from the start", 1, 6, ("two", 0), VALIDATES),
    Run("two, sharded, on one from the start", 1, 12, ("two, sharded from the start", 0), VALIDATES),
    Run("two on one", 1, 6, ("two", 3), VALIDATES),  # windows of 2, a validation after 4
    Run("two on one again", 1, 6, ("two on one", 8), VALIDATES),
    Run("two, deepspeed", 2, 6, ("two", 7), VALIDATES, strategy="deepspeed_stage_2", sharded=True),
    Run(
        "two, deepspeed, then three", 3, 4, ("two, deepspeed", 9), VALIDATES, strategy="deepspeed_stage_3", sharded=True
    ),
    Run("two, deepspeed, then three, then one", 1, 12, ("two, deepspeed, then three", 12), VALIDATES),
]
"""Runs of one process are in two parts: before and after the others."""
if find_spec("deepspeed") is None:
    RUNS = [run for run in RUNS if "deepspeed" not in run.name]
if not HAS_FSDP2:
    RUNS = [run for run in RUNS if "shar" not in run.name]  # neither shards nor shares


class Numbered(Dataset[Any]):
    """Samples that return their index."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = (torch.randn(number, size, generator=generator) for size in (6, 2))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return index, self.x[index], self.y[index]


class Net(LightningModule):
    """Records the samples of each optimizer step, and the logged values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        self.mean, self.all, self.numbers = MeanMetric(), MeanMetric(), CatMetric()
        self.seen: list[tuple[int, list[int], float | None]] = []
        self.validated: list[int] = []
        self.epochs: dict[int, dict[str, float]] = {}

    def loss(self, batch: Any) -> Tensor:
        _, x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_model(self) -> None:
        if self.device_mesh is not None and "tensor_parallel" in self.device_mesh.mesh_dim_names:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        numbers, loss = batch[0], self.loss(batch)
        weight = self.trainer.loop.window.batch_weight
        self.seen.append((self.trainer.progress.updates, numbers.tolist(), weight))
        counts = weight is None or weight > 0  # a padded sample has weight 0
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(numbers) * counts)
        self.log("largest", numbers.max().float(), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
        self.mean.update(loss.detach(), len(numbers) * counts)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        if counts:
            self.numbers.update(numbers.float())
        return loss

    def on_validation_epoch_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append(self.trainer.global_step)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        values = {name: float(value) for name, value in self.trainer.callback_metrics.items() if name != "val_loss"}
        numbers = sorted(self.numbers.compute().tolist())
        self.numbers.reset()
        self.epochs[self.trainer.current_epoch] = values | {f"number {i}": n for i, n in enumerate(numbers)}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Saver(Checkpoint):
    """Writes a checkpoint before the first and after each batch.

    Files are named after the number of steps at the end of a window, and after steps and batches inside a window.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.ckpt_path is None:
            trainer.save_checkpoint(self.folder / "0.ckpt")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        inside = f" and {batch_idx}" if trainer.loop.window.is_open else ""
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}{inside}.ckpt")


def checkpoint(folder: Path, name: str, update: Any) -> Path:
    return folder / name / f"{update}.ckpt"


def strategy_of(run: Run) -> Any:
    if run.sharing > 1:
        return ModelParallelStrategy(run.processes // run.sharing, run.sharing)
    return run.strategy if run.processes > 1 else "auto"


def train(run: Run, folder: Path, **arguments: Any) -> dict[str, Any]:
    """Return the results of this rank."""
    seed_everything(7, verbose=False)
    module = Net()
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "devices": run.processes, "strategy": strategy_of(run),
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": EPOCHS,
        "num_sanity_val_steps": 0, "callbacks": [Saver(folder / run.name)],
        "plugins": [CheckpointFiles(sharded=run.sharded)],
    }  # fmt: skip
    trainer = Trainer(**(quiet | run.arguments | arguments))
    data = Numbered(SAMPLES)
    train_data = DataLoader(data, run.batch_size, shuffle=run.shuffle, drop_last=run.drop_last, num_workers=run.workers)
    val = DataLoader(Numbered(6), batch_size=1) if "val_check_interval" in run.arguments else None
    start = None if run.start is None else checkpoint(folder, *run.start)
    trainer.fit(module, train_data, val, ckpt_path=start)
    return {
        "weights": {name: value.clone() for name, value in module.net.state_dict().items()},
        "seen": module.seen, "validated": module.validated, "epochs": module.epochs,
        "global_step": trainer.global_step, "accumulate": trainer.accumulate_grad_batches,
        "lr": trainer.optimizers[0].param_groups[0]["lr"], "progress": trainer.progress.state_dict(),
    }  # fmt: skip


def train_all(folder: Path, processes: int, second: bool = False) -> dict[str, dict[str, Any]]:
    """Train the runs for this world size. For one process, either those that start from others, or the rest."""
    runs = [run for run in RUNS if run.processes == processes and (run.start is not None or not second)]
    if processes == 1:
        runs = [run for run in runs if (run.start is not None) == second]
    return {run.name: train(run, folder) for run in runs}


def main() -> None:
    folder, processes = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    found = train_all(folder, processes)
    torch.save(found, folder / f"{processes}_rank_{torch.distributed.get_rank()}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
