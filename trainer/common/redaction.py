"""Remove secrets from output: values that a config takes from the environment, and passwords in URLs.

A config may contain ``${oc.env:TOKEN}``. Objects are built with the value, but all output (logs, a run's record,
hyperparameters in loggers and checkpoints, error messages) has the interpolation instead. A value that was computed
from a secret, or was written literally, cannot be recognized and is not removed.
"""

from __future__ import annotations

import logging
import os
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

_SHORTEST = 4
"""Minimum length in characters. A shorter value ("1", "cpu") is only removed if it is the whole string."""

_PASSWORD = re.compile(r"(\b[a-zA-Z][\w+.-]*://[^\s/:@]*):([^\s/@]+)@")

_HIDDEN = "***"
_SECRET_NAME = re.compile(
    r"(?:^|[_.\-])(?:password|passwd|passphrase|secret|token|credentials?|auth|(?:api|access|private|secret)_?key)$",
    re.IGNORECASE,
)

_values: dict[str, str] = {}  # names of variables by value


def remember(name: str, value: str) -> None:
    """Register ``value`` as the value of the environment variable ``name``, which a config uses."""
    if value:
        _values[value] = name


def forget() -> None:
    """Forget all registered secrets."""
    _values.clear()


def stand_in(name: str) -> str:
    """Return the text that replaces a variable's value."""
    return f"${{oc.env:{name}}}"


def text(written: str) -> str:
    """Return ``written`` without secrets.

    >>> text("cannot read https://me:hunter2@host/model.ckpt")
    'cannot read https://me:***@host/model.ckpt'
    """
    if written in _values:
        return stand_in(_values[written])
    for value, name in sorted(_values.items(), key=lambda item: -len(item[0])):  # a value may contain a shorter one
        if len(value) >= _SHORTEST and value in written:
            written = written.replace(value, stand_in(name))
    return _PASSWORD.sub(r"\1:***@", written) if "://" in written else written


def setting(key: str, value: Any) -> Any:
    """Return ``value`` of a setting without secrets. A string is hidden if the name of the setting suggests a secret.

    >>> setting("logger.wandb.api_key", "0123"), setting("data.num_tokens", "512")
    ('***', '512')
    """
    if isinstance(value, str):
        is_reference = value.startswith("${")
        return _HIDDEN if value and not is_reference and _SECRET_NAME.search(key) else text(value)
    if isinstance(value, dict):
        return {name: setting(f"{key}.{name}", child) for name, child in value.items()}
    return [setting(key, child) for child in value] if isinstance(value, list) else value


def word(written: str) -> str:
    """Return a word of a command line, such as ``key=value``, without secrets."""
    key, equals, value = written.partition("=")
    return f"{key}{equals}{setting(key, value)}" if equals else text(written)


def containers(value: Any) -> Any:
    """Return ``value`` with redacted strings in its plain containers; the same object if nothing is redacted."""
    if isinstance(value, str):
        redacted = text(value)
        return value if redacted == value else redacted
    if type(value) in (dict, OrderedDict):
        items = {containers(name): containers(child) for name, child in value.items()}
        is_same = len(items) == len(value) and all(name in value and value[name] is items[name] for name in items)
        return value if is_same else items
    if type(value) in (list, tuple):
        children = [containers(child) for child in value]
        return value if all(a is b for a, b in zip(children, value, strict=True)) else type(value)(children)
    return value


class Filter(logging.Filter):
    """Removes secrets from the log records of each handler that it is added to."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact a record. Returns True for all records."""
        message = record.getMessage()
        redacted = text(message)
        if redacted != message:
            record.msg, record.args = redacted, None
        if record.exc_info and not record.exc_text:
            trace = logging.Formatter().formatException(record.exc_info)
            record.exc_text = text(trace)  # formatters use this if it is set
        return True


def environment_value(*arguments: Any) -> Any:
    """Resolve ``oc.env`` as OmegaConf does, and register the value as a secret."""
    from omegaconf.resolvers import oc

    value = oc.env(*arguments)
    if os.environ.get(str(arguments[0])) == value and isinstance(value, str):
        remember(str(arguments[0]), value)
    return value


def register(read: Callable[..., Any] = environment_value) -> None:
    """Resolve ``${oc.env:NAME}`` with ``read`` from now on. Can be called repeatedly.

    Args:
        read: returns the value of a variable. Default: :func:`environment_value`, which registers it as a secret.
    """
    import omegaconf

    is_old = omegaconf.__version__.startswith("2.3.")  # later versions deprecate its name
    name = "register_new_resolver" if is_old else "register_resolver"
    getattr(omegaconf.OmegaConf, name)("oc.env", read, replace=True)
