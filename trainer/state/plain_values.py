"""Copy values as plain data (numbers, strings, bytes and lists), and create the values again.

===========================================  ===============================================================
value                                        copy
===========================================  ===============================================================
number, string, None                         itself
list, tuple, set, dict, deque                ``[kind, items]``; the items of a dict are its keys and values
tensor                                       ``["tensor", dtype, shape, bytes, device]``
NumPy array or scalar                        ``["array", dtype, shape, bytes]``
===========================================  ===============================================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.module_tree import bytes_of, is_dense

NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "dict": dict, "deque": deque}
_CREATED = (list, tuple, set, dict)
"""The containers that :func:`value_of` creates. It changes others in place, so that they keep their class."""

_MAX_COMPARED = 2**14
"""Largest number of items that are compared in a container that is not copied, with those of containers in it."""


class Limits(NamedTuple):
    """Which values are copied.

    Attributes:
        items: largest number of items in a container, including those of containers in it.
        elements: largest number of elements of a tensor or array.
        is_data: whether the values belong to data. Default: True. If False, the elements of tensors in a container
            count as items. Tensors on other devices are copied too, which is a host-device synchronization, and larger
            tensors are compared by their number of changes in place.
    """

    items: int
    elements: int
    is_data: bool = True


class Copier:
    """Copies values.

    Args:
        limits: which values are copied.
        elsewhere: returns the memory of tensors that are saved elsewhere (:func:`memory_of`). Tensors in it are not
            copied.
    """

    def __init__(self, limits: Limits, elsewhere: Callable[[], Set[int]]) -> None:
        self._limits = limits
        self._elsewhere = elsewhere
        self._memory: Set[int] | None = None  # the result of `elsewhere`, if it was needed

    def begin(self) -> None:
        """Follow changes of the tensors that are saved elsewhere."""
        self._memory = None

    def copy(self, value: Any) -> Any:
        """Return a copy of a value, or a tuple that identifies it if it cannot be copied."""
        if type(value) in NUMBERS:
            return value
        kind = _kind_of(value)
        copied = self._of_items(kind, value, [self._limits.items]) if kind else self._of_numbers(value)
        return (id(value), self._version(value, kind, [_MAX_COMPARED])) if copied is None else copied

    def _version(self, value: Any, kind: str, left: list[int], depth: int = 3) -> int:
        """Return a number that differs after a change in place of a tensor, or of an item in a container.

        Of data, and of containers with more than ``left[0]`` items, only the number of items counts.
        """
        if isinstance(value, Tensor) and not self._limits.is_data:
            return 0 if value.is_inference() or self._is_elsewhere(value) else value._version  # noqa: SLF001
        if not kind:
            return 0
        left[0] -= len(value)
        if not depth or self._limits.is_data or left[0] < 0:
            return len(value)
        items = value.values() if kind == "dict" else value
        return hash(tuple((id(item), self._version(item, _kind_of(item), left, depth - 1)) for item in items))

    def _of_items(self, kind: str, value: Any, left: list[int]) -> list[Any] | None:
        """Return a copy of a container. None if it has over ``left[0]`` items, or one that cannot be copied."""
        left[0] -= 2 * len(value) if kind == "dict" else len(value)
        if left[0] < 0:
            return None
        items = [child for pair in value.items() for child in pair] if kind == "dict" else list(value)
        copied = [child if type(child) in NUMBERS else self._of_item(child, left) for child in items]
        lost = any(copy is None and child is not None for copy, child in zip(copied, items, strict=True))
        return None if lost else [kind, copied]

    def _of_item(self, value: Any, left: list[int]) -> list[Any] | None:
        kind = type(value)
        if kind in _CREATED:
            return self._of_items(kind.__name__, value, left)
        copied = self._of_numbers(value)
        if copied is not None and not self._limits.is_data:
            left[0] -= value.size if isinstance(value, np.generic | np.ndarray) else value.numel()
        return copied if left[0] >= 0 else None

    def _of_numbers(self, value: Any) -> list[Any] | None:
        """Return a copy of a tensor, an array or a NumPy scalar, or None."""
        limits = self._limits
        if type(value) is Tensor:
            device = value.device.type
            is_excluded = device == "meta" or (device != "cpu" and limits.is_data)
            if is_excluded or not is_dense(value) or value.numel() > limits.elements or self._is_elsewhere(value):
                return None
            kind = str(value.dtype).removeprefix("torch.")
            return ["tensor", kind, list(value.shape), bytes_of(value).tobytes(), device]
        if type(value) is not np.ndarray and not isinstance(value, np.generic):
            return None
        if value.size > limits.elements or value.dtype.hasobject or value.dtype.names:
            return None
        return ["array", value.dtype.str, list(value.shape), value.tobytes()]

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        if self._memory is None:
            self._memory = self._elsewhere()
        return bool(memory_of([tensor]) & self._memory)


def memory_of(tensors: Iterable[Tensor]) -> set[int]:
    """Return numbers for the memory of tensors: one for those that share it."""
    return {tensor.untyped_storage()._cdata for tensor in tensors if is_dense(tensor)}  # noqa: SLF001


def _kind_of(value: Any) -> str:
    """Return the kind of a container; "" for other values, and for named tuples, which cannot be created by items."""
    kind = next((name for name, kind in _CONTAINERS.items() if isinstance(value, kind)), "")
    return "" if kind == "tuple" and type(value) is not tuple else kind


def can_create(value: Any) -> bool:
    """Return whether :func:`value_of` can create a value without an existing object of its class."""
    return type(value) in _CREATED or not _kind_of(value)


def value_of(copy: Any, current: Any) -> Any:
    """Return the copied value. If possible, ``current`` is changed to it in place and returned."""
    if not isinstance(copy, list):
        return copy
    kind = copy[0]
    if kind == "tensor":
        dtype, shape, numbers = getattr(torch, copy[1]), copy[2], bytearray(copy[3])
        value = torch.frombuffer(numbers, dtype=torch.uint8).view(dtype) if numbers else torch.empty(0, dtype=dtype)
        value = value.view(shape).to(*copy[4:])  # older checkpoints have no device
        return _copy_into(value, current, lambda: current.detach().copy_(value))
    if kind == "array":
        array = np.frombuffer(copy[3], dtype=copy[1]).reshape(copy[2]).copy()
        if not isinstance(current, np.ndarray):
            return array[()]
        return _copy_into(array, current, lambda: np.copyto(current, array))
    items = [value_of(child, None) for child in copy[1]]
    made: Any = dict(zip(items[::2], items[1::2], strict=True)) if kind == "dict" else _CONTAINERS[kind](items)
    if kind == "tuple" or not isinstance(current, type(made)):
        return made
    current.clear()
    current.extend(made) if kind in ("list", "deque") else current.update(made)
    return current


def _copy_into(value: Any, current: Any, copy: Callable[[], Any]) -> Any:
    """Copy ``value`` into ``current`` and return that, if type, dtype and shape are the same. Else return ``value``."""
    if type(value) is not type(current) or (value.dtype, value.shape) != (current.dtype, current.shape):
        return value
    copy()
    return current
