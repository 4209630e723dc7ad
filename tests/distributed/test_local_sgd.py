"""Post-local SGD (``DDPStrategy(model_averaging_period=...)``) averages weights as torch's own classes do."""

import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as distributed
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests import support
from tests.support import Regression, assert_identical, loader_of, loss_of, make_batches, make_net, make_trainer

BATCHES = 12


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

    @property
    def optimizer(self):
        return support.OPTIMIZERS["momentum-fused" if self.fused else "momentum"]

    @property
    def own_batches(self):
        """Return the batches of this rank."""
        rank = distributed.get_rank()
        return make_batches(BATCHES, seed=rank, gains={i: torch.inf for r, i in self.overflows if r == rank})


def state_of(setup):
    alone, _ = distributed.new_subgroups(group_size=1)
    return PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=setup.warmup)


class OnCPU(DDPStrategy):
    """Lightning registers communication hooks on CUDA only."""

    def _register_ddp_hooks(self):
        self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)


class Manual(Regression):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        support.manual_step(self, super().training_step(batch, batch_idx))


def fit(setup):
    """Train with our Trainer."""
    warnings.filterwarnings("ignore", ".*does not have many workers")
    module = (Manual if setup.manual else Regression)(optimizer=setup.optimizer)
    trainer = make_trainer(
        None, devices=2, use_distributed_sampler=False, precision=support.plugin_of(setup.precision),
        accumulate_grad_batches=setup.window,
        strategy=OnCPU(
            ddp_comm_state=state_of(setup), ddp_comm_hook=post_localSGD_hook, model_averaging_period=setup.period
        ),
    )  # fmt: skip
    trainer.fit(module, loader_of(setup.own_batches))
    return {
        "weights": list(module.net.state_dict().values()),
        "scale": trainer.scaler.get_scale(),
        "skipped": trainer.skipped_steps,
    }


def by_hand(setup):
    """Train with torch's classes. Ranks agree on a skipped step, which torch leaves to the user."""
    module = DistributedDataParallel(make_net())
    module.register_comm_hook(state_of(setup), post_localSGD_hook)
    bare = setup.optimizer(module.parameters())
    optimizer = PostLocalSGDOptimizer(bare, PeriodicModelAverager(setup.period, setup.warmup))
    scaler, skipped = support.scaler_of(setup.precision), 0
    for index, batch in enumerate(setup.own_batches):
        closes = (index + 1) % setup.window == 0
        module.require_backward_grad_sync = closes
        with support.forward_context(setup.precision):
            loss = loss_of(module, batch)
        scaler.scale(loss / setup.window).backward()
        if not closes:
            continue
        overflowed = torch.zeros(())
        if scaler.is_enabled():
            scaler.unscale_(bare)
            (overflowed,) = scaler._per_optimizer_states[id(bare)]["found_inf_per_device"].values()
            distributed.all_reduce(overflowed, distributed.ReduceOp.MAX)
        scaler.step(bare)
        if overflowed:
            skipped += 1
        else:
            optimizer.averager.average_parameters(params=optimizer.param_groups)
        scaler.update()
        bare.zero_grad()
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
def test_averaged_weights_equal_those_of_a_hand_written_loop(ranks, setup):
    expected = ranks.call(by_hand, setup)
    found = ranks.call(fit, setup)
    assert_identical(found, expected)
    assert found[0]["skipped"] == len({batch for _, batch in setup.overflows})
    same = [torch.equal(a, b) for a, b in zip(found[0]["weights"], found[1]["weights"], strict=True)]
    steps = BATCHES // setup.window - found[0]["skipped"] - 1  # the number of the last step that happened
    assert all(same) == ((steps - setup.warmup) % setup.period == 0)
