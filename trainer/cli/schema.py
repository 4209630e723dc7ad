"""Check the values in a config. Imports no torch.

All checks use the values that a setting accepts (`trainer.arguments.Argument`). These come from the table of the
Trainer's arguments, the dataclass of a node such as ``tune``, the default of the setting, or the signature of the class
that receives it.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import field, fields, make_dataclass
from functools import reduce
from operator import or_
from types import NoneType, UnionType
from typing import Any, TypeVar

from trainer.arguments import ARGUMENTS, TEXT, Argument, Kind, describe
from trainer.cli.arguments import UsageError
from trainer.errors import did_you_mean

Made = TypeVar("Made")

SETTINGS = {name: one for name, one in ARGUMENTS.items() if name not in ("precision", "logger", "callbacks")}
"""The Trainer's arguments that ``trainer.NAME`` sets; the others are config groups."""

_LIST = Kind("a list", lambda value: isinstance(value, list))
NUMBER = Kind("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool))
_BY_TYPE: dict[Any, Any] = {
    bool: Kind("true or false", lambda value: value in (0, 1)),
    int: Kind("a whole number", lambda value: isinstance(value, int)),
    float: NUMBER,
    str: TEXT,
    NoneType: None,
    list: _LIST,
    tuple: _LIST,
    dict: Kind("a node with settings", lambda value: isinstance(value, dict)),
}


def _type(argument: Argument) -> Any:
    """Return the type of a setting for OmegaConf, which converts the text of ``${oc.env:...}`` to it.

    Return Any if some of the accepted values are words.
    """
    kinds: list[Any] = [
        value.type if isinstance(value, Kind) else type(value) if isinstance(value, (bool, NoneType)) else Any
        for value in argument.accepts or (object,)
    ]
    return Any if Any in kinds else reduce(or_, kinds)


TrainerSettings = make_dataclass(
    "TrainerSettings",
    [("_target_", str, "trainer.Trainer"), *((name, _type(one), one.default) for name, one in SETTINGS.items())],
    namespace={"__module__": __name__},  # so that configs can be pickled
)
"""The schema of the ``trainer`` node: names and defaults as in `trainer.Trainer`."""


def accepted_by_default(default: Any) -> tuple[Any, ...]:
    """Return the values that may replace ``default``, such as numbers for a number. Empty if any value may."""
    if isinstance(default, bool):
        return (Kind(f"true or false (default: {describe(default)})", lambda value: isinstance(value, bool)),)
    kind = next((_BY_TYPE[type_] for type_ in (float, list, dict) if _BY_TYPE[type_].includes(default)), None)
    if kind is None or isinstance(default, dict):
        return () if kind is None else (kind,)
    return (kind._replace(words=f"{kind.words} (default: {describe(default)})"),)


def accepted_by_hint(hint: Any) -> tuple[Any, ...]:
    """Return the values that a type annotation accepts. Empty if it contains types other than plain values."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, UnionType) else (hint,)
    accepts: list[Any] = []
    for member in members:
        kind = typing.get_origin(member) or member
        words = typing.get_args(member) if kind is typing.Literal else ()
        if not all(isinstance(word, str | bool | NoneType) for word in words) or not (words or kind in _BY_TYPE):
            return ()
        accepts += words or [_BY_TYPE[kind]]
    return tuple(sorted(dict.fromkeys(accepts), key=lambda one: one is None))  # null comes last in a message


def mistake(key: str, value: Any, accepts: tuple[Any, ...]) -> str | None:
    """Return an error message if ``accepts`` does not contain ``value``, otherwise None.

    Args:
        key: full key of the setting.
        value: resolved value.
        accepts: accepted values as in `trainer.arguments.Argument`; () for any value.
    """
    is_switch = any(isinstance(accepted, Kind) and accepted.words.startswith("true or false") for accepted in accepts)
    problem = Argument(key, None, "", accepts).mistake(value, key, ("true", "false") if is_switch else ())
    takes_numbers = any(isinstance(one, Kind) and "number" in one.words for one in accepts)
    return f"{problem}{as_number(value)}" if problem and takes_numbers else problem


def as_number(value: Any) -> str:
    """Return advice if ``value`` is a string that can be parsed as a number, otherwise ""."""
    try:
        float(value if isinstance(value, str) else "")
    except ValueError:
        return ""
    return (
        " Environment variables are text. To convert one to a number, use ${oc.decode:${oc.env:NAME}}; on the command"
        " line with quotes: 'KEY=\"${oc.decode:${oc.env:NAME}}\"'."
    )


def check_trainer(settings: Mapping[str, Any]) -> None:
    """Check the ``trainer`` node. A setting that is still an interpolation is not checked.

    Raises:
        UsageError: if an argument of the Trainer does not accept its value, or a minimum is above its maximum.
    """
    settings = {name: value for name, value in settings.items() if not str(value).startswith("${")}
    for name, argument in SETTINGS.items():
        if problem := argument.mistake(settings.get(name, argument.default), f"trainer.{name}"):
            raise UsageError(problem)
    for unit in ("epochs", "steps"):
        low, high = settings.get(f"min_{unit}"), settings.get(f"max_{unit}")
        if isinstance(low, int) and isinstance(high, int) and -1 < high < low:
            raise UsageError(f"trainer.min_{unit} is {low}, expected at most trainer.max_{unit}, which is {high}.")


def setting(default: Any, *accepts: Any) -> Any:
    """Return a dataclass field for a setting with a default and accepted values."""
    return field(default=default, metadata={"accepts": accepts})


def read_settings(kind: type[Made], node: str, values: Any) -> Made:
    """Return the settings of a node. A setting that is still an interpolation is not checked.

    Args:
        kind: dataclass of the settings.
        node: name of the node in the config.
        values: the node as a plain container.

    Raises:
        UsageError: if a setting does not exist, or a value is not accepted.
    """
    accepts = {one.name: one.metadata["accepts"] for one in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(values, dict):
        raise UsageError(f"{node} is {describe(values)}, expected a node with the settings {', '.join(accepts)}.")
    for name, value in values.items():
        if name not in accepts:
            raise UsageError(f"There is no setting '{node}.{name}'.{did_you_mean(name, accepts)}")
        problem = mistake(f"{node}.{name}", value, accepts[name])
        if problem and not str(value).startswith("${"):
            raise UsageError(problem)
    return kind(**values)
