"""Walks over the tensors in nested containers."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

from torch import Tensor

Place = tuple[str, ...]
"""Where something is in nested containers: the keys and the indices that lead to it."""


def mapped(value: Any, change: Callable[[Place, Tensor], Any], place: Place = ()) -> Any:
    """``value`` with what ``change`` makes of each tensor in its containers; those that change are new ones.

    Args:
        value: dicts, lists, tuples and what is in them, such as a checkpoint.
        change: gets where a tensor is, and the tensor.
        place: where ``value`` itself is.
    """
    if isinstance(value, Tensor):
        return change(place, value)
    if isinstance(value, dict):
        made = {key: mapped(one, change, (*place, str(key))) for key, one in value.items()}
        if all(made[key] is one for key, one in value.items()):
            return value
        copied = copy(value)  # with the `_metadata` of a module's state
        copied.update(made)
        return copied
    if type(value) in (list, tuple):
        items = [mapped(one, change, (*place, str(index))) for index, one in enumerate(value)]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    return value
