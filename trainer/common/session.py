"""Replace methods of objects, and watch optimizer steps, until the end of a run.

Only instances are changed, never classes, so that Lightning's Trainer in the same program works as without this
package. Therefore a method that a subclass overrides cannot be replaced below its ``super()`` call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_NOTHING = object()


class Session(ExitStack):
    """An exit stack that also restores replaced methods, and watches optimizer steps.

    Every method that a run replaces on an object of the user, of torch or of Lightning is replaced by :meth:`replace`.
    Classes are not changed, so objects that the run does not use behave as without it.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Make copies, such as those of a callback, without the replaced methods of the original."""
        return Session, ()

    def replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace a method of an object until the session closes. If other code wraps it again, its wrapper stays.

        Args:
            owner: the object.
            name: name of the method.
            function: called without ``owner``.
        """
        attributes = vars(owner)
        before = attributes.get(name, _NOTHING)
        attributes[name] = function
        self.callback(_restore, attributes, name, function, before)

    def watch_steps(
        self,
        optimizers: Callable[[], Iterable[Optimizer]] | None = None,
        *,
        before: Callable[..., object] | None = None,
        after: Callable[..., object] | None = None,
    ) -> None:
        """Call functions before and after optimizer steps, also those that a module takes, until the session closes.

        Args:
            optimizers: returns the optimizers to watch. Default: None, all optimizers of the process.
            before, after: called with the optimizer, and the arguments of its step. Default: None.
        """
        sides = (before, register_optimizer_step_pre_hook), (after, register_optimizer_step_post_hook)
        for function, register in sides:
            if function is not None:
                hook: Any = function if optimizers is None else partial(_call_for, optimizers, function)
                self.callback(register(hook).remove)


def _call_for(optimizers: Callable[[], Iterable[Optimizer]], function: Callable[..., object], *step: Any) -> None:
    if any(step[0] is optimizer for optimizer in optimizers()):
        function(*step)


class OwnForward:
    """Base class of callables that replace a module's ``forward``; subclasses define ``__call__``.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._forward: Callable[..., Any] = module.forward

    def __reduce__(self) -> tuple[Any, ...]:
        """Replace this object in deep copies and pickles of the module by the plain forward, bound to the copy."""
        return _identity, (self._forward,)


def _identity(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def _restore(attributes: dict[str, Any], name: str, function: Callable[..., Any], before: Any) -> None:
    if attributes.get(name) is not function:
        return
    if before is _NOTHING:
        del attributes[name]
    else:
        attributes[name] = before
