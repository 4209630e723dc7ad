"""Modules, data and a fit for tests on several ranks; as a program, a fit on ranks that a launcher starts.

``worker.py FOLDER [torchrun]`` saves the results of each rank to ``FOLDER/rank_R.pt``.
"""

import os
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Sampler, TensorDataset

from tests.support import make_trainer
from trainer.precision import MixedPrecision

WORLD_SIZE = 2
BATCH = 8
"""Samples in a batch over all processes."""


def precision_of(precision):
    """Return the precision, with a low loss scale in ``"16-mixed"``."""
    return MixedPrecision("float16", init_scale=1024.0) if precision == "16-mixed" else precision


def samples(number=40):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(number, 6, generator=generator), torch.randn(number, 2, generator=generator))


class Shard(Sampler):
    """This rank's part of each global batch, so that any number of processes sees the same global batches.

    Args:
        world_size: number of ranks.
        number: samples in the dataset.
    """

    def __init__(self, world_size, number=40):
        rank, size = int(os.environ.get("LOCAL_RANK", "0")), BATCH // world_size
        self.order = [i for start in range(0, number, BATCH) for i in range(number)[start + rank * size :][:size]]

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        return iter(self.order)


def whole(module):
    """Return the module's parameters, gathered from all ranks if they are sharded. Call it on all ranks."""
    parameters = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in module.named_parameters()}
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


class Regression(LightningModule):
    """Returns None at configured ranks and batches."""

    def __init__(self, none_at=()):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        self.none_at = set(none_at)

    def loss(self, batch):
        features, target = batch
        return nn.functional.mse_loss(self.net(features), target)

    def training_step(self, batch, batch_idx):
        if (self.global_rank, batch_idx) in self.none_at:
            return None
        loss = self.loss(batch)
        if not self.none_at:  # synchronized logging waits for all ranks, in Lightning too
            self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Uneven(Regression):
    """Has parameters with uneven shards: of 16 and 3 rows, and of a single element, which only one rank holds."""

    def __init__(self, none_at=()):
        super().__init__(none_at)
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3), nn.Tanh(), nn.Linear(3, 2))
        self.gain = nn.Parameter(torch.ones(1))

    def loss(self, batch):
        features, target = batch
        return nn.functional.mse_loss(self.net(features).float() * self.gain, target)

    def training_step(self, batch, batch_idx):
        return None if (self.global_rank, batch_idx) in self.none_at else self.loss(batch)


class Recorder(Callback):
    """Records outcomes, norms, DDP's reductions, and the whole weights at the end of training."""

    def __init__(self):
        self.outcomes = []
        self.norms = []
        self.reduced = []
        self.state = {}

    def on_after_backward(self, trainer, pl_module):
        self.reduced.append(getattr(trainer.model, "require_backward_grad_sync", True))

    def on_after_optimizer_step(self, trainer, pl_module, optimizer, outcome):
        self.outcomes.append(outcome.skipped)
        if outcome.grad_norm is not None:
            self.norms.append(float(outcome.grad_norm))

    def on_train_end(self, trainer, pl_module):
        self.state = {
            "weights": whole(pl_module), "random": torch.get_rng_state(),
            "buffers": {name: value.clone() for name, value in pl_module.named_buffers()},
        }  # fmt: skip


def fit(module, arguments, world_size=WORLD_SIZE, errors=()):
    """Fit ``module`` on the same global batches for any number of ranks, by DDP by default.

    Args:
        module: the module.
        arguments: arguments of the Trainer, and ``ckpt_path``. There is a validation if ``limit_val_batches`` is given.
        world_size: number of ranks.
        errors: types of errors to return as text, instead of raising them.
    """
    recorder = Recorder()
    defaults = {
        "devices": world_size, "strategy": "ddp" if world_size > 1 else "auto", "max_epochs": 2,
        "num_sanity_val_steps": 0, "limit_train_batches": 5, "use_distributed_sampler": False, "limit_val_batches": 0,
    }  # fmt: skip
    arguments = defaults | arguments
    ckpt_path = arguments.pop("ckpt_path", None)
    arguments["precision"] = precision_of(arguments.get("precision", "32-true"))
    arguments["callbacks"] = [recorder, *arguments.get("callbacks", ())]
    with warnings.catch_warnings(action="ignore"):
        torch.manual_seed(1)
        trainer = make_trainer(arguments.pop("default_root_dir", None), **arguments)
        sampler = None if arguments["use_distributed_sampler"] else Shard(world_size)
        train = DataLoader(samples(), batch_size=BATCH // world_size, sampler=sampler)
        val = DataLoader(samples(8), batch_size=4) if arguments["limit_val_batches"] else None
        error = ""
        try:
            trainer.fit(module, train, val, ckpt_path=ckpt_path)
        except errors as raised:
            error = str(raised)
    return recorder.state | {
        "error": error, "outcomes": recorder.outcomes, "norms": recorder.norms,
        "reduced": recorder.reduced, "global_step": trainer.global_step, "skipped_steps": trainer.skipped_steps,
        "scale": trainer.scaler.get_scale(), "rank": trainer.global_rank, "world_size": trainer.world_size,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }  # fmt: skip


AUTOMATIC = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "limit_val_batches": 1.0}


def main():
    torch.set_num_threads(1)
    torch.save(fit(Regression(), AUTOMATIC), Path(sys.argv[1]) / f"rank_{torch.distributed.get_rank()}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # else gloo's threads may be alive when the interpreter ends: an abort


if __name__ == "__main__":
    main()
