"""Helpers for tests of sharded runs."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def whole(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's parameters, gathered from all ranks. Call it on all ranks."""
    parameters = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in module.named_parameters()}
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}
