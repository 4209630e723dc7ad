"""Run the collectives of a batch, in their order, in a process that has no batch or no loss.

Each sharded block gathers its parameters when its forward begins. In its backward pass, it gathers them again, and
finally reduces their gradients. If a process omits one of these collectives, the others wait forever. Therefore a
process without a batch or loss runs them without any computation, through FSDP's own hooks. The order of the blocks is
recorded in this process's own batches.

A loss of zero would bypass FSDP's hooks, and a real batch with a loss of zero would cost a whole forward and backward
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from trainer.common.session import Session

try:  # FSDP's own function, which also searches dataclasses
    from torch.distributed.fsdp._common_utils import collect_grad_tensors
except ImportError:  # FSDP of an older torch searches only pytrees

    def collect_grad_tensors(value: Any) -> Sequence[Tensor]:  # type: ignore[misc]
        """Return the tensors in ``value`` that require a gradient."""
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]


R = TypeVar("R")
TRAINING = "training_step"


class ForwardCall:
    """One call of a sharded module's forward.

    Attributes:
        module: the module.
        inside: the calls of other sharded modules that it made.
        takes_gradient: whether one of its inputs requires a gradient. If so, FSDP reduces the module's gradients when
            the backward pass leaves the module, otherwise at the end of the whole backward pass.
        gives_gradient: whether one of its outputs requires a gradient, so that the backward pass reaches it.
    """

    __slots__ = ("gives_gradient", "inside", "module", "takes_gradient")

    def __init__(self, module: Any, takes_gradient: bool, gives_gradient: bool = True) -> None:
        self.module = module
        self.inside: list[ForwardCall] = []
        self.takes_gradient = takes_gradient
        self.gives_gradient = gives_gradient


class IdlePasses:
    """Run the collectives of forward and backward passes of a sharded module, without computation.

    Args:
        root: the sharded module, which calls the others. Its forwards are recorded until :meth:`close`.
        before_forward: runs the other collectives that a forward begins with, such as a broadcast of buffers.
    """

    def __init__(self, root: nn.Module, before_forward: Callable[[], None]) -> None:
        self._root = root
        self._before_forward = before_forward
        self._known: dict[str, ForwardCall] = {}
        self._current: ForwardCall | None = None  # of this process's current batch
        self._open: list[ForwardCall] = []  # the calls that have not returned yet
        self._handles: list[Any] = []
        untraced: Any = torch.compiler.disable
        enter, leave = untraced(self._enter), untraced(self._leave)
        for module in sharded_modules(root):
            self._handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave, always_call=True),
            ]

    def close(self) -> None:
        """Remove the hooks that record forwards."""
        for handle in self._handles:
            handle.remove()

    # --- recording ------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module is self._root:
            if self._open:  # `self(batch)` in a step: its calls count as those of the step
                self._open.append(self._open[0])
                return
        elif not self._open:
            return  # recomputed in a backward pass, or called outside of the root
        call = ForwardCall(module, torch.is_grad_enabled() and bool(collect_grad_tensors((args, kwargs))))
        if self._open:
            self._open[-1].inside.append(call)
        else:
            self._current = call
        self._open.append(call)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._open and self._open[-1].module is module:
            self._open.pop().gives_gradient = bool(collect_grad_tensors((output,)))

    def remember(self, step: str = TRAINING) -> None:
        """Keep the last forward as the pattern of later ones, because it was that of a complete batch."""
        if self._current is not None:
            self._known[step] = self._current
            self._current = None

    def forget(self) -> None:
        """Discard the last forward, because it was not that of a batch."""
        self._current = None

    # --- taking part ----------------------------------------------------------------------------------------

    def forward(self, step: str = TRAINING) -> Tensor:
        """Run the collectives of a forward pass, or only those that this batch's own forward did not run.

        Returns:
            A loss of 0, with a backward pass that runs the collectives of the others' backward pass.
        """
        done, self._current = self._current, None
        # a training pass never uses the recorded calls of an evaluation, which were recorded without gradients
        like = self._known.get(step) or self._known.get(TRAINING) or self._guess_calls()
        if not torch.is_grad_enabled():
            done = None
        if done is None:
            self._before_forward()
            self._run(like)
        else:
            for call in like.inside[len(done.inside) :]:
                self._run(call)
            self._end_with_root()
        start = torch.zeros((), device=next(self._root.parameters()).device, requires_grad=torch.is_grad_enabled())
        loss: Tensor = _Backward.apply(start, like)
        return loss

    def _run(self, call: ForwardCall) -> None:
        def forward() -> None:
            for inner in call.inside:
                self._run(inner)

        call_with_hooks(call.module, forward)

    def forget_order(self) -> None:
        """Clear FSDP's order of forwards, because no backward pass has followed them."""
        order = self._root._get_fsdp_state()._comm_ctx.post_forward_order  # type: ignore[operator]
        for group in order:
            group._post_forward_indices.clear()
        order.clear()

    def _end_with_root(self) -> None:
        """Move the root to the end of the order of forwards that FSDP uses to prefetch in the backward pass."""
        state = self._root._get_fsdp_state()  # type: ignore[operator]
        order, last = state._comm_ctx.post_forward_order, state._fsdp_param_groups
        order[:] = [group for group in order if group not in last] + last
        for group in order:
            group._post_forward_indices.clear()
        for index, group in enumerate(order):
            group._post_forward_indices.append(index)

    def _guess_calls(self) -> ForwardCall:
        """Guess the calls before this process has seen any batch: each module once, in the order of definition.

        Gradients are assumed to flow from the first trainable parameter on. The root's own parameters may be used
        anywhere.
        """
        root, flows = ForwardCall(self._root, takes_gradient=False), False
        calls: dict[str, ForwardCall] = {}
        for name, module in self._root.named_modules():
            if name and isinstance(module, FSDPModule):
                outer = next((calls[path] for path in reversed(calls) if name.startswith(f"{path}.")), root)
                trains = any(parameter.requires_grad for parameter in module.parameters())  # type: ignore[attr-defined]
                calls[name] = ForwardCall(module, takes_gradient=flows, gives_gradient=flows or trains)
                outer.inside.append(calls[name])
            if name:
                flows = flows or any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        return root


def sharded_modules(root: nn.Module) -> list[Any]:
    """Return the modules under ``root``, including itself, that ``fully_shard`` was applied to."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


class _Backward(torch.autograd.Function):
    """Run the collectives of a backward pass."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, root: ForwardCall) -> Tensor:
        ctx.root = root
        return start.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _backward([ctx.root], gradient)
        return gradient, None


def _backward(calls: list[ForwardCall], gradient: Tensor) -> None:
    for call in reversed(calls):
        if not call.gives_gradient:
            continue
        state = call.module._get_fsdp_state()
        state._pre_backward(gradient)
        _backward(call.inside, gradient)
        if call.takes_gradient:
            for group in state._fsdp_param_groups:
                group.post_backward()


def call_with_hooks(module: Any, forward: Callable[[], R]) -> R:
    """Call ``forward()``, without arguments, instead of the module's forward, and run only FSDP's hooks around it."""
    with _fsdp_hooks_only(module), Session() as session:
        session.replace(module, "forward", forward)
        result: R = module._call_impl()
    return result


@contextmanager
def _fsdp_hooks_only(module: nn.Module) -> Iterator[None]:
    """Disable the module's forward hooks except FSDP's, because there is no batch. A context manager."""
    names = ("_forward_pre_hooks", "_forward_hooks")
    saved_hooks = {name: getattr(module, name) for name in names}
    for name, hooks in saved_hooks.items():
        setattr(module, name, type(hooks)((key, hook) for key, hook in hooks.items() if _is_fsdp(hook)))
    try:
        yield
    finally:
        for name, hooks in saved_hooks.items():
            setattr(module, name, hooks)


def _is_fsdp(hook: Any) -> bool:
    methods = (hook, getattr(hook, "__wrapped__", None))  # for a group of modules, a function wraps the method
    owners = (type(getattr(method, "__self__", None)) for method in methods)
    return any(owner.__module__.startswith("torch.distributed.fsdp") for owner in owners)
