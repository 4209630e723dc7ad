"""Public names that are imported when they are first used (PEP 562), so that importing a package stays cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any


def attribute_from(package: str, homes: Mapping[str, str], name: str) -> Any:
    """The attribute ``name`` of ``package``, fetched from the module that ``homes`` says it lives in.

    Raises:
        AttributeError: ``name`` is not in ``homes``.
    """
    home = homes.get(name)
    if home is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    setattr(sys.modules[package], name, value)  # the next look-up does not come here
    return value
