"""``strategy="fsdp"`` trains all kinds of modules to the weights of DDP. Random fits are in ``test_engines.py``."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.distributed.worker import Uneven, fit, whole
from tests.support import needs_fsdp2
from trainer import FSDP2Strategy
from trainer.callbacks import GradientClipping

pytestmark = needs_fsdp2
MSE = nn.functional.mse_loss


class Scenario(NamedTuple):
    """A fit by DDP and by FSDP2.

    Attributes:
        module: creates the module.
        arguments: arguments of the Trainer.
        sharded: creates the FSDP2 strategy.
        tolerance: accepted difference of the weights.
        ddp: creates the DDP strategy.
    """

    module: Callable[[], LightningModule]
    arguments: dict[str, Any] = {}
    sharded: Callable[[], Any] = FSDP2Strategy
    tolerance: float = 1e-6
    ddp: Callable[[], Any] = DDPStrategy


class PartOfForward(Uneven):
    """Returns None after a part of its forward at some ranks and batches."""

    def training_step(self, batch, batch_idx):
        if (self.global_rank, batch_idx) in {(1, 0), (0, 1), (1, 4)}:
            self.net[1](self.net[0](batch[0] * torch.inf))
            return None
        return super().training_step(batch, batch_idx)


class OptimizerOfOneElement(Uneven):
    """Has a separate optimizer for a parameter with one element, so that one rank has no gradient for it."""

    def configure_optimizers(self):
        return [torch.optim.SGD([self.gain], lr=0.05), torch.optim.SGD(self.net.parameters(), lr=0.05)]


class Penalized(Uneven):
    """Has a penalty on the weights, and logs values of sharded weights and gradients."""

    def training_step(self, batch, batch_idx):
        penalty = sum(parameter.square().sum() for parameter in self.net.parameters())
        self.log("penalty", penalty, on_epoch=True)
        return self.loss(batch) + 0.1 * (penalty.full_tensor() if isinstance(penalty, DTensor) else penalty)

    def on_before_optimizer_step(self, optimizer):
        self.log("norm", self.net[0].weight.grad.norm(), on_epoch=True, sync_dist=True)
        self.log("largest", self.net[0].weight.grad.abs().max(), reduce_fx="max", on_epoch=True)


class OptimizerStep(Uneven):
    """Overrides ``optimizer_step``."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)


class StepsIfFinite(Uneven):
    """Steps only if its gradients are finite: those of the first batch are not."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1e30 if batch_idx == 0 else 1.0)

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        closure()
        if nn.utils.get_total_norm([parameter.grad for parameter in self.parameters()]).isfinite():
            optimizer.step()


class Adversarial(LightningModule):
    """Manual optimization of two networks in turn, one with blocks and one without, and a direct parameter."""

    def __init__(self, toggles=True):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.toggles = toggles
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        self.critic = Critic()
        self.gain = nn.Parameter(torch.ones(1))

    def training_step(self, batch, batch_idx):
        features, target = batch
        generator, critic = self.optimizers()
        if self.toggles:
            self.toggle_optimizer(generator)
        fake = self.generator(features) * self.gain
        loss = MSE(fake, target) - 0.1 * self.critic(fake).mean()
        generator.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(generator, 0.1, "norm")
        generator.step()
        if self.toggles:
            self.untoggle_optimizer(generator)
            generator.zero_grad()
            self.toggle_optimizer(critic)
        else:
            critic.zero_grad()
        scores = self.critic(target).mean(), self.critic((self.generator(features) * self.gain).detach()).mean()
        for score in (scores[0], -scores[1]):  # two backward passes for one step
            self.manual_backward(MSE(score, torch.ones_like(score)))
        critic.step()
        if self.toggles:
            self.untoggle_optimizer(critic)
            critic.zero_grad()

    def configure_optimizers(self):
        return (
            torch.optim.SGD([*self.generator.parameters(), self.gain], lr=0.05, momentum=0.9),
            torch.optim.AdamW(self.critic.parameters(), lr=0.01),
        )


class Critic(nn.Module):
    """A network without blocks."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Tied(Uneven):
    """One weight in two layers; one layer called twice."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
        self.net[2].weight = self.net[0].weight
        self.repeated = nn.ModuleList([nn.Linear(6, 6)])

    def loss(self, batch):
        features, target = batch
        return super().loss((self.repeated[0](self.repeated[0](features)), target))


class Meta(Uneven):
    """Created on the meta device, and initialized by its submodules with the values of rank 0."""

    def configure_model(self):
        with torch.device("meta"):
            self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), Scaled(), nn.Linear(16, 3), nn.Linear(3, 2))
        torch.manual_seed(self.global_rank)


class Scaled(nn.Module):
    """A module with a parameter and a method to initialize it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(16))

    def reset_parameters(self):
        nn.init.normal_(self.scale)

    def forward(self, x):
        return x * self.scale


def shard_first(module, mesh):
    """A function for ``blocks``."""
    fully_shard(module.net[0], mesh=mesh)
    fully_shard([module.net[2], module.net[4]], mesh=mesh)


WINDOW = {"accumulate_grad_batches": 3}
FIND_UNUSED = partial(DDPStrategy, find_unused_parameters=True)
POLICY = partial(
    FSDP2Strategy, mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
)
SCENARIOS = {
    "None in the middle of the forward": Scenario(PartOfForward, WINDOW),
    "optimizer_step": Scenario(OptimizerStep, WINDOW),
    "left out, 16-mixed": Scenario(StepsIfFinite, {"precision": "16-mixed"}, tolerance=1e-3),
    "manual, 16-mixed": Scenario(Adversarial, {"precision": "16-mixed"}, tolerance=1e-3, ddp=FIND_UNUSED),
    "manual, not toggled": Scenario(partial(Adversarial, toggles=False), ddp=FIND_UNUSED),
    "penalty on weights": Scenario(Penalized),
    "tied": Scenario(Tied),
    "bf16-true": Scenario(Uneven, {"precision": "bf16-true", "gradient_clip_val": 0.3}, tolerance=2e-2),
    "64-true": Scenario(OptimizerOfOneElement, {"precision": "64-true", "gradient_clip_val": 0.3}, tolerance=1e-14),
    "clipped by the 1-norm": Scenario(Uneven, {"callbacks": [GradientClipping(max_norm=0.3, norm_type=1.0)]}),
    "meta device": Scenario(Meta),
    "offloaded": Scenario(
        Uneven, {"gradient_clip_val": 0.3, "precision": "16-mixed"}, partial(FSDP2Strategy, cpu_offload=True), 1e-3
    ),
    "not resharded, without timeout": Scenario(
        Uneven, {}, partial(FSDP2Strategy, reshard_after_forward=False, timeout=None)
    ),
    "classes": Scenario(partial(Uneven, {(1, 2)}), {}, partial(FSDP2Strategy, blocks=[nn.Linear])),
    "function": Scenario(Uneven, {}, partial(FSDP2Strategy, blocks=shard_first)),
    "no blocks": Scenario(partial(Uneven, {(1, 2)}), {}, partial(FSDP2Strategy, blocks=[])),
    "policy": Scenario(Uneven, {"precision": "bf16-mixed"}, POLICY, tolerance=2e-2),
    "policy without autocast": Scenario(Uneven, {}, POLICY, tolerance=2e-2),
}


def fit_scenario(scenario, engine):
    module = scenario.module()
    found = fit(module, scenario.arguments | {"strategy": getattr(scenario, engine)()})
    return found | {
        "restored": whole(module), "classes": [type(part).__name__ for part in module.modules()],
        "requires_grad": [p.requires_grad for p in module.parameters()],
        "hooks": [len(one._optimizer_step_post_hooks) for one in module.trainer.engine.optimizers],
        "scale": module.trainer.scaler.get_scale(),
        "metrics": {name: value.item() for name, value in module.trainer.callback_metrics.items()},
    }  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_fsdp_equals_ddp(ranks, scenario):
    results = ranks.call(fit_scenario, scenario, "sharded")
    for found, expected in zip(results, ranks.call(fit_scenario, scenario, "ddp"), strict=True):
        assert all(torch.isfinite(value).all() for value in expected["weights"].values())
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=scenario.tolerance)
        torch.testing.assert_close(found["restored"], found["weights"], rtol=0, atol=0)
        for key in ("outcomes", "global_step", "skipped_steps", "classes", "requires_grad", "hooks", "scale"):
            assert found[key] == expected[key], key
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=max(scenario.tolerance, 1e-5))
        assert found["norms"] == pytest.approx(expected["norms"], rel=max(scenario.tolerance, 1e-6))
    torch.testing.assert_close(results[0]["weights"], results[1]["weights"], rtol=0, atol=0)
