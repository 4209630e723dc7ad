"""Properties that read an attribute of another object."""

from __future__ import annotations

from operator import attrgetter
from typing import Any


def alias(path: str, *, writable: bool = False) -> Any:
    """Return a property that reads another attribute.

    Args:
        path: the path of that attribute from the owner of the property, such as ``"loop.limits.max_steps"``.
        writable: whether assigning to the property assigns to that attribute. Default: False.
    """
    owner, _, name = path.rpartition(".")
    find_owner = attrgetter(owner)

    def write(self: Any, value: Any) -> None:
        setattr(find_owner(self), name, value)

    def delete(self: Any) -> None:
        delattr(find_owner(self), name)

    return property(attrgetter(path), *(write, delete) if writable else ())
