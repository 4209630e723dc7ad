"""Temporarily replace the ``forward`` of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class OwnForward:
    """Base class of callables that replace a module's ``forward``; subclasses define ``__call__``.

    The object becomes an instance attribute of the module, which takes precedence over the method of the class.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._forward: Callable[..., Any] = module.forward
        self._outer = vars(module).get("forward")  # a replacement by other code, which is restored
        vars(module)["forward"] = self

    def undo(self) -> None:
        """Restore the module's forward, unless other code has replaced this one in the meantime."""
        if vars(self._module).get("forward") is self:
            del vars(self._module)["forward"]
            if self._outer is not None:
                vars(self._module)["forward"] = self._outer

    def __reduce__(self) -> tuple[Any, ...]:
        """Replace this object in deep copies and pickles of the module by the plain forward, bound to the copy."""
        return _identity, (self._forward,)


def _identity(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward
