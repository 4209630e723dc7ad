"""Copies of the state that a training step reads and writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from trainer.common.module_tree import is_dense
from trainer.common.packages import is_users_module
from trainer.state import generators
from trainer.state.containers import items_of

_OWNERS = (nn.Module, LRScheduler, Optimizer, GradScaler)
_HOLD_TENSORS = ("_buffers", "param_groups", "state")
"""Containers in attributes of these classes whose tensors are copied, too."""
_MAX_ITEMS = 2**14
"""Containers with more items than this are copied, but the objects in them are not."""
_MAX_ELEMENTS = 2**22
"""Largest number of elements of a tensor of an object that is no module."""


class ObjectState:
    """A copy of the attributes of modules, learning-rate schedules, optimizers and loss scalers.

    Such objects and those of the user's classes in the attributes of an object (also inside containers) are copied,
    too, except datasets. The copy of an object consists of its attributes; the elements of its buffers and
    other tensors; the states of its random generators; the items of its lists, dicts, sets and deques, at any depth;
    its parameters and their ``requires_grad``. Parameters are copied to the host, because a second model may not fit on
    the device. Thus the states of metrics, lists of outputs, counters, ``training`` flags and hooks are included.
    Tensors inside of other containers, and large ones of objects that are no modules, are not copied.

    Args:
        roots: the objects, or dicts with tensors, such as an optimizer's parameter groups.
        without: objects that are not copied, such as optimizers that do not step.
    """

    def __init__(self, roots: Iterable[object], without: Iterable[object] = ()) -> None:
        self._contents: list[tuple[Any, Any]] = []
        seen = set(map(id, without))
        # with the largest number of elements of a tensor, and of those in containers
        waiting: deque[tuple[Any, float, float]] = deque((root, inf, inf) for root in roots)
        while waiting:
            value, largest, inner = waiting.popleft()
            is_parameter = isinstance(value, nn.Parameter)
            is_left_out = isinstance(value, Tensor) and (value.numel() > largest or value.is_inference())
            if id(value) in seen or is_lazy(value) or (is_left_out and not is_parameter):
                continue
            seen.add(id(value))
            waiting += [(item, inner, inner) for item in items_of(value, _MAX_ITEMS)]
            if is_parameter:
                content: Any = value.requires_grad, value.detach().to("cpu", copy=True)
            elif isinstance(value, Tensor):
                content = _distinct(value.detach()).clone()
            elif generators.is_random(value):
                content = generators.state_of(value)
            elif isinstance(value, (dict, list, set, deque)):
                content = value.copy()
            else:
                content = None
                if (is_owner := isinstance(value, _OWNERS)) or _is_users(value):
                    value, content = vars(value), dict(vars(value))
                    for name, attribute in content.items():
                        holds = is_owner and name in _HOLD_TENSORS
                        waiting.append((attribute, inf if is_owner else _MAX_ELEMENTS, inf if holds else 0))
            if content is not None:
                self._contents.append((value, content))

    def restore(self) -> None:
        """Restore the same objects with the same contents."""
        for value, content in self._contents:
            if isinstance(value, nn.Parameter):
                value.requires_grad_(content[0])
            if isinstance(value, Tensor):
                # .data: a graph that has saved this tensor must not see a modification
                _distinct(value.data).copy_(content[1] if isinstance(content, tuple) else content)
            elif generators.is_random(value):
                generators.set_state(value, content)
            elif _identities(value) != _identities(content):
                value.clear()
                (value.update if isinstance(value, (dict, set)) else value.extend)(content)


class BufferState:
    """A copy of buffers.

    Args:
        buffers: the buffers.
    """

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        self._buffers = list(map(_distinct, buffers))
        self._saved = [torch.empty_like(buffer) for buffer in self._buffers]
        if self._buffers:
            torch._foreach_copy_(self._saved, self._buffers)

    def restore(self) -> None:
        """Restore all elements."""
        for buffer, saved in zip(self._buffers, self._saved, strict=True):
            buffer.data.copy_(saved)

    @torch.no_grad()
    def restore_nonfinite(self) -> None:
        """Restore the elements that are not finite."""
        for buffer, saved in zip(self._buffers, self._saved, strict=True):
            buffer.copy_(buffer.where(buffer.isfinite(), saved))


def _is_users(value: object) -> bool:
    """Return whether a value is an object of a class of the user, and no dataset."""
    if isinstance(value, (type, Dataset)) or not is_users_module(type(value).__module__):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def _distinct(tensor: Tensor) -> Tensor:
    """Return a view without the elements that share the memory of others, as in an expanded tensor.

    An expanded tensor cannot be written to.
    """
    if is_dense(tensor):
        for dim, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
            if stride == 0 and size > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _identities(container: Any) -> list[int]:
    """Return the identities of the items of a container, in order; of a dict, the keys, then the values."""
    return [id(item) for item in ([*container, *container.values()] if isinstance(container, dict) else container)]
