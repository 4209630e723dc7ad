"""What an optimizer's ``step`` wants, a closure that evaluates the loss or none, and whose ``zero_grad`` it has."""

from __future__ import annotations

import inspect

from torch.optim import Optimizer

_ZERO_GRAD = Optimizer.zero_grad


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer evaluates the loss itself (LBFGS, SAM): its ``step`` has a closure without default."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def takes_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer is to be given a closure that trains: its ``step`` takes one, and is not torch's own.

    Another library's may evaluate the loss twice with it (SAM), pass it on (Lookahead), or require it.
    """
    step = type(optimizer).step
    parameters = inspect.signature(step).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    is_known = step.__module__.startswith(("torch.", "lightning."))  # of an inherited one: where it was written
    return needs_closure(optimizer) or (not is_known and ("closure" in parameters or takes_any))


def has_own_zero_grad(optimizer: Optimizer) -> bool:
    """Whether the optimizer's ``zero_grad`` is not torch's own."""
    return type(optimizer).zero_grad is not _ZERO_GRAD or "zero_grad" in optimizer.__dict__
