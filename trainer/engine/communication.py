"""Save and restore the state of DDP's communication hooks and model averagers, which differs between processes.

A hook's state is any object. If it has a ``state_dict``, that is saved. Otherwise, three parts are saved: its random
generators; its tensors, including those in nested containers; and its numbers and strings that have changed since the
run began. Numbers that have not changed are settings, and keep this run's values.

Tensors may belong to gradient buckets, such as PowerSGD's error feedback. DDP rebuilds its buckets after the first
backward pass, so a resumed run has different buckets in its first step. Such tensors are restored exactly only if the
buckets stay the same: with ``find_unused_parameters=True`` and without ``static_graph=True``.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from copy import copy
from enum import Enum
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.module_tree import bytes_of
from trainer.state import generators

State = dict[str, Any]
_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_GENERATORS = generators.KINDS
_REFERENCES = (
    distributed.ProcessGroup, nn.Module, nn.Parameter, torch.device, torch.dtype, type, FunctionType,
    BuiltinFunctionType, MethodType, ModuleType, partial, Enum,
)  # fmt: skip
"""Objects that a state refers to but does not own."""


class _NotPlainError(Exception):
    """Raised if a value cannot be saved."""


class _ReferenceError(Exception):
    """Raised if a value refers to objects that are not part of the state."""


class Communication(NamedTuple):
    """How a run communicates gradients and weights, if it differs from the default of DDP or its weights may diverge.

    Attributes:
        holders: the state objects of hooks and averagers, always in the same order.
        keeps_buckets: whether DDP never rebuilds its gradient buckets.
        may_diverge: whether the processes may have different weights, as in post-local SGD.
    """

    holders: list[Any]
    keeps_buckets: bool
    may_diverge: bool


def communication_of(model: DistributedDataParallel, averager: Any) -> Communication | None:
    """Return how a module communicates, or None if it communicates as DDP does by default.

    The default has no communication hooks written in Python, no averager, and no embedding with ``max_norm``. Such an
    embedding makes the weights of the processes differ, because each process normalizes the rows that it uses.

    Args:
        model: the DDP module.
        averager: the averager of its weights, such as torch's ``PeriodicModelAverager``, or None.
    """
    hooks = model._comm_hooks
    embeddings = [part for part in model.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag))]
    normalizes = any(part.max_norm is not None for part in embeddings)
    if not hooks and averager is None and not normalizes:
        return None
    owners = [(state, hook.__self__ if isinstance(hook, MethodType) else hook) for hook, state in hooks]
    found = [*chain.from_iterable(owners), averager]
    return Communication(
        holders=[one for one in found if one is not None and not isinstance(one, _REFERENCES)],
        keeps_buckets=bool(model.find_unused_parameters) and not model.static_graph,
        may_diverge=normalizes or averager is not None or not all(_is_global(hook, state) for hook, state in hooks),
    )


def _is_global(hook: Any, state: Any) -> bool:
    """Return whether a hook is one of torch's hooks and gives all processes the same gradients."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

    module = str(getattr(hook, "__module__", ""))
    return module.startswith("torch.distributed.algorithms.") and not isinstance(state, PostLocalSGDState)


def digest(values: Iterable[Any]) -> str:
    """Return the SHA-256 digest of the tensors and other values in nested containers. Synchronizes with the device."""
    found = hashlib.sha256()
    for value in torch.utils._pytree.tree_leaves(list(values)):
        if isinstance(value, Tensor):
            found.update(bytes_of(value).tobytes())
        else:
            found.update(repr(value).encode())
    return found.hexdigest()


def numbers_of(holders: Iterable[Any]) -> list[State]:
    """Return the numbers and strings of each holder at the beginning of a run."""
    return [
        {name: value for name, value in _items(holder).items() if isinstance(value, _SCALARS)} for holder in holders
    ]


def state_of(holders: Sequence[Any], first: Sequence[State]) -> list[State]:
    """Return the state of each holder, in plain containers and tensors.

    Args:
        holders: the objects, always in the same order.
        first: the result of :func:`numbers_of` at the beginning of the run.
    """
    return [_state_of(one, first[index] if index < len(first) else {}) for index, one in enumerate(holders)]


def load(
    holders: Sequence[Any],
    first: Sequence[State],
    states: Sequence[State],
    *,
    same_buckets: bool,
    device: torch.device,
) -> list[str]:
    """Restore the state that :func:`state_of` returned.

    Args:
        holders: the objects.
        first: the result of :func:`numbers_of` at the beginning of this run.
        states: the return value of :func:`state_of` in the saved run.
        same_buckets: whether the gradient buckets are the same as in the saved run.
        device: the device of tensors that do not exist yet.

    Returns:
        The reasons why the run will not continue exactly. Tensors that belong to different buckets are not restored.
    """
    problems = []
    kinds, saved_kinds = [_kind(one) for one in holders], [state["kind"] for state in states]
    if kinds != saved_kinds:
        shown = [", ".join(one) or "no state" for one in (saved_kinds, kinds)]
        has_state = any(len(state) > 1 for state in states)
        return [f"the communication hooks had {shown[0]} in the saved run, and have {shown[1]} now"] * has_state
    for index, (holder, state) in enumerate(zip(holders, states, strict=True)):
        if "state_dict" in state:
            holder.load_state_dict(state["state_dict"])
            continue
        memory = [] if same_buckets else state.get("memory", [])
        problems += [f"{state['kind']}.{name} may belong to DDP's buckets of gradients" for name in memory]
        problems += [f"{state['kind']}.{name} cannot be saved" for name in state.get("unsaved", ())]
        values = {**(first[index] if index < len(first) else {}), **state.get("values", {})}
        for name, value in values.items():
            if name not in memory:
                _set_item(holder, name, value, device)
        for name, value in state.get("generators", {}).items():
            generators.set_state(_items(holder)[name], value)
    return problems


def _state_of(holder: Any, first: State) -> State:
    state: State = {"kind": _kind(holder)}
    if callable(getattr(holder, "state_dict", None)) and callable(getattr(holder, "load_state_dict", None)):
        return {**state, "state_dict": holder.state_dict()}
    parts: dict[str, Any] = {"values": {}, "generators": {}, "memory": [], "unsaved": []}
    for name, value in _items(holder).items():
        if isinstance(value, _SCALARS):
            if name not in first or type(first[name]) is not type(value) or first[name] != value:
                parts["values"][name] = value
        elif isinstance(value, _GENERATORS):
            parts["generators"][name] = generators.state_of(value)
        else:
            tensors: list[Tensor] = []
            try:
                parts["values"][name] = _plain(value, tensors)
            except _ReferenceError:
                continue
            except _NotPlainError:
                parts["unsaved"].append(name)
            if any(tensor.numel() > 1 for tensor in tensors):
                parts["memory"].append(name)
    return state | {name: part for name, part in parts.items() if part}


def _kind(holder: Any) -> str:
    return type(holder).__qualname__


def _items(holder: Any) -> dict[Any, Any]:
    """Return the attributes of an object by name, including those in slots, or the items of a dict or list."""
    if isinstance(holder, Mapping):
        return dict(holder)
    if isinstance(holder, list):
        return dict(enumerate(holder))
    slots = [getattr(kind, "__slots__", ()) for kind in type(holder).__mro__]
    names = [name for slot in slots for name in ((slot,) if isinstance(slot, str) else slot)]
    found = {name: getattr(holder, name) for name in names if hasattr(holder, name)}
    found.update(getattr(holder, "__dict__", {}))
    return {name: value for name, value in found.items() if name not in ("__dict__", "__weakref__")}


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    """Return a value in plain containers, and collect its tensors."""
    if isinstance(value, _REFERENCES):
        raise _ReferenceError
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.detach()
    if isinstance(value, Mapping) and all(isinstance(key, _SCALARS) for key in value):
        return {key: _plain(one, tensors) for key, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        items = [_plain(item, tensors) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    raise _NotPlainError


def _set_item(holder: Any, name: Any, value: Any, device: torch.device) -> None:
    value = _convert_like(value, _items(holder).get(name), device)
    if isinstance(holder, (MutableMapping, list)):
        holder[name] = value
    else:
        setattr(holder, name, value)


def _convert_like(value: Any, current: Any, device: torch.device) -> Any:
    """Return a saved value in the container type (of its outermost container) and on the device of ``current``."""
    if isinstance(value, Tensor):
        return value.to(current.device if isinstance(current, Tensor) else device, copy=True)
    if isinstance(value, dict):
        made = copy(current) if isinstance(current, MutableMapping) else {}
        made.clear()
        made.update({key: _convert_like(one, None, device) for key, one in value.items()})
        return made
    if isinstance(value, (list, tuple)):
        items = [_convert_like(item, None, device) for item in value]
        if isinstance(current, deque):
            return deque(items, current.maxlen)
        return type(current)(items) if isinstance(current, (set, frozenset)) else type(value)(items)
    return value
