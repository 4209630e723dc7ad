"""Inspect an optimizer's ``step`` (whether it takes a closure) and its ``zero_grad`` (whether it overrides torch's)."""

from __future__ import annotations

import inspect

from torch.optim import Optimizer

_ZERO_GRAD = Optimizer.zero_grad


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's ``step`` requires a closure, to evaluate the loss several times (LBFGS)."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def takes_closure(optimizer: Optimizer) -> bool:
    """Return whether to pass the optimizer a closure that trains: its ``step`` accepts one, and is not torch's own.

    An optimizer of another library may evaluate the loss twice with it (SAM), pass it on (Lookahead), or require it.
    """
    step = type(optimizer).step
    parameters = inspect.signature(step).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    is_known = step.__module__.startswith(("torch.", "lightning."))  # the defining module, even if inherited
    return needs_closure(optimizer) or (not is_known and ("closure" in parameters or takes_any))


def has_own_zero_grad(optimizer: Optimizer) -> bool:
    """Return whether the optimizer overrides torch's ``zero_grad``."""
    return type(optimizer).zero_grad is not _ZERO_GRAD or "zero_grad" in optimizer.__dict__
