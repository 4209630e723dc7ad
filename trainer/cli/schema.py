"""What settings may be: of the config's ``trainer`` node, from the table in `trainer.arguments`, and of our own nodes.

The nodes of our own, such as ``tune``, have a dataclass each, which says it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field, fields, make_dataclass
from functools import reduce
from operator import or_
from types import NoneType
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.arguments import Argument, Kind, describe
from trainer.cli.arguments import UsageError
from trainer.cli.keys import SETTINGS
from trainer.errors import did_you_mean

Made = TypeVar("Made")


def _type(argument: Argument) -> Any:
    """The type that OmegaConf holds a setting to: the text of an ``${oc.env:...}`` becomes a number by it.

    Any where there are words among what the setting may be.
    """
    kinds: list[Any] = []
    for one in argument.accepts or (object,):
        kinds.append(one.type if isinstance(one, Kind) else type(one) if isinstance(one, (bool, NoneType)) else Any)
    return Any if Any in kinds else reduce(or_, kinds)


TrainerSettings = make_dataclass(
    "TrainerSettings",
    [("_target_", str, "trainer.Trainer"), *((name, _type(one), one.default) for name, one in SETTINGS.items())],
)
"""The schema of the ``trainer`` node: names and defaults as in `trainer.Trainer`."""


def as_typed(name: str, value: Any) -> Any:
    """``value`` as the ``trainer`` node holds it, a number for ``"3"``; ``value`` itself where that does not go."""
    settings = OmegaConf.structured(TrainerSettings)
    with suppress(OmegaConfBaseException):
        settings[name] = value
        typed = OmegaConf.to_container(settings, resolve=False)
        assert isinstance(typed, dict)
        return typed[name]
    return value


def as_number(value: Any) -> str:
    """What to do where ``value`` is text and was to be a number; "" where it is no number either."""
    try:
        float(value if isinstance(value, str) else "")
    except ValueError:
        return ""
    return (
        " What comes from the environment is text: ${oc.decode:${oc.env:NAME}} makes a number of it; on the command"
        " line within quotes of its own: 'KEY=\"${oc.decode:${oc.env:NAME}}\"'."
    )


def mistake(settings: Mapping[str, Any]) -> str | None:
    """What is wrong with the resolved ``trainer`` node, as a sentence; None if nothing is."""
    for name, argument in SETTINGS.items():
        if problem := argument.mistake(settings.get(name, argument.default), f"trainer.{name}"):
            return problem
    for unit in ("epochs", "steps"):
        low, high = settings.get(f"min_{unit}"), settings.get(f"max_{unit}")
        if isinstance(low, int) and isinstance(high, int) and -1 < high < low:
            return f"trainer.min_{unit} is {low} and trainer.max_{unit} is {high}: expected no more than that."
    return None


def setting(default: Any, *accepts: Any) -> Any:
    """A field of a dataclass of settings: its default, and what it may be, as `trainer.arguments.Argument` says it."""
    return field(default=default, metadata={"accepts": accepts})


def read_settings(kind: type[Made], node: str, values: Any) -> Made:
    """The settings of a node. One that is an interpolation still, as where a config is only shown, is not judged.

    Args:
        kind: the dataclass to make of them.
        node: its name in the config.
        values: what the config has there.

    Raises:
        UsageError: a setting that does not exist, or a value that makes no sense.
    """
    accepts = {one.name: one.metadata["accepts"] for one in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(values, dict):
        raise UsageError(f"{node} is {describe(values)}, expected its settings: {', '.join(accepts)}.")
    for name, value in values.items():
        if name not in accepts:
            raise UsageError(f"There is no setting '{node}.{name}'.{did_you_mean(name, accepts)}")
        problem = Argument(name, None, "", accepts[name]).mistake(value, f"{node}.{name}")
        if problem and not str(value).startswith("${"):
            raise UsageError(problem)
    return kind(**values)
