"""Fits of ``test_fsdp.py``: all kinds of modules, by DDP and by FSDP2.

``torchrun ... fsdp_worker.py FOLDER torchrun`` saves the results of each rank to ``FOLDER/rank_R.pt``. Further
arguments select scenarios.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from tests.distributed.sharded import whole
from tests.distributed.sharded_worker import Net, Seen
from tests.distributed.worker import BATCH, WORLD_SIZE, Shard, precision_of, samples
from trainer import FSDP2Strategy, Trainer
from trainer.callbacks import GradientClipping

MSE = nn.functional.mse_loss


class Scenario(NamedTuple):
    """A fit to run by DDP and by FSDP2.

    Attributes:
        module: creates the module.
        arguments: arguments of the Trainer.
        sharded: creates the FSDP2 strategy.
        tolerance: accepted difference of the weights.
        ddp: creates the DDP strategy.
        alike: whether all processes get the same batches.
    """

    module: Callable[[], LightningModule]
    arguments: dict[str, Any] = {}
    sharded: Callable[[], Any] = FSDP2Strategy
    tolerance: float = 1e-6
    ddp: Callable[[], Any] = DDPStrategy
    alike: bool = False


class LateNone(Net):
    """Returns None after its own forward, or an infinite loss, at configured ranks and batches."""

    def __init__(self, late_at: Any, part: bool = False, weights: Any = None) -> None:
        super().__init__(weights=weights)
        self.late_at, self.part = set(late_at), part

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if (self.global_rank, batch_idx) in self.late_at:
            features = batch[0] * torch.inf
            if self.part:
                self.net[1](self.net[0](features))
            else:
                self.net(features)
            return None
        return super().training_step(batch, batch_idx)


class Frozen(Net):
    """Has frozen first layers, and unfreezes one of them in the second epoch."""

    def __init__(self, *names: str, none_at: Any = (), thaw: str | None = None) -> None:
        super().__init__(none_at)
        self.thaw = thaw
        for name in names:
            self.get_submodule(name).requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.thaw is not None and self.current_epoch == 1:
            self.get_submodule(self.thaw).requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Several(Net):
    """Has two optimizers of one loss."""

    def configure_optimizers(self) -> Any:
        first = [*self.net[0].parameters(), self.gain]
        return [
            torch.optim.AdamW(first, lr=0.01, fused=True),
            torch.optim.SGD([*self.net[2].parameters(), *self.net[4].parameters()], lr=0.05),
        ]


class Apart(Net):
    """Has a separate optimizer for a parameter with one element, so that one rank has no gradient for it."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([self.gain], lr=0.05), torch.optim.SGD(self.net.parameters(), lr=0.05)]


class OwnStep(Net):
    """Steps by its own ``optimizer_step``."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


class Second(Net):
    """An optimizer that evaluates the loss itself. DTensors flatten only if each rank has the same number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        self.gain = nn.Parameter(torch.ones(2))

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Adversarial(LightningModule):
    """Manual optimization of two networks in turn, one with blocks and one without, and a direct parameter."""

    def __init__(self, toggles: bool = True, clips: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.toggles, self.clips = toggles, clips
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        self.critic = Critic()
        self.gain = nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        features, target = batch
        of_generator, of_critic = self.optimizers()
        if self.toggles:
            self.toggle_optimizer(of_generator)
        fake = self.generator(features) * self.gain
        loss = MSE(fake, target) - 0.1 * self.critic(fake).mean()
        of_generator.zero_grad()
        self.manual_backward(loss)
        if self.clips:
            self.clip_gradients(of_generator, 0.1, "norm")
        of_generator.step()
        if self.toggles:
            self.untoggle_optimizer(of_generator)
            of_generator.zero_grad()
            self.toggle_optimizer(of_critic)
        else:
            of_critic.zero_grad()
        scores = self.critic(target).mean(), self.critic((self.generator(features) * self.gain).detach()).mean()
        for score in (scores[0], -scores[1]):  # two backward passes for one step
            self.manual_backward(MSE(score, torch.ones_like(score)))
        of_critic.step()
        if self.toggles:
            self.untoggle_optimizer(of_critic)
            of_critic.zero_grad()

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.SGD([*self.generator.parameters(), self.gain], lr=0.05, momentum=0.9),
            torch.optim.AdamW(self.critic.parameters(), lr=0.01),
        )


class Critic(nn.Module):
    """No blocks in it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Tied(Net):
    """One weight in two layers; one layer called twice; a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
        self.net[2].weight = self.net[0].weight
        self.again = nn.ModuleList([nn.Linear(6, 6)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, target = batch
        for _ in range(2):
            features = self.again[0](features)
        return MSE(self.net(features) * self.gain, target)


class Meta(Net):
    """Created on the meta device, and initialized by its submodules with the values of rank 0."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), Scaled(), nn.Linear(16, 3), nn.Linear(3, 2))
        torch.manual_seed(self.global_rank)


class Scaled(nn.Module):
    """A module with a parameter and a method to initialize it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(16))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Named(Net):
    """Created on the meta device, and initialized by the module, each parameter by its name."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.net = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3), nn.Linear(3, 2))

    def init_weights(self) -> None:
        for name, parameter in self.net.named_parameters():
            with torch.no_grad():
                parameter.fill_(0.01 * len(name) + 0.1 * int(name[0]))


class Parallel(Net):
    """Uses tensor parallelism in the first two layers if the strategy has a mesh for it."""

    def configure_model(self) -> None:
        mesh = self._device_mesh
        if mesh is not None:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, mesh["tensor_parallel"], plan)
            fully_shard(self.net[0], mesh=mesh["data_parallel"])


def shard_first(module: Any, mesh: Any) -> None:
    """A function for ``blocks``."""
    fully_shard(module.net[0], mesh=mesh)
    fully_shard([module.net[2], module.net[4]], mesh=mesh)


class AlsoFrozen(DDPStrategy):
    """Freezes parameters in a way that DDP supports: all are trained when DDP is created."""

    def configure_ddp(self) -> None:
        frozen = [parameter for parameter in self.model.parameters() if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        self._ddp_kwargs["find_unused_parameters"] = True
        super().configure_ddp()
        for parameter in frozen:
            parameter.requires_grad_(False)


def fit(scenario: Scenario, strategy: Any) -> dict[str, Any]:
    module, seen, arguments = scenario.module(), Seen(), dict(scenario.arguments)
    if "precision" in arguments and arguments["precision"].endswith("mixed"):
        arguments["precision"] = precision_of(arguments["precision"])
    callbacks = [make() for make in arguments.pop("callbacks", ())]
    torch.manual_seed(1)
    trainer = Trainer(
        accelerator="cpu", devices=WORLD_SIZE, strategy=strategy, max_epochs=2, limit_train_batches=5, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, limit_val_batches=0,
        use_distributed_sampler=False, callbacks=[seen, *callbacks], **arguments,
    )  # fmt: skip
    share = {} if scenario.alike else {"sampler": Shard(WORLD_SIZE)}
    trainer.fit(module, DataLoader(samples(), batch_size=BATCH // WORLD_SIZE, **share))
    return {
        "weights": seen.weights, "outcomes": seen.outcomes, "norms": seen.norms,
        "global_step": trainer.global_step, "skipped_steps": trainer.skipped_steps,
        "restore_module": whole(module), "classes": [type(part).__name__ for part in module.modules()],
        "grads": [p.requires_grad for p in module.parameters()],
        "hooks": [len(one._optimizer_step_post_hooks) for one in trainer.engine.optimizers],
    }  # fmt: skip


def unused() -> Any:
    return DDPStrategy(find_unused_parameters=True)


def clipping(**arguments: Any) -> dict[str, Any]:
    return {"callbacks": [partial(GradientClipping, **arguments)]}


WEIGHTS = (3.0, 1.0, 4.0, 2.0, 700.0, 4.0, 1.0, 3.0, 2.0, 2.0)
WINDOW = {"accumulate_grad_batches": 3}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def scenarios() -> dict[str, Scenario]:
    late = {(1, 0), (0, 1), (1, 4)}
    return {
        # the first one joins the process group
        "no timeout": Scenario(Net, {}, partial(FSDP2Strategy, timeout=None), ddp=partial(DDPStrategy, timeout=None)),
        "none late": Scenario(partial(LateNone, late)),
        "none late in windows": Scenario(partial(LateNone, late), WINDOW),
        "none in the middle": Scenario(partial(LateNone, late, part=True), WINDOW),
        "none late, 16-mixed, weighted": Scenario(
            partial(LateNone, late, weights=WEIGHTS), {"precision": "16-mixed", **WINDOW}, tolerance=1e-3
        ),
        "frozen": Scenario(partial(Frozen, "net.0", "net.2", none_at={(1, 0), (0, 2)})),
        "thawed": Scenario(partial(Frozen, "net.0", thaw="net.0"), ddp=AlsoFrozen),
        "several optimizers": Scenario(Several, {"gradient_clip_val": 0.3}),
        "own optimizer_step": Scenario(OwnStep, WINDOW),
        "LBFGS": Scenario(Second),
        "manual": Scenario(Adversarial, ddp=unused),
        "manual, not toggled": Scenario(partial(Adversarial, toggles=False), ddp=unused),
        "manual, 16-mixed": Scenario(
            partial(Adversarial, clips=True), {"precision": "16-mixed"}, tolerance=1e-3, ddp=unused
        ),
        "tied": Scenario(Tied),
        "bf16-mixed": Scenario(Net, {"precision": "bf16-mixed", **WINDOW}, tolerance=1e-2),
        "bf16-true": Scenario(Net, {"precision": "bf16-true", "gradient_clip_val": 0.3}, tolerance=2e-2),
        "64-true": Scenario(Net, {"precision": "64-true", "gradient_clip_val": 0.3}, tolerance=1e-14),
        "64-true, nothing of an optimizer's": Scenario(
            Apart, {"precision": "64-true", "gradient_clip_val": 0.3}, tolerance=1e-14
        ),
        "clipped by the largest": Scenario(Net, clipping(max_norm=0.1, norm_type=float("inf"))),
        "tensor parallelism": Scenario(
            Parallel,
            {"gradient_clip_val": 0.3, "precision": "16-mixed", **WINDOW},
            partial(ModelParallelStrategy, 1, WORLD_SIZE),
            tolerance=1e-3,
            alike=True,
        ),
        "meta device": Scenario(Meta),
        "meta device, by name": Scenario(Named),
        "replicas": Scenario(Net, {"gradient_clip_val": 0.3, **WINDOW}, partial(FSDP2Strategy, replicas=2)),
        "offloaded": Scenario(
            Net, {"gradient_clip_val": 0.3, "precision": "16-mixed"}, partial(FSDP2Strategy, cpu_offload=True), 1e-3
        ),
        "synchronised at the end": Scenario(
            partial(Net, none_at={(1, 1), (0, 3)}, weights=WEIGHTS),
            WINDOW,
            partial(FSDP2Strategy, sync_each_batch=False),
        ),
        "kept whole": Scenario(Net, {}, partial(FSDP2Strategy, reshard_after_forward=False)),
        "classes": Scenario(partial(Net, none_at={(1, 2)}), {}, partial(FSDP2Strategy, blocks=[nn.Linear])),
        "a function": Scenario(Net, {}, partial(FSDP2Strategy, blocks=shard_first)),
        "no blocks": Scenario(partial(Net, none_at={(1, 2)}), {}, partial(FSDP2Strategy, blocks=[])),
        "a policy": Scenario(
            Net, {"precision": "bf16-mixed"}, partial(FSDP2Strategy, mixed_precision=BF16), tolerance=2e-2
        ),
        "a policy alone": Scenario(Net, {"precision": "32-true"}, partial(FSDP2Strategy, mixed_precision=BF16), 2e-2),
        "clipped by the sum": Scenario(Net, clipping(max_norm=0.3, norm_type=1.0)),
    }


def main() -> None:
    folder, _, *names = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    warnings.filterwarnings("ignore", ".*smaller than the logging interval")
    results: dict[str, Any] = {}
    for name, scenario in scenarios().items():
        if not names or name in names:
            results[name] = {"ddp": fit(scenario, scenario.ddp()), "sharded": fit(scenario, scenario.sharded())}
    torch.save(results, Path(folder) / f"rank_{torch.distributed.get_rank()}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
