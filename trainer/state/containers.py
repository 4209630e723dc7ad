"""Walk over containers, and over the tensors in nested ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import copy
from typing import Any

from torch import Tensor

KeyPath = tuple[str, ...]
"""The keys and indices that lead to a value in nested containers."""


CONTAINERS: tuple[Any, ...] = (dict, list, tuple, deque)


def items_of(value: Any, max_items: int) -> list[Any]:
    """Return the items of a list, tuple or deque, or the values of a dict.

    Returns [] for other values, and for containers with more than ``max_items`` items. Methods of subclasses are not
    called, because they may raise, as ``len`` of an ``Irrep`` of e3nn does.
    """
    if not isinstance(value, CONTAINERS):
        return []
    container = next(container for container in CONTAINERS if isinstance(value, container))
    if container.__len__(value) > max_items:
        return []
    return list(dict.values(value) if container is dict else container.__iter__(value))


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
        changed = {key: mapped(item, change, (*place, str(key))) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        copied = copy(value)  # with the `_metadata` of a module's state
        copied.update(changed)
        return copied
    if type(value) in (list, tuple):
        items = [mapped(item, change, (*place, str(index))) for index, item in enumerate(value)]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    return value
