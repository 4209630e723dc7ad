"""Copies of the state that a training step reads and writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, MutableMapping
from itertools import filterfalse
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from trainer.module_tree import is_dense, parameters_of
from trainer.packages import is_users_module
from trainer.state import generators
from trainer.state.containers import items_of

_OWNERS = (nn.Module, LRScheduler, Optimizer, GradScaler)
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
    Tensors inside of containers, and large ones of objects that are no modules, are not copied.

    Args:
        roots: the objects.
        mappings: dicts that are copied in the same way, such as an optimizer's parameter groups.
        without: objects that are not copied, such as optimizers that do not step.
    """

    def __init__(
        self,
        roots: Iterable[object],
        mappings: Iterable[MutableMapping[str, Any]] = (),
        without: Iterable[object] = (),
    ) -> None:
        self._attributes: list[tuple[MutableMapping[str, Any], dict[str, Any]]] = []
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._trained: list[tuple[nn.Parameter, bool]] = []
        for owner in _owners(roots, without):
            self._keep_attributes(vars(owner), None if isinstance(owner, _OWNERS) else _MAX_ELEMENTS)
            if isinstance(owner, nn.Module):
                for buffer in owner.buffers(recurse=False):
                    self._keep(buffer)
                self._keep_parameters(owner.parameters(recurse=False))
            elif isinstance(owner, Optimizer):
                for values in (*owner.param_groups, *owner.state.values()):
                    self._keep_attributes(values)
                self._keep_parameters(parameters_of(owner))
        for mapping in mappings:
            self._keep_attributes(mapping)

    def restore(self) -> None:
        """Restore the same objects with the same contents."""
        for current, saved in self._attributes:
            for name in current.keys() - saved.keys():
                del current[name]
            for name, value in saved.items():
                if name not in current or current[name] is not value:
                    current[name] = value
        for parameter, is_trained in self._trained:
            parameter.requires_grad_(is_trained)
        for value, content in self._contents.values():
            if isinstance(value, Tensor):
                # .data: a graph that has saved this tensor must not see a modification
                _distinct(value.data).copy_(content)
            elif generators.is_random(value):
                generators.set_state(value, content)
            elif _identities(value) != _identities(content):
                value.clear()
                (value.update if isinstance(value, (dict, set)) else value.extend)(content)

    def _keep_parameters(self, parameters: Iterable[Any]) -> None:
        for parameter in filterfalse(is_lazy, parameters):
            self._trained.append((parameter, parameter.requires_grad))
            self._contents[id(parameter)] = (parameter, parameter.detach().to("cpu", copy=True))

    def _keep_attributes(self, attributes: MutableMapping[str, Any], max_elements: int | None = None) -> None:
        self._attributes.append((attributes, dict(attributes)))
        for value in attributes.values():
            self._keep(value, max_elements)

    def _keep(self, value: Any, max_elements: int | None = None) -> None:
        """Copy the content of a value, unless it is a tensor with more elements than ``max_elements``."""
        content: Any
        if isinstance(value, Tensor):
            if isinstance(value, nn.Parameter) or is_lazy(value) or value.is_inference():
                return
            if max_elements is not None and value.numel() > max_elements:
                return
            content = _distinct(value.detach()).clone()
        elif generators.is_random(value):
            content = generators.state_of(value)
        elif isinstance(value, (list, deque)):
            content = list(value)
        elif isinstance(value, (dict, set)):
            content = value.copy()
        else:
            content = None
        is_new = id(value) not in self._contents
        if content is not None:
            self._contents[id(value)] = (value, content)
        for item in items_of(value, _MAX_ITEMS) if is_new else ():
            self._keep(item, 0)


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


def _owners(roots: Iterable[object], without: Iterable[object]) -> Iterable[object]:
    """Return the roots, and the objects in them that are copied, at any depth."""
    found: list[object] = []
    seen = set(map(id, without))
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _OWNERS) or _is_users(value):
            found.append(value)
            waiting += vars(value).values()
        waiting += items_of(value, _MAX_ITEMS)
    return found


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
    return [id(one) for one in ([*container, *container.values()] if isinstance(container, dict) else container)]
