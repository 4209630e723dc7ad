"""Post-local SGD (``DDPStrategy(model_averaging_period=...)``) averages weights as torch's own classes do."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.ranks import Ranks
from tests.support import assert_identical, loader_of, make_trainer, manual_step, native_fp16

Batch = tuple[Tensor, Tensor, float]


@dataclass(frozen=True)
class LocalSGD:
    """A fit.

    Args:
        precision: ``"32-true"``, ``"bf16-mixed"`` or ``"16-mixed"``.
        window: batches of an accumulation window.
        manual: whether the module steps the optimizer by itself.
        fused: whether the optimizer is fused.
        overflows: (process, batch) with a loss that is infinite.
        warmup: steps that average gradients.
        period: steps from one average of the weights to the next.
    """

    precision: str = "32-true"
    window: int = 1
    manual: bool = False
    fused: bool = False
    overflows: tuple[tuple[int, int], ...] = ()
    warmup: int = 2
    period: int = 3
    batches: int = 12


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batches(setup: LocalSGD) -> list[Batch]:
    """Return the batches of this rank."""
    rank = distributed.get_rank()
    generator = torch.Generator().manual_seed(rank)
    return [
        (
            torch.randn(4, 4, generator=generator),
            torch.randn(4, 2, generator=generator),
            float("inf") if (rank, index) in setup.overflows else 1.0,
        )
        for index in range(setup.batches)
    ]


def optimizer_of(setup: LocalSGD, module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, fused=setup.fused)


def loss_of(module: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(module(batch[0]), batch[1]) * batch[2]


def state_of(setup: LocalSGD) -> PostLocalSGDState:
    alone, _ = distributed.new_subgroups(group_size=1)
    return PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=setup.warmup)


class OnCPU(DDPStrategy):
    """Lightning registers communication hooks on CUDA only."""

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)


class Module(LightningModule):
    def __init__(self, setup: LocalSGD) -> None:
        super().__init__()
        self.setup_ = setup
        self.automatic_optimization = not setup.manual
        self.net = net()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = loss_of(self.net, batch)
        if self.automatic_optimization:
            return loss
        manual_step(self, loss)
        return None

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.setup_, self.net)


def fit(setup: LocalSGD) -> dict[str, Any]:
    """Train with our Trainer."""
    warnings.filterwarnings("ignore", ".*does not have many workers")
    precision: Any = native_fp16(init_scale=1024.0, growth_interval=4) if setup.precision == "16-mixed" else None
    module = Module(setup)
    trainer = make_trainer(
        None, devices=2, use_distributed_sampler=False, precision=precision or setup.precision,
        accumulate_grad_batches=setup.window,
        strategy=OnCPU(
            ddp_comm_state=state_of(setup), ddp_comm_hook=post_localSGD_hook, model_averaging_period=setup.period
        ),
    )  # fmt: skip
    trainer.fit(module, loader_of(batches(setup)))
    return {
        "weights": list(module.net.state_dict().values()),
        "scale": trainer.scaler.get_scale(),
        "skipped": trainer.skipped_steps,
    }


def by_hand(setup: LocalSGD) -> dict[str, Any]:
    """Train with torch's classes. Ranks agree on a skipped step, which torch leaves to the user."""
    module = DistributedDataParallel(net())
    module.register_comm_hook(state_of(setup), post_localSGD_hook)
    bare = optimizer_of(setup, module)
    optimizer = PostLocalSGDOptimizer(bare, PeriodicModelAverager(setup.period, setup.warmup))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4, enabled=setup.precision == "16-mixed")
    dtype = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(setup.precision)
    context = partial(torch.autocast, "cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)
    skipped = 0
    all_batches = batches(setup)
    for start in range(0, len(all_batches), setup.window):
        bare.zero_grad()
        window = all_batches[start : start + setup.window]
        for index, batch in enumerate(window):
            module.require_backward_grad_sync = index == len(window) - 1
            with context():
                loss = loss_of(module, batch)
            scaler.scale(loss * (1 / len(window))).backward()
        overflowed = torch.zeros(())
        if scaler.is_enabled():
            scaler.unscale_(bare)
            (overflowed,) = scaler._per_optimizer_states[id(bare)]["found_inf_per_device"].values()
            distributed.all_reduce(overflowed, distributed.ReduceOp.MAX)
        if overflowed:
            skipped += 1
            scaler.step(bare)  # records the overflow
        else:
            scaler.step(bare)
            optimizer.averager.average_parameters(params=optimizer.param_groups)
        scaler.update()
    return {"weights": list(module.module.state_dict().values()), "scale": scaler.get_scale(), "skipped": skipped}


@pytest.mark.parametrize(
    "setup",
    [
        LocalSGD(),
        LocalSGD(warmup=0, period=4, window=2),
        LocalSGD("bf16-mixed", fused=True),
        LocalSGD("16-mixed", window=2, overflows=((1, 5),)),  # on one process: the other skips it, too
        LocalSGD("16-mixed", manual=True, fused=True, overflows=((0, 1), (1, 6))),
    ],
    ids=str,
)
def test_averaged_weights_equal_those_of_a_hand_written_loop(ranks: Ranks, setup: LocalSGD) -> None:
    expected = ranks.call(by_hand, setup)
    found = ranks.call(fit, setup)
    assert_identical(found, expected)
    assert found[0]["skipped"] == len({batch for _, batch in setup.overflows})
    same = [torch.equal(a, b) for a, b in zip(found[0]["weights"], found[1]["weights"], strict=True)]
    steps = setup.batches // setup.window - found[0]["skipped"] - 1  # the number of the last step that happened
    assert all(same) == ((steps - setup.warmup) % setup.period == 0)
