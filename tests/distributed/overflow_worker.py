"""Fits of ``test_overflow.py`` with gradients that overflow on one rank.

``python overflow_worker.py FOLDER`` saves the results of each rank to ``FOLDER/rank_R.pt``.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import worker  # next to this file
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from trainer.callbacks import OverflowReport
from trainer.errors import LossScaleCollapse

FAILING = {(1, 1), (1, 3), (1, 4)}  # in windows of 2, 2 and 1: one batch of each, on rank 1


class Together(nn.Module):
    """Computes the mean over ranks, forward and backward, as SyncBatchNorm does: all ranks must take part."""

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = torch.distributed.nn.functional.all_reduce(x.mean(0))  # type: ignore[no-untyped-call]
        return x + mean / worker.WORLD_SIZE


class Overflow(nn.Module):
    """Overflows in the forward pass at configured batches."""

    def __init__(self) -> None:
        super().__init__()
        self.now = False

    def forward(self, x: Tensor) -> Tensor:
        return x * 1e6 if self.now else x


class Module(worker.Regression):
    def __init__(self, failing: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.failing = failing
        self.net = nn.Sequential(nn.Linear(6, 16), Together(), nn.Dropout(0.1), Overflow(), nn.Linear(16, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net[3].now = (self.global_rank, batch_idx) in self.failing
        self.log("loss", loss := self.loss(batch), sync_dist=True)
        return loss


def fit(module: Any, **options: Any) -> dict[str, Any]:
    report = OverflowReport(**options)
    callbacks: list[Callback] = [report]
    found = worker.fit(
        module, precision=worker.precision_of("16-mixed"), accumulate_grad_batches=2, limit_val_batches=0,
        callbacks=callbacks,
    )  # fmt: skip
    found.pop("trainer")
    fields = ("rank", "batch_idx", "position", "window", "largest_scale", "error", "fails")
    found["reports"] = [
        {"step": one.step, "module": one.module, "kind": one.kind, "count": one.count}
        | {name: getattr(one.finding, name) for name in fields}
        for one in report.reports
    ]
    return found


def collapse(folder: Path) -> str:
    try:
        worker.fit(
            Module({(1, i) for i in range(5)}), precision=worker.precision_of("16-mixed"), limit_val_batches=0,
            enable_checkpointing=True,
            callbacks=[OverflowReport(collapse_after=4, dirpath=folder), ModelCheckpoint(folder / "checkpoints")],
        )  # fmt: skip
    except LossScaleCollapse as error:
        return str(error)
    return ""


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    off = {"after": None, "collapse_after": None, "at_floor": None}
    found: dict[str, Any] = {
        "first": fit(Module(FAILING), dirpath=folder),
        "window": fit(Module(FAILING), after=4, dirpath=folder),
        "without": fit(Module(FAILING), **off),
        "healthy": fit(Module(set()), at_step=1, dirpath=folder),
        "healthy without": fit(Module(set()), **off),
    }
    rank = torch.distributed.get_rank()
    found["collapse"] = collapse(folder)
    torch.save(found, folder / f"rank_{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # before the interpreter ends, with gloo's threads alive


if __name__ == "__main__":
    main()
