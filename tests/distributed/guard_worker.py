"""What every process of ``test_guard.py`` runs: fits in which memory runs out, or a loss is NaN, on one rank.

``python guard_worker.py FOLDER`` leaves what each rank saw in ``FOLDER/rank_R.pt``.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import worker  # beside this file
from torch import nn

from trainer.callbacks import HalveOnOutOfMemory, NonFiniteGuard
from trainer.errors import NonFiniteError

BAD = (1, 2)
"""Rank and batch whose loss is NaN."""


class Module(worker.Regression):
    """With a buffer, which DDP sends around when a forward begins; rank 1 has room for ``room`` samples.

    Each of these counts ``weight``, if that is not 0.
    """

    def __init__(self, room: int = 4, phase: str = "forward", bad: Any = None, weight: float = 0.0) -> None:
        super().__init__()
        self.room, self.phase, self.bad, self.weight = room, phase, bad, weight
        self.net[1] = nn.Sequential(nn.Tanh(), Counted())
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(len(batch[0]))
        is_short = self.global_rank == 1 and len(batch[0]) > self.room
        outputs = self.net(batch[0])
        if is_short and self.phase == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if is_short:
            outputs.register_hook(_no_room)
        loss = nn.functional.mse_loss(outputs, batch[1])
        if self.weight:
            return {"loss": loss, "weight": self.weight * len(batch[0])}
        return loss * float("nan") if (self.global_rank, batch_idx) == self.bad else loss


class Counted(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x


def _no_room(gradient: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def fit(module: Module, *callbacks: Any, **options: Any) -> dict[str, Any]:
    found = worker.fit(module, limit_val_batches=0, callbacks=list(callbacks), **options)
    found.pop("trainer")
    found["weights"] = {name: value for name, value in found["weights"].items() if not name.endswith("calls")}
    return found | {"sizes": module.sizes}


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
    found: dict[str, Any] = {}
    window = {"accumulate_grad_batches": 2}
    for name, weight, options in (
        ("32-true", 0.0, {}), ("window", 0.0, window), ("16-mixed", 0.0, {}), ("weighted", 4096.0, {}),
        ("weighted window", 4096.0, window),
    ):  # fmt: skip
        half = name == "16-mixed" or weight > 0
        for phase in ("", "forward", "backward"):
            options = {**options, "precision": worker.precision_of("16-mixed")} if half else options
            if phase:
                found[f"{name} {phase}"] = fit(Module(1, phase, weight=weight), HalveOnOutOfMemory(), **options)
            else:
                found[name] = fit(Module(weight=weight), **options)
    found["skip"] = fit(Module(bad=BAD), NonFiniteGuard("skip"))
    rank = torch.distributed.get_rank()
    found["stop"] = stopped()
    torch.save(found, folder / f"rank_{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # before the interpreter ends, with gloo's threads alive


if __name__ == "__main__":
    main()
