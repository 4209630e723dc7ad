"""Settings of a node of the config that is our own, such as ``tune.*``: a dataclass says what they may be. No torch."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any, TypeVar

from trainer.arguments import Argument, describe
from trainer.cli.arguments import UsageError
from trainer.errors import did_you_mean

Made = TypeVar("Made")


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
