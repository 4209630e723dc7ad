"""Fits that every process of ``test_communication.py`` runs: by DDP with communication hooks, saved and resumed.

``torchrun ... communication_worker.py FOLDER`` leaves the results of each rank in ``FOLDER/rank_R.pt``.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.utils.data import DataLoader

from trainer import Trainer
from trainer.errors import ResumeError

SAVED_AT = 5
STEPS = 9


class Counts:
    """A state of numbers: gradients shrink with each step."""

    def __init__(self) -> None:
        self.steps, self.name = 0, "shrinks"


class Remembers(Counts):
    """A state with tensors of buckets: error feedback of gradients that are rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: dict[int, Any] = {}


class SavesItself(Counts):
    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def averaged(state, bucket, factor):
    future = distributed.all_reduce(bucket.buffer() * factor / distributed.get_world_size(), async_op=True).get_future()
    return future.then(lambda one: one.value()[0])


def shrinking(state, bucket):
    state.steps += bucket.is_last()
    return averaged(state, bucket, 1 / (1 + state.steps))


def shrinking_by_a_dict(state, bucket):
    state["steps"] = state.get("steps", 0) + bucket.is_last()
    return averaged(state, bucket, 1 / (1 + state["steps"]))


def rounding(state, bucket):
    return rounded(state, bucket, state.errors, 64)


def rounded(state, bucket, errors, steps):
    wanted = bucket.buffer() + errors.get(bucket.index(), 0)
    bucket.buffer().copy_((wanted * steps).round() / steps)
    errors[bucket.index()] = wanted - bucket.buffer()
    return averaged(state, bucket, 1.0)


def like_power(state, bucket):
    """Return torch's state with a hook like PowerSGD, because nested collectives sometimes abort on gloo."""
    state.maybe_increase_iter(bucket)
    if state.iter <= state.start_powerSGD_iter:
        return averaged(state, bucket, 1.0)
    return rounded(state, bucket, state.error_dict, 32 * (1 + state.rng.rand()))


def local(state, bucket):
    """Leave the gradients of each rank unchanged."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def post_local() -> Any:
    subgroup, _ = distributed.new_subgroups(group_size=1)
    return PostLocalSGDState(None, subgroup, start_localSGD_iter=2), post_localSGD_hook


def power(start: int) -> Any:
    return PowerSGDState(None, start_powerSGD_iter=start), like_power


EXACT: dict[str, Any] = {
    "post-local": (post_local, {"model_averaging_period": 3}),
    "power, not yet": (lambda: power(100), {}),
    "power, fixed buckets": (lambda: power(2), {"find_unused_parameters": True}),
    "counts": (lambda: (Counts(), shrinking), {}),
    "counts in a dict": (lambda: ({}, shrinking_by_a_dict), {}),
    "saves itself": (lambda: (SavesItself(), shrinking), {}),
    "memory, fixed buckets": (lambda: (Remembers(), rounding), {"find_unused_parameters": True}),
    "local": (lambda: (None, local), {}),
}
REFUSED: dict[str, Any] = {
    "power": (lambda: power(2), {}),
    "memory": (lambda: (Remembers(), rounding), {}),
}
"""Factories of hooks and their states, and options of the strategy."""


class Hooked(DDPStrategy):
    """Registers its hook on a CPU as well."""

    def __init__(self, make: Any, **options: Any) -> None:
        super().__init__(**options)
        self.make = make

    def setup(self, trainer: Any) -> None:
        self._ddp_comm_state, self._ddp_comm_hook = self.make()
        super().setup(trainer)

    def _register_ddp_hooks(self) -> None:
        assert self.model is not None
        self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Saves(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self.path)


def fit(make: Any, options: dict[str, Any], *callbacks: Any, ckpt: Any = None, **arguments: Any) -> dict[str, Any]:
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=Hooked(make, **options), max_epochs=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        use_distributed_sampler=False, callbacks=list(callbacks), **arguments,
    )  # fmt: skip
    module = Net()
    generator = torch.Generator().manual_seed(distributed.get_rank() if distributed.is_initialized() else 0)
    data = torch.randn(STEPS * 2, 6, generator=generator)
    trainer.fit(module, DataLoader(data, batch_size=2), ckpt_path=ckpt)
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "optimizer": trainer.optimizers[0].state_dict(),
        "step": getattr(getattr(trainer.strategy, "_model_averager", None), "step", None),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo")
    results: dict[str, Any] = {}
    for name, (make, options) in (EXACT | REFUSED).items():
        path = folder / f"{name}.ckpt"
        whole = fit(make, options, Saves(path))
        if name in EXACT:
            results[name] = {"whole": whole, "resumed": fit(make, options, ckpt=path)}
            continue
        try:
            fit(make, options, ckpt=path)
            results[name] = {"error": ""}
        except ResumeError as error:
            results[name] = {"error": str(error)}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(make, options, ckpt=path, exact_resume=False)
        results[name]["warnings"] = [str(one.message) for one in caught]
    torch.save(results, folder / f"rank_{distributed.get_rank()}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
