"""One walk over a config, with the key of each entry. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """A node or a setting of a config.

    Args:
        key: full key, such as ``model.layers[0].width``; ``""`` for the config itself.
        name: the last part of the key, such as ``width``; ``""`` for an item of a list.
        value: a scalar or a plain container.
        target: ``_target_`` of the nearest node that has one, itself included; ``""`` if no node has one.
    """

    key: str
    name: str
    value: Any
    target: str


def walk(node: Any, key: str = "", name: str = "", target: str = "", *, into_lists: bool = True) -> Iterator[Entry]:
    """Iterate over ``node`` and all entries below it, each before the entries that it contains.

    Args:
        node: plain containers.
        key, name, target: as in `Entry`, for ``node``.
        into_lists: whether the items of a list are entries.

    >>> [(entry.key, entry.value) for entry in walk({"a": {"b": 1}, "c": [2]})]
    [('', {'a': {'b': 1}, 'c': [2]}), ('a', {'b': 1}), ('a.b', 1), ('c', [2]), ('c[0]', 2)]
    """
    if isinstance(node, dict):
        target = str(node.get("_target_", target))
    yield Entry(key, name, node, target)
    if isinstance(node, dict):
        for child, value in node.items():
            place = f"{key}.{child}" if key else str(child)
            yield from walk(value, place, str(child), target, into_lists=into_lists)
    elif isinstance(node, list) and into_lists:
        for index, value in enumerate(node):
            yield from walk(value, f"{key}[{index}]", "", target)


def targets(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the key and the ``_target_`` of each node that has one, such as ``("model", "torch.nn.Linear")``."""
    for entry in walk(node, key):
        if isinstance(entry.value, dict) and "_target_" in entry.value:
            yield entry.key, entry.value["_target_"]
