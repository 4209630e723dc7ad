"""Settings of a command's own node in the config, such as ``tune.*``: which there are, and what they may be.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.cli.arguments import UsageError
from trainer.cli.schema import describe
from trainer.errors import did_you_mean

Made = TypeVar("Made")


@dataclass(frozen=True)
class Expected:
    """What a setting may be.

    Args:
        words: as an error message says it, behind "expected".
        accepts: whether a value is that.
    """

    words: str
    accepts: Callable[[Any], bool]

    def or_null(self) -> Expected:
        """The same, or no value at all."""
        return Expected(f"{self.words}, or null", lambda value: value is None or self.accepts(value))


def read_settings(kind: type[Made], node: str, values: Mapping[str, Any], expected: Mapping[str, Expected]) -> Made:
    """The settings of a node.

    Args:
        kind: the dataclass to make of them.
        node: its name in the config.
        values: what the config has there.
        expected: what each setting may be, by its name.

    Raises:
        UsageError: a setting that does not exist, or a value that makes no sense.
    """
    for name, value in values.items():
        if name not in expected:
            raise UsageError(f"There is no setting '{node}.{name}'.{did_you_mean(name, expected)}")
        if not expected[name].accepts(value):
            raise UsageError(f"{node}.{name} is {describe(value)}, expected {expected[name].words}.")
    return kind(**values)


def whole(least: int) -> Expected:
    """A whole number, no less than ``least``."""
    return Expected(
        f"a whole number of at least {least}", lambda value: isinstance(value, int) and number(least).accepts(value)
    )


def number(least: float) -> Expected:
    """A number, no less than ``least``."""
    return Expected(f"a number of at least {least:g}", lambda value: _is_number(value) and value >= least)


def above(least: float) -> Expected:
    """A number, more than ``least``."""
    return Expected(f"a number above {least:g}", lambda value: _is_number(value) and value > least)


def text(words: str) -> Expected:
    """Text."""
    return Expected(words, lambda value: isinstance(value, str))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
