"""Walk over the tensors in nested containers."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

from torch import Tensor

KeyPath = tuple[str, ...]
"""The keys and indices that lead to a value in nested containers."""


def mapped(value: Any, change: Callable[[KeyPath, Tensor], Any], place: KeyPath = ()) -> Any:
    """Return ``value`` with each tensor in its containers replaced by the result of ``change``.

    A container is copied only if one of its values changes.

    Args:
        value: nested dicts, lists and tuples, such as a checkpoint.
        change: called with the place of a tensor, and the tensor.
        place: the place of ``value`` itself. Default: ().
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
