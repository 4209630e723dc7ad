"""What is done to gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer


def clear_gradients(optimizer: Optimizer) -> None:
    """What ``optimizer.zero_grad()`` does, without torch's profiling scope around it (4 microseconds a call)."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def zero_grad_of(optimizers: Iterable[Optimizer]) -> Callable[[Optimizer], None]:
    """What clears the gradients of these: ``clear_gradients``, unless one has a ``zero_grad`` of its own."""
    default = all(type(o).zero_grad is Optimizer.zero_grad and "zero_grad" not in vars(o) for o in optimizers)
    return clear_gradients if default else _zero_grad


def _zero_grad(optimizer: Optimizer) -> None:
    optimizer.zero_grad()


def total_norm(norms: Mapping[Optimizer, Tensor]) -> Tensor | None:
    """The L2 norm of all gradients together, from that of each optimizer's (of its last step); None without any."""
    each = list(norms.values())
    if len(each) < 2:
        return each[0] if each else None
    total: Tensor = torch.linalg.vector_norm(torch.stack(each))
    return total


def clip_gradients(
    optimizer: Optimizer, limit: float, algorithm: str, norm_type: float = 2.0, *, measure: bool = True
) -> Tensor | None:
    """Clip the gradients of one optimizer, in place.

    Args:
        optimizer: whose gradients.
        limit: the largest norm, or the largest absolute value.
        algorithm: ``"norm"`` or ``"value"``.
        norm_type: which norm.
        measure: whether to return the norm where clipping itself does not need it.

    Returns:
        The total norm before clipping, a 0-dim tensor on the gradients' device; or None.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not parameters:
        return None
    if algorithm == "norm":
        total = torch.nn.utils.clip_grad_norm_(parameters, limit, norm_type)
        return total if isinstance(total, Tensor) else None  # users' tests put a mock in its place
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters], norm_type) if measure else None
    torch.nn.utils.clip_grad_value_(parameters, limit)
    return norm
