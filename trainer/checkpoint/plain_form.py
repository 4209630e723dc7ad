"""Convert objects to containers, numbers and strings that a checkpoint can hold safely."""

from __future__ import annotations

import dataclasses
import enum
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date, timedelta
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from trainer.common import redaction

if TYPE_CHECKING:
    from omegaconf import Container

_LEAVES = (bool, int, float, complex, str, bytes)
_PLAIN_TYPES = (torch.Tensor, torch.Size, torch.dtype, torch.device)


def plain(value: Any, place: str, left_out: list[str]) -> Any:
    """Return ``value`` as plain containers.

    Args:
        value: any value.
        place: its place, for ``left_out``.
        left_out: list that collects the place and type of each value without a plain form. Such values are removed from
            dicts; None replaces them in lists and tuples, and is returned for ``value`` itself.
    """
    if value is None or type(value) in _LEAVES or isinstance(value, _PLAIN_TYPES):
        return value
    if isinstance(value, enum.Enum):
        is_simple = value.value is None or isinstance(value.value, _LEAVES)
        return plain(value.value, place, left_out) if is_simple else value.name
    for leaf in _LEAVES:
        if isinstance(value, leaf):
            return leaf(value)  # type: ignore[arg-type]  # an instance of a subclass
    if is_config(value):
        value = resolved(value)
    elif isinstance(value, Namespace):
        value = vars(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
    elif type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        value = value.tolist()  # arrays and scalars
        if type(value) in _LEAVES:
            return value
    if isinstance(value, Mapping):
        return plain_dict(value, place, left_out)
    if isinstance(value, (list, tuple, set, frozenset, deque, range)):
        children = [plain(child, f"{place}[{index}]", left_out) for index, child in enumerate(value)]
        return tuple(children) if isinstance(value, tuple) else children
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, date):  # or a datetime
        return value.isoformat()
    safe = torch.serialization.get_safe_globals()  # classes, or tuples of a class and its name
    if any(type(value) is (entry[0] if isinstance(entry, tuple) else entry) for entry in safe):
        return value
    left_out.append(f"{place} ({type(value).__module__}.{type(value).__qualname__})".replace("(builtins.", "("))
    return None


def plain_dict(value: Mapping[Any, Any], place: str, left_out: list[str]) -> dict[Any, Any]:
    """Return a mapping as a dict of plain values, without the values that have no plain form. See :func:`plain`."""
    entries = {}
    for name, child in value.items():
        child_place = f"{place}.{name}" if place else str(name)
        missing = len(left_out)
        new = plain(child, child_place, left_out)
        if new is not None or child is None or len(left_out) == missing:
            entries[name if type(name) in _LEAVES else str(name)] = new
    return entries


def is_config(value: object) -> TypeGuard[Container]:
    """Return whether ``value`` is a node of OmegaConf, without importing OmegaConf for values that are not."""
    omegaconf = sys.modules.get("omegaconf")  # a node exists only if its module has been imported
    return omegaconf is not None and isinstance(value, omegaconf.Container)


def resolved(config: Container) -> Any:
    """Convert ``config`` to plain containers. A value from the environment stays a reference, ``${oc.env:NAME}``."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with _without_environment():
            return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException:
        return OmegaConf.to_container(config, resolve=False)


@contextmanager
def _without_environment() -> Iterator[None]:
    redaction.register(_redacted_environment_value)
    try:
        yield
    finally:
        redaction.register()  # supports all uses of OmegaConf's own resolver


def _redacted_environment_value(*arguments: Any) -> Any:
    from omegaconf.resolvers import oc

    try:
        value = oc.env(*arguments)
    except KeyError:
        value = ""
    return redaction.stand_in(str(arguments[0])) if value is not None else None
