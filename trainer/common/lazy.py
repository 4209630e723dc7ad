"""Public names that are imported when they are first used (PEP 562), so that importing a package stays cheap."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause Python's garbage collection, if it is enabled.

    While torch and Lightning are imported, the collector would repeatedly traverse a growing number of modules and
    classes, none of which it can free. This would take a quarter of the import's time (``scripts/benchmark_start``).
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def attribute_from(package: str, homes: Mapping[str, str], name: str) -> Any:
    """Import the module that ``homes`` gives for ``name``, and return its attribute ``name``.

    Raises:
        AttributeError: if ``name`` is not in ``homes``.
    """
    home = homes.get(name)
    if home is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    with garbage_collection_paused():
        module = importlib.import_module(home)
    value = getattr(module, name)
    setattr(sys.modules[package], name, value)  # the next look-up does not call this function
    return value
