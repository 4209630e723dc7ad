"""Fits of ``test_guard.py`` with a loss that is NaN on one rank.

``python guard_worker.py FOLDER`` saves the results of each rank to ``FOLDER/rank_R.pt``.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import worker  # next to this file
from torch import nn

from trainer.callbacks import NonFiniteGuard
from trainer.errors import NonFiniteError

BAD = (1, 2)
"""Rank and batch with a NaN loss."""


class Module(worker.Regression):
    """Returns a NaN loss on one rank at one batch.

    Args:
        bad: the rank and the batch; None for no NaN.
    """

    def __init__(self, bad: Any = None) -> None:
        super().__init__()
        self.bad = bad

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        return loss * float("nan") if (self.global_rank, batch_idx) == self.bad else loss


def fit(module: Module, *callbacks: Any, **options: Any) -> dict[str, Any]:
    found = worker.fit(module, limit_val_batches=0, callbacks=list(callbacks), **options)
    found.pop("trainer")
    return found


def stopped() -> dict[str, Any]:
    module = Module(bad=BAD)
    try:
        fit(module, NonFiniteGuard("stop"))
    except NonFiniteError as error:
        finite = all(parameter.isfinite().all() for parameter in module.parameters())
        return {"said": str(error), "step": error.step, "batch_idx": error.batch_idx, "finite": bool(finite)}
    return {}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    found: dict[str, Any] = {"skip": fit(Module(bad=BAD), NonFiniteGuard("skip"))}
    rank = torch.distributed.get_rank()
    found["stop"] = stopped()
    torch.save(found, folder / f"rank_{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # before the interpreter ends, with gloo's threads alive


if __name__ == "__main__":
    main()
