"""One walk over a config: each of its settings, with where it stands. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class Leaf(NamedTuple):
    """A setting that has no settings of its own.

    Args:
        key: where it stands, such as ``model.layers[0].width``.
        name: the last part of the key, such as ``width``; ``""`` for an entry of a list.
        value: a scalar; of a ``_target_`` whatever is there.
        target: the ``_target_`` of the nearest node that it is in and that has one; ``""`` where there is none.
    """

    key: str
    name: str
    value: Any
    target: str


def leaves(node: Any, key: str = "", target: str = "") -> Iterator[Leaf]:
    """Every setting in ``node``, at any depth.

    Args:
        node: plain containers.
        key: where in the config ``node`` stands.
        target: as in `Leaf`, for what has no ``_target_`` of its own.

    >>> [(leaf.key, leaf.value) for leaf in leaves({"a": {"b": 1}, "c": [2, {"d": 3}]})]
    [('a.b', 1), ('c[0]', 2), ('c[1].d', 3)]
    """
    children: list[tuple[str, str, Any]] = []
    if isinstance(node, dict):
        target = str(node.get("_target_", target))
        children = [(f"{key}.{name}" if key else str(name), str(name), child) for name, child in node.items()]
    elif isinstance(node, list):
        children = [(f"{key}[{index}]", "", child) for index, child in enumerate(node)]
    for place, name, child in children:
        if isinstance(child, dict | list) and name != "_target_":
            yield from leaves(child, place, target)
        else:
            yield Leaf(place, name, child, target)
