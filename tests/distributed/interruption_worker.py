"""Fits of ``test_interruption.py`` that are ended by signals on one rank or on both.

``python interruption_worker.py FOLDER`` saves the results of each rank to ``FOLDER/rank_R.pt``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import worker  # next to this file
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint


class Quiet(worker.Regression):
    """Logs nothing, because logging waits for the other rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


class Signalled(Callback):
    """Sends a signal to itself at configured ranks and batches. The ranks have different speeds."""

    def __init__(
        self, where: dict[tuple[int, int], int], seconds: float, in_validation: tuple[int, int] | None
    ) -> None:
        self.where, self.seconds, self.in_validation = where, seconds, in_validation
        self.validated = 0
        self.steps: list[int] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if (number := self.where.get((trainer.global_rank, trainer.global_step))) is not None:
            os.kill(os.getpid(), number)
        time.sleep(self.seconds * (1 + trainer.global_rank))

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.validated = batch_idx + 1
        if self.in_validation == (trainer.global_rank, batch_idx):
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self.seconds * (1 + trainer.global_rank))

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.steps.append(trainer.global_step)


def interrupted(
    folder: Path,
    where: dict[tuple[int, int], int],
    seconds: float,
    in_validation: tuple[int, int] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Return the results of this rank for an interrupted fit."""
    signalled = Signalled(where, seconds, in_validation)
    saver = ModelCheckpoint(folder, save_top_k=0)
    usual = {"callbacks": [signalled, saver], "enable_checkpointing": True, "limit_val_batches": 0, "max_epochs": 40}
    code: Any = None
    try:
        worker.fit(Quiet(), **usual | arguments)
    except SystemExit as end:
        code = end.code
    found = {} if in_validation is None else {"validated": signalled.validated}
    path = folder / "interrupted.ckpt"
    saved = torch.load(path, weights_only=True)["global_step"] if path.exists() else None
    return {"code": code, "steps": signalled.steps, "saved": saved, **found}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    slow = {"seconds": 0.15}  # ranks agree after every batch
    found: dict[str, Any] = {}
    for one in range(2):
        found[f"slow {one}"] = interrupted(folder / f"slow_{one}", {(one, 1): signal.SIGTERM}, **slow)
        found[f"fast {one}"] = interrupted(folder / f"fast_{one}", {(one, 6): signal.SIGTERM}, 0.0)
    both = {(0, 1): signal.SIGUSR1, (1, 1): signal.SIGTERM}
    found["both"] = interrupted(folder / "both", both, **slow)
    found["last"] = interrupted(folder / "last", {(1, 4): signal.SIGUSR1}, 0.0, max_epochs=1)
    # one rank has more batches than the other
    rank = torch.distributed.get_rank()
    more = {"limit_val_batches": 1.0, "val_batches": 4 + 2 * rank}
    found["validation"] = interrupted(folder / "validation", {}, 0.15, (1, 0), **more)
    found["end of validation"] = interrupted(folder / "end", {}, 0.15, (1, 5), **more)
    found["nobody"] = interrupted(folder / "nobody", {}, 0.0, max_epochs=1)
    found["resumed"] = worker.resume(folder / "slow_0" / "interrupted.ckpt")["global_step"]
    torch.save(found, folder / f"rank_{rank}.pt")


if __name__ == "__main__":
    main()
