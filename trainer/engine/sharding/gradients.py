"""Gradients of which each process holds a part: after the exchange that ends a window's last backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer.engine.gradients import Gradients
from trainer.engine.sharding.idle import backward_without_loss
from trainer.precision.scaler import LossScaler


class ShardedGradients(Gradients):
    """Gradients under FSDP2.

    Args:
        scaler: the loss scaler. It looks at this process's parts, and agrees with the others.
        root: returns the sharded module.
    """

    corrects_losses = False  # a process without a loss makes up both of its passes afterwards

    def __init__(self, scaler: LossScaler, root: Callable[[], nn.Module]) -> None:
        super().__init__(scaler)
        self._root = root
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
        parts = [part for optimizer in optimizers for part in self._parts(optimizer)]
        if parts:
            torch._foreach_mul_(parts, factor)

    def norm(self, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor | None:
        """The norm of the processes' norms. Gathered, not reduced: gloo's maximum drops a NaN."""
        parts = self._parts(optimizer)
        if not parts:
            return None
        mine = torch.nn.utils.get_total_norm(parts, norm_type)
        norms = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
        distributed.all_gather(norms, mine)
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        return total

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
        """A forward and backward pass of the same collectives as the others', and none of the arithmetic."""
        root = self._root()
        self.scaler.expect_scaled(next(root.parameters()).device)
        backward_without_loss(root)


def _any_process(flag: Tensor) -> None:
    distributed.all_reduce(flag, distributed.ReduceOp.MAX)
