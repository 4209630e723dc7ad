"""Fits of ``test_sharded.py``, by DDP and by FSDP2.

``torchrun ... sharded_worker.py FOLDER`` saves the results of each rank to ``FOLDER/rank_R.pt``.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.sharded import whole
from tests.distributed.worker import BATCH, WORLD_SIZE, Shard, precision_of, samples
from tests.distributed.worker import Regression as Plain
from trainer import Trainer
from trainer.callbacks import NonFiniteGuard


class Net(Plain):
    """Parameters with uneven shards: 16 and 3 rows, and one with a single element, which one rank has no part of.

    The gradient of that element is infinite in the batches ``inf_at`` (rank, batch_idx), all others are finite.
    """

    def __init__(self, none_at: Any = (), inf_at: Any = (), weights: Any = None) -> None:
        super().__init__(none_at, inf_at)
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3), nn.Tanh(), nn.Linear(3, 2))
        self.gain = nn.Parameter(torch.ones(1))
        self.weights = weights

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        where = (self.global_rank, batch_idx)
        if where in self.none_at:
            return None
        features, target = batch
        loss = nn.functional.mse_loss(self.net(features).float() * self.gain, target)
        if where in self.inf_at:
            loss = loss + (self.gain * torch.tensor(float("inf"))).sum()
        if self.weights is None:
            return loss
        return {"loss": loss, "weight": self.weights[2 * batch_idx + self.global_rank]}


class Seen(Callback):
    """Records outcomes, norms, and the whole weights at the end."""

    def __init__(self) -> None:
        self.outcomes: list[bool] = []
        self.norms: list[float] = []
        self.are_plain = True
        self.device_mesh = False
        self.weights: dict[str, Tensor] = {}

    def on_after_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any, outcome: Any) -> None:
        self.outcomes.append(outcome.skipped)
        if outcome.grad_norm is not None:
            self.are_plain &= type(outcome.grad_norm) is Tensor
            self.norms.append(float(outcome.grad_norm))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights = whole(pl_module)
        self.device_mesh = any(hasattr(p, "device_mesh") for p in pl_module.parameters())


def fit(strategy: str, module: Net, callbacks: Any = (), **arguments: Any) -> dict[str, Any]:
    seen = Seen()
    trainer = Trainer(
        accelerator="cpu", devices=WORLD_SIZE, strategy=strategy, max_epochs=2, limit_train_batches=5, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, limit_val_batches=0,
        use_distributed_sampler=False, callbacks=[seen, *callbacks], **arguments,
    )  # fmt: skip
    trainer.fit(module, DataLoader(samples(), batch_size=BATCH // WORLD_SIZE, sampler=Shard(WORLD_SIZE)))
    return {
        "weights": seen.weights, "outcomes": seen.outcomes, "norms": seen.norms, "are_plain": seen.are_plain,
        "global_step": trainer.global_step, "skipped_steps": trainer.skipped_steps, "scale": trainer.scaler.get_scale(),
        "device_mesh": seen.device_mesh,
        "is_put_back": type(module) is Net and all(type(p) is nn.Parameter for p in module.parameters()),
        "plain": {key: value.clone() for key, value in module.state_dict().items()},
    }  # fmt: skip


NONE_AT: dict[str, set[tuple[int, int]]] = {
    **{f"none at {i} on rank {rank}": {(rank, i)} for rank, i in ((1, 0), (0, 1), (1, 2), (1, 4))},
    "none in a whole window on rank 1": {(1, 0), (1, 1), (1, 2)},
    "none on both": {(0, 1), (1, 1)},
    "none in a whole window on both": {(rank, i) for rank in range(2) for i in range(3)},
}
WEIGHTS = (3.0, 1.0, 4.0, 2.0, 700.0, 4.0, 1.0, 3.0, 2.0, 2.0)
"""Of the epoch's batches 0 to 4, on rank 0 and 1."""


def scenarios() -> dict[str, Any]:
    """Return (module, arguments of the Trainer) of each fit."""
    window = {"accumulate_grad_batches": 3}
    found: dict[str, Any] = {
        "plain": (Net, {}),
        "window": (Net, window),
        "16-mixed": (Net, {"precision": "16-mixed"}),
        "overflow on rank 0": (lambda: Net(inf_at={(0, 2)}), {"precision": "16-mixed"}),
        "overflow on rank 1": (lambda: Net(inf_at={(1, 2)}), {"precision": "16-mixed", "gradient_clip_val": 0.3}),
        "overflow in a window": (lambda: Net(inf_at={(1, 1)}), {"precision": "16-mixed", **window}),
        "guard": (lambda: Net(inf_at={(1, 2)}), {"guard": True}),
        "clipped by norm": (Net, {"gradient_clip_val": 0.3}),
        "clipped by value": (Net, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
        "weighted": (lambda: Net(weights=WEIGHTS), {**window, "gradient_clip_val": 0.3}),
        "weighted 16-mixed": (lambda: Net(weights=WEIGHTS), {"precision": "16-mixed", **window}),
        "weighted, none at 1 on rank 1": (lambda: Net(weights=WEIGHTS, none_at={(1, 1)}), window),
    }
    for name, where in NONE_AT.items():
        found[name] = (lambda where=where: Net(none_at=where), window)
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    warnings.filterwarnings("ignore", ".*smaller than the logging interval")
    results: dict[str, Any] = {}
    for name, (make, given) in scenarios().items():
        results[name] = {}
        for kind, strategy in (("ddp", "ddp"), ("sharded", "fsdp")):
            arguments = dict(given)
            if "precision" in arguments:
                arguments["precision"] = precision_of(arguments["precision"])
            callbacks = [NonFiniteGuard("skip")] if arguments.pop("guard", False) else []
            results[name][kind] = fit(strategy, make(), callbacks, **arguments)
    torch.save(results, folder / f"rank_{torch.distributed.get_rank()}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
