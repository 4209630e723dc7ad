"""A fit of ``test_failures.py`` that fails on one rank while the other waits for it.

``python failing_worker.py STRATEGY RANK WHERE HOW PATIENCE``. ``WHERE`` is ``setup`` or ``training``; ``HOW`` is
``raises`` or ``dies``. The other rank waits in a collective, which fails when the connection breaks, or asleep,
as on a GPU, where nothing breaks.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from typing import Any

import torch
import worker  # next to this file

from trainer.engine import child_processes as processes


class Failing(worker.Regression):
    """Fails at the configured place."""

    def __init__(self, rank: int, where: str, how: str, waits: str) -> None:
        super().__init__()
        self.rank, self.where, self.how, self.waits = rank, where, how, waits

    def come_to(self, where: str) -> None:
        if where != self.where:
            return
        if self.global_rank != self.rank:
            if self.waits == "asleep":
                time.sleep(1000.0)
            torch.distributed.barrier()
        time.sleep(0.5)
        if self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(f"rank {self.rank} has had enough")

    def setup(self, stage: str) -> None:
        self.come_to("setup")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.come_to("training")
        return self.loss(batch)


if __name__ == "__main__":
    strategy, rank, where, how, waits = sys.argv[1:]
    processes.GRACE = 2.0
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    worker.fit(Failing(int(rank), where, how, waits), strategy=strategy, limit_val_batches=0)
