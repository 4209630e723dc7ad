"""Make ``pytorch_lightning`` and ``lightning.pytorch`` one package, for programs that import the former.

::

    import trainer.pytorch_lightning  # before pytorch_lightning is imported, or at least before Trainer is

    import pytorch_lightning as pl
    from trainer import Trainer

The same code is published under two names: ``pytorch_lightning`` with ``lightning_fabric``, and ``lightning.pytorch``
with ``lightning.fabric``. Python treats these as separate packages; their classes are not interchangeable.
After the import of this module, both names refer to one package, in this process and in those that it starts with
``multiprocessing``. It is the package that is already loaded. If neither is, it is ``lightning.pytorch``, which the
first import of either name loads. Common base classes for the classes of both packages would satisfy only two thirds
of the 120 places in which Lightning calls ``isinstance``.

No other module of ``trainer`` imports this module.

Raises:
    ImportError: if both are loaded already, or the version of the loaded one differs from that of ``lightning``.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import multiprocessing
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from types import ModuleType

from trainer.errors import ONE_PACKAGE

_TWINS = (("pytorch_lightning", "lightning.pytorch"), ("lightning_fabric", "lightning.fabric"))


class _AliasLoader(Loader):
    """Binds a second name to a module, which keeps its first name and its spec."""

    def __init__(self, first: str) -> None:
        self._first = first

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self._first)


class _AliasFinder(MetaPathFinder):
    """Finds modules by the second names of their packages.

    Args:
        first: the first name of each package, by its second name.
    """

    def __init__(self, first: dict[str, str]) -> None:
        self._first = first

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for second, first in self._first.items():
            if fullname == second or fullname.startswith(f"{second}."):
                name = first + fullname[len(second) :]
                if (original := _locate(name)) is None:
                    return None
                spec = ModuleSpec(fullname, _AliasLoader(name), origin=original.origin)
                spec.submodule_search_locations = original.submodule_search_locations
                return spec
        return None


class _ImportOnUnpickle:
    """Sent to processes that ``multiprocessing`` starts, before user objects: unpickling it imports this module."""


def _locate(name: str) -> ModuleSpec | None:
    """Return the spec of a module. Imports nothing, while ``importlib.util.find_spec`` imports its parent packages."""
    path, *words = name.split(".")
    spec = importlib.util.find_spec(path)
    for word in words:
        if spec is None or spec.submodule_search_locations is None:
            return None
        path = f"{path}.{word}"
        spec = PathFinder.find_spec(path, spec.submodule_search_locations)
    return spec


def _second_and_first(old: str, new: str) -> tuple[str, str]:
    """Return the two names of a package: the alias, and the name that it refers to.

    Raises:
        ImportError: if both are loaded, or their versions differ.
    """
    loaded = sys.modules.get(old)
    if loaded is None or loaded is sys.modules.get(new):
        return (old, new) if loaded is None or loaded.__name__ == new else (new, old)
    if new in sys.modules:
        raise ImportError(f"{old} and {new} are both loaded already, as two packages. To make them one, {ONE_PACKAGE}")
    if loaded.__version__ != (expected := version("lightning")):
        versions = f"{old} {loaded.__version__} is loaded already, and lightning has version {expected}"
        raise ImportError(f"{versions}. Install the same version of both. Or, to use only lightning, {ONE_PACKAGE}")
    return new, old


def _install() -> None:
    names = dict(_second_and_first(*twins) for twins in _TWINS)
    sys.meta_path.insert(0, _AliasFinder(names))
    for second, first in names.items():
        logging.root.manager.loggerDict[second] = logging.getLogger(first)  # a level set on one applies to the other
    multiprocessing.current_process()._config[__name__] = _ImportOnUnpickle()  # type: ignore[attr-defined]


_install()
