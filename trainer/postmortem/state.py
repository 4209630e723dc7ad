"""Copies of the state that a training step reads and writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, MutableMapping
from itertools import filterfalse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from trainer.module_tree import is_dense

_OWNERS = (nn.Module, LRScheduler)


class ObjectState:
    """A copy of the attributes of modules and learning-rate schedules.

    The modules and schedules in the attributes of an object (also inside a list, tuple or dict) are copied, too. The
    copy of an object consists of its attributes; the elements of its buffers and other tensors; the states of its
    ``torch.Generator``s; the items of its lists, dicts, sets and deques; its parameters and their ``requires_grad``.
    Parameters are copied to the host, because a second model may not fit on the device. Thus the states of metrics,
    lists of outputs, counters, ``training`` flags and hooks are included. Items of nested containers are not copied.

    Args:
        roots: the objects.
        mappings: dicts that are copied in the same way, such as an optimizer's parameter groups.
    """

    def __init__(self, roots: Iterable[object], mappings: Iterable[MutableMapping[str, Any]] = ()) -> None:
        self._attributes: list[tuple[MutableMapping[str, Any], dict[str, Any]]] = []
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._trained: list[tuple[nn.Parameter, bool]] = []
        for owner in _owners(roots):
            self._keep_attributes(vars(owner))
            if isinstance(owner, nn.Module):
                for buffer in owner.buffers(recurse=False):
                    self._keep(buffer)
                for parameter in filterfalse(is_lazy, owner.parameters(recurse=False)):
                    self._trained.append((parameter, parameter.requires_grad))
                    self._contents[id(parameter)] = (parameter, parameter.detach().to("cpu", copy=True))
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
            elif isinstance(value, torch.Generator):
                value.set_state(content)
            elif _identities(value) != _identities(content):
                value.clear()
                (value.update if isinstance(value, (dict, set)) else value.extend)(content)

    def _keep_attributes(self, attributes: MutableMapping[str, Any]) -> None:
        self._attributes.append((attributes, dict(attributes)))
        for value in attributes.values():
            self._keep(value)

    def _keep(self, value: Any) -> None:
        content: Any
        if isinstance(value, Tensor):
            if isinstance(value, nn.Parameter) or is_lazy(value) or value.is_inference():
                return
            content = _distinct(value.detach()).clone()
        elif isinstance(value, torch.Generator):
            content = value.get_state()
        elif isinstance(value, (list, deque)):
            content = list(value)
        elif isinstance(value, (dict, set)):
            content = value.copy()
        else:
            return
        self._contents[id(value)] = (value, content)


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


def _owners(roots: Iterable[object]) -> Iterable[object]:
    """Return the roots, and the modules and schedules in their attributes, at any depth."""
    found: dict[int, object] = {}
    waiting = list(roots)
    while waiting:
        owner = waiting.pop()
        if id(owner) in found:
            continue
        found[id(owner)] = owner
        for value in vars(owner).values():
            items = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            )
            waiting += [item for item in items if isinstance(item, _OWNERS)]
    return found.values()


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
