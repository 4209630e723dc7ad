"""Resolve a name or an object to a precision plugin."""

from __future__ import annotations

import importlib
import pkgutil

from trainer import precision as package
from trainer.errors import PrecisionError
from trainer.precision.base import PLUGINS as PLUGINS
from trainer.precision.base import Precision
from trainer.precision.full import FullPrecision
from trainer.precision.names import canonical

MODULES = [
    importlib.import_module(module.name) for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
]
"""Modules of this package. Importing one registers the names of the plugins that it defines."""


def resolve_precision(precision: str | int | Precision | None) -> Precision:
    """Return the plugin that ``precision`` names, or the plugin itself if it is one already. None is ``32-true``.

    Raises:
        PrecisionError: if the name is unknown, or the object is not one of our precision plugins.
    """
    if precision is None:
        return FullPrecision()
    if isinstance(precision, (str, int)):
        name = canonical(precision, PLUGINS)
        return PLUGINS[name](**PLUGINS[name].names[name])
    if isinstance(precision, Precision):
        return precision
    class_ = type(precision)  # type: ignore[unreachable]  # callers without types
    raise PrecisionError(
        f"Got precision of type {class_.__module__}.{class_.__qualname__}, expected a name such as '16-mixed' or a"
        " trainer.precision.Precision object."
        + (
            " Lightning's precision plugins have their own autocast and scaler. Use trainer.precision.MixedPrecision,"
            " HalfPrecision, FullPrecision or DoublePrecision instead."
            if class_.__module__.startswith(("lightning", "pytorch_lightning"))
            else ""
        )
    )
