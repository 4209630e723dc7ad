"""Settings of a command's own node in the config, such as ``tune.*``. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from trainer.arguments import Argument
from trainer.cli.arguments import UsageError
from trainer.errors import did_you_mean

Made = TypeVar("Made")


def read_settings(
    kind: type[Made], node: str, values: Mapping[str, Any], accepts: Mapping[str, tuple[Any, ...]]
) -> Made:
    """The settings of a node.

    Args:
        kind: the dataclass to make of them.
        node: its name in the config.
        values: what the config has there.
        accepts: what each setting may be, by its name, as `trainer.arguments.Argument` says it.

    Raises:
        UsageError: a setting that does not exist, or a value that makes no sense.
    """
    for name, value in values.items():
        if name not in accepts:
            raise UsageError(f"There is no setting '{node}.{name}'.{did_you_mean(name, accepts)}")
        if problem := Argument(name, None, "", accepts[name]).mistake(value, f"{node}.{name}"):
            raise UsageError(problem)
    return kind(**values)
