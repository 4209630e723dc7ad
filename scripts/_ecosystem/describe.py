"""Convert recorded values to comparable plain structures: dicts, lists, numbers, strings and tensors."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor

SKIPPED = {"_trainer", "trainer", "_fabric", "_jit_internal"}
"""Attributes of objects that lead back to the Trainer."""


class Describer:
    """Describe values. The name of the run's folder is replaced in strings."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.open: set[int] = set()
        """Ids of objects that are being described. An object that contains itself is named, not described again."""

    def __call__(self, value: Any) -> Any:
        """Return ``value`` in a comparable form."""
        if isinstance(value, Tensor) and value.is_meta:
            return f"{value.dtype} of {tuple(value.shape)} on the meta device"
        if isinstance(value, Tensor):
            return value.detach().to("cpu", copy=True).as_subclass(Tensor)
        if value is None or (isinstance(value, (bool, int, float, complex)) and type(value).__module__ == "builtins"):
            return value
        if isinstance(value, str):
            return str(value).replace(self.folder, "FOLDER")
        if isinstance(value, (type, type(len), type(describes))):
            return name_of(value)
        if id(value) in self.open:
            return f"<{name_of(type(value))} again>"
        self.open.add(id(value))
        try:
            return self.container(value)
        finally:
            self.open.discard(id(value))

    def container(self, value: Any) -> Any:
        kind = name_of(type(value))
        library = kind.partition(".")[0]
        if isinstance(value, Mapping):
            entries = {key if isinstance(key, str) else f"{key!r}": self(item) for key, item in value.items()}
            entries = {self(key): item for key, item in entries.items()}
            return entries if kind == "builtins.dict" else {"class": kind, **entries}
        if isinstance(value, (list, tuple)):
            return [] if not value else [kind, *map(self, value)] if kind != "builtins.list" else [*map(self, value)]
        if isinstance(value, Set):
            return [kind, *sorted(map(repr, map(self, value)))]
        if library == "numpy" and hasattr(value, "item") and not hasattr(value, "__len__"):
            return {"class": kind, "value": value.item()}
        if library == "numpy":
            return self.array(value, kind)
        if library == "pandas" and hasattr(value, "to_numpy"):
            return {"class": kind, "index": self.array(getattr(value, "index", ()), kind)} | {
                "values": self.array(value.to_numpy(), kind)
            }
        if isinstance(value, torch.Generator):
            return {"class": kind, "state": value.get_state()}
        if isinstance(value, functools.partial):
            return {"class": kind, "of": self(value.func), "args": self(value.args), "keywords": self(value.keywords)}
        if hasattr(value, "__dict__") and not kind.startswith(("builtins.", "torch._C")):
            attributes = {key: item for key, item in vars(value).items() if key not in SKIPPED}
            if attributes:
                return {"class": kind, **{key: self(item) for key, item in attributes.items()}}
        return re.sub(r" at 0x[0-9a-f]+", "", self(repr(value)))

    def array(self, value: Any, kind: str) -> Any:
        import numpy

        array = numpy.asarray(value)
        if array.dtype.kind in "biuf" and array.dtype.name in ("bool", *NUMBERS):
            return torch.from_numpy(numpy.ascontiguousarray(array).copy()).reshape(array.shape)
        return {"class": kind, "dtype": str(array.dtype), "values": self([str(item) for item in array.reshape(-1)])}


NUMBERS = ("int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64")


def describes() -> None:
    """Do nothing. The type of this function is that of all functions."""


def name_of(thing: Any) -> str:
    """Return the full name of a class or function, with ``pytorch_lightning`` replaced by ``lightning.pytorch``."""
    name = f"{getattr(thing, '__module__', None) or 'builtins'}.{getattr(thing, '__qualname__', repr(thing))}"
    return re.sub(r"^(pytorch_lightning|lightning_fabric)\.", lambda m: OTHER[m[1]], name)


OTHER = {"pytorch_lightning": "lightning.pytorch.", "lightning_fabric": "lightning.fabric."}
