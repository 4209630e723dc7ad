"""What a process does that has no batch, or no loss, while the others compute: the same collectives, in their order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def backward_without_loss(root: nn.Module) -> None:
    """A forward and backward pass of the same collectives as the others', and none of the arithmetic.

    In the place of each block's forward comes the identity, and in the place of the root's all of them in a row.
    As in a real batch, the first input needs no gradient and all outputs do: FSDP's order depends on that.
    """
    blocks: list[Any] = [part for part in root.modules() if isinstance(part, FSDPModule) and part is not root]
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
        for module in (root, *blocks):
            del module.forward
