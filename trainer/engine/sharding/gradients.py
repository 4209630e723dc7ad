"""Gradients of which each process holds a part: after the exchange that ends a window's last backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer.engine.gradients import Gradients
from trainer.engine.sharding.idle import backward_without_loss, forward_without_batch
from trainer.precision.scaler import LossScaler


class ShardedGradients(Gradients):
    """Gradients under FSDP2.

    Args:
        scaler: the loss scaler. It looks at this process's parts, and agrees with the others.
        root: returns the sharded module.
    """

    are_parts = True
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

    def part(self, tensor: Tensor) -> Tensor:
        """This process's part."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def total(self, counts: Tensor, of: Sequence[Tensor]) -> Tensor:
        """One exchange. Each process's counts are divided by the number of processes that hold the same part."""
        parts = torch.tensor([_parts_of(parameter) for parameter in of], dtype=torch.float64)
        sums = counts.double() * parts.to(counts.device).unsqueeze(1) / distributed.get_world_size()
        distributed.all_reduce(sums)
        return sums

    def leaves(self, module: nn.Module) -> dict[str, Tensor]:
        """The whole parameters, as they are during a forward pass. Gathered once, one block at a time, to find them."""
        blocks: list[tuple[str, Any]] = [one for one in module.named_modules() if isinstance(one[1], FSDPModule)]
        for _, block in blocks:
            block.reshard()  # the root may not be, after an evaluation
        sharded, found = dict(module.named_parameters()), dict[str, Tensor]()
        for path, block in blocks:
            block.unshard()
            found |= {name: p for name, p in block.named_parameters(path) if p is not sharded.get(name)}
            block.reshard()
        return {name: found.get(name, parameter) for name, parameter in sharded.items()}

    def idle_loss(self) -> Tensor:
        """The sharded module's forward pass without its arithmetic."""
        return forward_without_batch(self._root())


def _parts_of(parameter: Tensor) -> int:
    """In how many parts a parameter is."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_shard())


def _any_process(flag: Tensor) -> None:
    distributed.all_reduce(flag, distributed.ReduceOp.MAX)
