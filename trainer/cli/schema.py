"""Walk over a config, and check its values. Imports no torch.

All checks use the values that a setting accepts (`trainer.arguments.Argument`). These come from the table of the
Trainer's arguments, or the dataclass of a node such as ``tune``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field, fields, make_dataclass
from typing import Any, NamedTuple, TypeVar

from trainer.arguments import ARGUMENTS, Argument, describe
from trainer.cli.parsing import UsageError
from trainer.errors import did_you_mean

Settings = TypeVar("Settings")

SETTINGS = {name: argument for name, argument in ARGUMENTS.items() if name not in ("precision", "logger", "callbacks")}
"""The Trainer's arguments that ``trainer.NAME`` sets; the others are config groups."""

ACCEPTED = {name: argument.accepts for name, argument in SETTINGS.items()} | {"_target_": ()}
"""The accepted values of the ``trainer`` node, as in `check_settings`."""

TrainerSettings = make_dataclass(
    "TrainerSettings",
    [("_target_", str, "trainer.Trainer"), *((name, Any, argument.default) for name, argument in SETTINGS.items())],
    namespace={"__module__": __name__},  # so that configs can be pickled
)
"""The schema of the ``trainer`` node: names and defaults as in `trainer.Trainer`."""

TEXT_ADVICE = " Environment variables are text. To convert one, use ${oc.decode:${oc.env:NAME}}."


def mistake(key: str, value: Any, accepts: tuple[Any, ...]) -> str | None:
    """Return an error message if ``accepts`` does not contain ``value``, otherwise None.

    Args:
        key: full key of the setting.
        value: resolved value.
        accepts: accepted values as in `trainer.arguments.Argument`; () for any value.
    """
    problem = Argument(key, None, "", accepts).mistake(value, key)
    if problem and isinstance(value, str) and re.fullmatch(r"-?[\d.]+(e-?\d+)?|true|false|null", value.lower()):
        problem += TEXT_ADVICE
    return problem


def check_settings(node: str, values: Any, accepts: Mapping[str, tuple[Any, ...]]) -> None:
    """Check the settings of a node against a table. A setting that is still an interpolation is not checked.

    Args:
        node: name of the node in the config; "" for the config itself.
        values: the node as a plain container.
        accepts: accepted values by setting, as in `trainer.arguments.Argument`; () for any value.

    Raises:
        UsageError: if a setting does not exist, or a value is not accepted.
    """
    if not isinstance(values, Mapping):
        raise UsageError(f"{node} is {describe(values)}, expected a node with the settings {', '.join(accepts)}.")
    for name, value in values.items():
        key = f"{node}.{name}".removeprefix(".")
        if name not in accepts:
            raise UsageError(f"There is no setting {key!r}.{did_you_mean(name, accepts)}")
        problem = mistake(key, value, accepts[name])
        if problem and not str(value).startswith("${"):
            raise UsageError(problem)


def setting(default: Any, *accepts: Any) -> Any:
    """Return a dataclass field for a setting with a default and accepted values."""
    return field(default=default, metadata={"accepts": accepts})


def read_settings(kind: type[Settings], node: str, values: Any) -> Settings:
    """Check the settings of a node as in `check_settings`, and return them as the dataclass ``kind``."""
    attributes = fields(kind)  # type: ignore[arg-type]
    check_settings(node, values, {attribute.name: attribute.metadata["accepts"] for attribute in attributes})
    return kind(**values)


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
