"""An engine with sharded parameters and gradients, to show that the loops need to know nothing of it: FSDP2.

A prototype for tests: the blocks of ``module.net`` and the module itself are wrapped by ``fully_shard``; gradients are
exchanged once a window. It saves no checkpoints and puts no module back. What is here is the part that is about
gradients: :class:`ShardedGradients` is all that a step asks of an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as distributed
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer import Trainer
from trainer.compat.engine import LightningEngine
from trainer.engine.gradients import Gradients
from trainer.engine.protocol import Engine
from trainer.precision.scaler import LossScaler


class ShardedStrategy(DDPStrategy):
    """``fully_shard`` in the place of DDP's wrapper."""

    def configure_ddp(self) -> None:
        """Shard the module; it stays the same object."""
        mesh = init_device_mesh("cpu", (self.world_size,))
        for block in self.model.net:
            if any(True for _ in block.parameters()):
                fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.model.set_reduce_scatter_unused_params(True)  # of batches without a loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep gradients whole, and on this process, until the window's last batch."""
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)


class ShardedGradients(Gradients):
    """Gradients of which each process holds a part: after the exchange that ends a window's last backward pass."""

    corrects_losses = False  # where a process has no loss, both passes are made up afterwards

    def __init__(self, scaler: LossScaler, strategy: ShardedStrategy) -> None:
        super().__init__(scaler)
        self._strategy = strategy
        self.use_scaler(scaler)

    def use_scaler(self, scaler: LossScaler) -> LossScaler:
        """Have the scaler look at this process's parts, and agree with the others."""
        scaler.gradients_of = self._parts
        scaler.agree = _any_process
        return super().use_scaler(scaler)

    def local(self, optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
        """The parameters, and this process's parts of their gradients."""
        return [(p, g.to_local() if isinstance(g, DTensor) else g) for p, g in super().local(optimizer)]

    def _parts(self, optimizer: Optimizer) -> list[Tensor]:
        return [part for _, part in self.local(optimizer)]

    def multiply_(self, optimizers: Iterable[Optimizer], factor: float | Tensor) -> None:
        """Multiply the parts: the same factor everywhere."""
        for optimizer in optimizers:
            torch._foreach_mul_(self._parts(optimizer), factor)

    def norm(self, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor | None:
        """The norm of the processes' norms. Gathered, not reduced: gloo's maximum drops a NaN."""
        parts = self._parts(optimizer)
        if not parts:
            return None
        mine = torch.nn.utils.get_total_norm(parts, norm_type)
        norms = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
        distributed.all_gather(norms, mine)
        return torch.linalg.vector_norm(torch.stack(norms), norm_type)

    def clip_(
        self, optimizer: Optimizer, limit: float, algorithm: str, norm_type: float = 2.0, *, measure: bool = True
    ) -> Tensor | None:
        """By the norm of the whole model, or value by value."""
        norm = self.norm(optimizer, norm_type) if measure or algorithm == "norm" else None
        parts = self._parts(optimizer)
        if norm is not None and algorithm == "norm":
            torch._foreach_mul_(parts, (limit / (norm + 1e-6)).clamp(max=1.0))
        elif algorithm == "value":
            torch._foreach_clamp_min_(parts, -limit)
            torch._foreach_clamp_max_(parts, limit)
        return norm

    def backward_without_loss(self, exchanges: bool) -> None:
        """A forward and backward pass of the same collectives as the others', and none of the arithmetic.

        In the place of each block's forward comes the identity, and in the place of the root's all of them in a row.
        As in a real batch, the first input needs no gradient and all outputs do: FSDP's order depends on that.
        """
        root = self._strategy.model
        blocks = [part for part in root.modules() if isinstance(part, FSDPModule) and part is not root]
        self.scaler.expect_scaled(torch.device("cpu"))

        weight = torch.zeros((), requires_grad=True)

        def identity(x: Tensor) -> Tensor:
            return x + weight

        def in_a_row(x: Tensor) -> Tensor:
            for block in blocks:
                x = block(x)
            return x

        for part in blocks:
            part.forward = identity
        root.forward = in_a_row
        try:
            root(torch.zeros(())).backward()
        finally:
            for part in (root, *blocks):
                del part.forward


def _any_process(flag: Tensor) -> None:
    distributed.all_reduce(flag, distributed.ReduceOp.MAX)


class ShardedEngine(LightningEngine):
    """Lightning's launcher and collectives; sharded parameters and gradients."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "strategy": ShardedStrategy()})

    def build_gradients(self, scaler: LossScaler) -> Gradients:
        """Sharded ones."""
        assert isinstance(self.strategy, ShardedStrategy)
        return ShardedGradients(scaler, self.strategy)

    def step_function(self, name: str) -> Any:
        """By the module's forward, where FSDP's hooks are, though the module wraps itself."""
        return (
            partial(self._through_wrapper, name) if isinstance(self.model, FSDPModule) else super().step_function(name)
        )


class ShardedTrainer(Trainer):
    """A Trainer with another engine."""

    def _build_engine(self, precision: Any, plugins: Any, **options: Any) -> Engine:
        return ShardedEngine(self, precision, plugins, **options)


def whole(module: nn.Module) -> dict[str, Tensor]:
    """The module's parameters, gathered from the processes, which all come here."""
    parameters = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in module.named_parameters()}
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}
