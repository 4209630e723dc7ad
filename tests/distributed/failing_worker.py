"""A fit of ``test_failures.py`` that fails on one rank while the other waits for it.

``python failing_worker.py STRATEGY RANK PHASE FAILURE``. ``PHASE`` is ``setup`` or ``training``; ``FAILURE`` is
``raises`` or ``dies``. The other rank sleeps, as on a GPU, because a collective would fail when the connection breaks.
"""

import os
import signal
import sys
import time

import torch

from tests.distributed.worker import Regression, fit
from trainer.distributed import child_processes


class Failing(Regression):
    """Fails in the configured phase."""

    def __init__(self, rank, phase, failure):
        super().__init__()
        self.rank, self.phase, self.failure = rank, phase, failure

    def enter(self, phase):
        if phase != self.phase:
            return
        if self.global_rank != self.rank:
            time.sleep(1000.0)
        time.sleep(0.5)
        if self.failure == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(f"rank {self.rank} has failed")

    def setup(self, stage):
        self.enter("setup")

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.enter("training")
        return self.loss(batch)


if __name__ == "__main__":
    strategy, rank, phase, failure = sys.argv[1:]
    child_processes.GRACE = 1.0
    torch.set_num_threads(1)
    fit(Failing(int(rank), phase, failure), {"strategy": strategy})
