"""The contents of a batch: its tensors, its number of samples, and parts of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

PLAIN = (str, bytes, int, float, bool, type(None))
"""Types of strings, numbers and None."""


def leaves_in(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested tuples, lists, mappings and dataclasses, each with its path, such as ``[0]['image']``.

    A list of strings or numbers is one leaf.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves_in(item, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)) and not all(isinstance(item, PLAIN) for item in value):
        for index, item in enumerate(value):
            yield from leaves_in(item, f"{name}[{index}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from leaves_in(getattr(value, field.name), f"{name}.{field.name}")
    else:
        yield name, value


def named_tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over the tensors, each with its path."""
    return ((place, leaf) for place, leaf in leaves_in(value, name) if isinstance(leaf, Tensor))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors, without their paths."""
    for _, tensor in named_tensors_in(value):
        yield tensor


def nbytes(tensor: Tensor) -> int:
    """Return the size of a tensor in bytes, also of a sparse one."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes  # noqa: SLF001 - public ones need coalesced tensors
    return tensor.nbytes


def batch_size(batch: Any) -> int:
    """Return the first dimension of the first tensor in a batch that is neither 0-dim nor empty.

    Return 1 if there is no such tensor but a 0-dim one, and 0 otherwise.
    """
    # the usual case, in a tenth of the time
    parts = batch.values() if type(batch) is dict else batch if type(batch) in (list, tuple) else (batch,)
    first = next(iter(parts), None)
    if isinstance(first, Tensor) and first.dim() and (samples := first.size(0)):
        return samples
    scalars = 0
    for tensor in tensors_in(batch):
        if tensor.dim() and (samples := tensor.size(0)):  # not len(tensor), which nested tensors do not have
            return samples
        scalars += not tensor.dim()
    return min(1, scalars)


def samples_of(batch: Any, indices: Sequence[int]) -> Any:
    """Return the samples with these indices: the parts of all tensors that have the first tensor's length.

    If the indices are a range, the parts are views. Lists of that length (file names, for example) are reduced in the
    same way. Everything else stays unchanged.
    """
    size = next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), 0)
    return _select(batch, size, slice(indices.start, indices.stop) if isinstance(indices, range) else indices)


def _select(value: Any, size: int, chosen: Any) -> Any:
    def chosen_of(item: Any) -> Any:
        return _select(item, size, chosen)

    if isinstance(value, Tensor):
        return value[chosen] if value.dim() and len(value) == size else value
    if isinstance(value, Mapping):
        parts = {key: chosen_of(item) for key, item in value.items()}
        if not isinstance(value, MutableMapping):
            return type(value)(parts)  # type: ignore[call-arg]  # immutable mappings are constructed
        selected: Any = copy.copy(value)
        selected.update(parts)
        return selected
    if isinstance(value, (list, tuple)):
        if len(value) == size and not any(tensor.dim() for tensor in tensors_in(value)):
            return value[chosen] if isinstance(chosen, slice) else [value[index] for index in chosen]
        items = [chosen_of(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        selected = copy.copy(value)
        for field in fields(value):
            object.__setattr__(selected, field.name, chosen_of(getattr(value, field.name)))
        return selected
    return value
