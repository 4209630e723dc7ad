"""Check, while a checkpoint is saved, that ``torch.load(weights_only=True)`` can read it."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from io import BytesIO
from typing import Any

import torch
from torch.serialization import load, save

from trainer.checkpoint.host_copy import is_sharded
from trainer.checkpoint.inert import PLACES, declared_safe, write_without_data
from trainer.errors import CheckpointError, join_first
from trainer.errors import warn as issue_warning

_LEAVES = frozenset(
    [type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype]
)
_DICTS = (dict, OrderedDict)


def require_loadable(checkpoint: dict[str, Any], *, strict: bool, warn: bool) -> dict[str, Any]:
    """Return ``checkpoint`` with NumPy scalars converted to Python numbers; the same object if it has none.

    Checks containers and types, not the data of tensors. Hyperparameters, which may be objects, are not checked.

    Args:
        checkpoint: the checkpoint to write.
        strict: whether to raise if the checkpoint could not be loaded. If False, warn.
        warn: whether this process issues the warning.

    Raises:
        CheckpointError: if it could not be loaded with ``weights_only=True``, and ``strict`` is set.
    """
    offences: list[tuple[str, Any]] = []
    places = {place: checkpoint[place] for place in PLACES & checkpoint.keys()}
    looked_at = {name: value for name, value in checkpoint.items() if name not in places}
    plain: dict[str, Any] = plain_numbers(looked_at, "checkpoint", offences)
    if offences:
        listed = join_first((f"{place} is a {name_of(value)}" for place, value in offences), 5)
        message = (
            f"This checkpoint can only be read with weights_only=False, which can run any code: {listed}. Put plain"
            " containers, numbers, strings and tensors there, or pass the class to"
            " torch.serialization.add_safe_globals."
        )
        if strict:
            raise CheckpointError(f"{message} With resume='auto' every checkpoint has to be readable.")
        if warn:
            issue_warning(message)
    return checkpoint if plain is looked_at else plain | places


def plain_numbers(value: Any, place: str, offences: list[tuple[str, Any]]) -> Any:
    """Return ``value`` with NumPy scalars converted to Python numbers; ``value`` itself if it has none.

    Args:
        value: any value.
        place: its place in the checkpoint, for ``offences``.
        offences: list that collects the objects that ``torch.load(weights_only=True)`` rejects, each as (place, value).
    """
    class_ = type(value)
    if class_ in _LEAVES or is_sharded(value):
        return value
    if class_ in _DICTS:
        return _plain_dict(value, place, offences)
    if class_ is list or class_ is tuple:
        children = [plain_numbers(child, f"{place}[{index}]", offences) for index, child in enumerate(value)]
        return value if all(a is b for a, b in zip(children, value, strict=True)) else class_(children)
    if class_ is set:
        items = {child: plain_numbers(child, f"{place}{{}}", offences) for child in value}
        return value if all(child is new for child, new in items.items()) else set(items.values())
    if class_.__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        number = value.item()
        if type(number) in _LEAVES:
            return number
    if not _is_loadable(value):
        offences.append((place, value))
    return value


def _plain_dict(value: Any, place: str, offences: list[tuple[str, Any]]) -> Any:
    changed = False
    items = []
    for name, child in value.items():
        new_name = name if type(name) is str else plain_numbers(name, f"a key of {place}", offences)
        new = plain_numbers(child, f"{place}[{name!r}]", offences) if type(child) not in _LEAVES else child
        changed |= new is not child or new_name is not name
        items.append((new_name, new))
    return type(value)(items) if changed else value


def _is_loadable(value: Any) -> bool:
    """Return whether torch can read ``value`` after writing it, with the classes that the user has declared safe."""
    buffer = BytesIO()
    # reading an object of such a class may require its data
    write: Callable[[Any, BytesIO], None] = save if type(value) in declared_safe().values() else write_without_data
    try:
        write(value, buffer)
        buffer.seek(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(buffer, weights_only=True)
    except Exception:  # pickling a user's class can raise anything
        return False
    return True


def name_of(value: Any) -> str:
    """Return the name of the value's class, or of the value itself if it is a class."""
    class_ = value if isinstance(value, type) else type(value)
    return f"{class_.__module__}.{class_.__qualname__}".removeprefix("builtins.")
