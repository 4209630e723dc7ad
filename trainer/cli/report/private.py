"""What is shown to others must not have secrets in it: those that `trainer.redaction` knows, and those called so."""

from __future__ import annotations

import re
from typing import Any

from trainer import redaction

HIDDEN = "***"

_NAMED_SO = re.compile(
    r"(?:^|[_.\-])(?:password|passwd|passphrase|secret|token|credentials?|auth|(?:api|access|private|secret)_?key)$",
    re.IGNORECASE,
)


def setting(key: str, value: Any) -> Any:
    """``value`` of a setting; hidden where it is a text, and the setting's name says that nobody is to see it.

    >>> setting("logger.wandb.api_key", "0123"), setting("data.num_tokens", "512")
    ('***', '512')
    """
    if isinstance(value, str):
        is_reference = value.startswith("${")
        return HIDDEN if value and not is_reference and _NAMED_SO.search(key) else redaction.text(value)
    if isinstance(value, dict):
        return {name: setting(f"{key}.{name}", child) for name, child in value.items()}
    return [setting(key, child) for child in value] if isinstance(value, list) else value


def word(written: str) -> str:
    """A word of a command line, such as ``key=value``."""
    key, equals, value = written.partition("=")
    return f"{key}{equals}{setting(key, value)}" if equals else redaction.text(written)
