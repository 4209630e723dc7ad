"""Read checkpoints with objects among the hyperparameters, without creating these objects.

``torch.load(weights_only=True)`` reads the whole file by its own rules. Classes and functions that only the
hyperparameters refer to are registered as safe globals, but as classes that do nothing (:class:`StandIn`). So none of
these names is looked up, imported or called, whatever the file contains. Other objects in it are rejected as usual.

The names are collected from an outline of the file. In the outline, each name is a class that records the arguments of
its calls. An error in the outline is harmless: torch then rejects a name, or a stand-in appears in another place.

A custom unpickler would have to repeat all of torch's checks.
"""

from __future__ import annotations

import pickle
import pickletools
import sys
import warnings
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import IO, Any, ClassVar

import torch
from torch.serialization import get_safe_globals, load, safe_globals, save

from trainer.common import redaction

PLACES = frozenset({"hyper_parameters", "hparams_type", "datamodule_hyper_parameters", "datamodule_hparams_type"})
"""Keys of a checkpoint that may contain objects."""

_OPERATIONS = {ord(code.code) for code in pickletools.opcodes if code.proto <= 2 and not code.name.startswith("EXT")}
"""Pickle opcodes that ``torch.save`` may use, without those that refer to objects of this process by number."""
_MAX_ELEMENTS = 64  # elements of an array

_NO_NAMES = ("\n", "\n\n")  # no pickle that torch reads can contain these names

_lock = Lock()  # safe globals are global to the process


class _StandInType(type):
    """Type of all stand-ins, registered so that a file may set the state of a stand-in class, but of no other class."""


class StandIn(metaclass=_StandInType):
    """Replaces an object among the hyperparameters of a checkpoint, or its class. The object was not created."""

    stands_for: ClassVar[str] = "nested class or its object"
    factory: ClassVar[Any] = None
    """Function that makes the value that a call of this class returns. Default: None, for an object of this class."""

    def __new__(cls, *arguments: Any, **named: Any) -> Any:
        """Ignore the arguments of the object's constructor."""
        return object.__new__(cls) if cls.factory is None else cls.factory()

    @classmethod
    def __setstate__(cls, state: Any) -> None:
        """Ignore the state."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"There is no {name!r}: a {type(self).stands_for} was saved among the hyperparameters, and checkpoints are"
            " read without constructing such objects. If you created the file yourself, pass weights_only=False."
        )


class _ObjectCall:
    """In an outline: an object that the file would create by calling a name. It records all arguments."""

    names: ClassVar[tuple[str, ...]] = ()
    factory: ClassVar[Any] = None
    """Makes the list or dict that torch requires if the file appends to the object, or sets its items."""

    parts: list[Any]

    def __new__(cls, *arguments: Any, **named: Any) -> _ObjectCall:
        self = object.__new__(cls)
        self.parts = [arguments, named]
        return self

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)

    def append(self, item: Any) -> None:
        type(self).factory = list
        self.parts.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        type(self).factory = OrderedDict
        self.parts.append((key, value))


class _Outliner(pickle._Unpickler):  # not the C class, because its operations cannot be removed
    """Read a pickle as containers, strings, numbers and `_ObjectCall`s."""

    dispatch: ClassVar[dict[int, Any]] = {
        code: operation for code, operation in pickle._Unpickler.dispatch.items() if code in _OPERATIONS
    }

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="latin1")
        self._classes: dict[str, type[_ObjectCall]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a `_ObjectCall`, one for each name."""
        saved_name = f"{module}.{name}"
        if saved_name not in self._classes:
            current_name = ".".join(NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name)))
            self._classes[saved_name] = type("_ObjectCall", (_ObjectCall,), {"names": (saved_name, current_name)})
        return self._classes[saved_name]

    def persistent_load(self, pid: Any) -> Any:
        """Return the reference to a storage instead of the storage."""
        return pid


class _Outline:
    """The names and strings in the hyperparameters of a file."""

    def __init__(self, file: IO[bytes]) -> None:
        with zipfile.ZipFile(file) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1)
            tree = _Outliner(BytesIO(archive.read(name))).load()
        inside = {key: value for key, value in tree.items() if key in PLACES}
        calls, self.texts = _collect(inside)
        if calls:
            calls -= _collect({key: value for key, value in tree.items() if key not in PLACES})[0]
        self._calls = calls

    def stand_ins(self) -> list[Any]:
        """Return arguments for `torch.serialization.safe_globals`, without names that the user has registered."""
        declared = declared_safe()
        stand_ins = [
            (type("StandIn", (StandIn,), {"stands_for": name, "factory": call.factory}), name)
            for call in self._calls
            for name in dict.fromkeys(call.names)
            if name not in declared
        ]
        return [*stand_ins, *zip((StandIn, _StandInType), _NO_NAMES, strict=True)] if stand_ins else []


def _collect(tree: Any) -> tuple[set[type[_ObjectCall]], set[str]]:
    """Return the names and the strings in a part of an outline."""
    calls, texts, seen, queue = set(), set(), set(), [tree]
    while queue:
        value = queue.pop()
        if isinstance(value, str):
            texts.add(value)
        if id(value) in seen or isinstance(value, (str, bytes, int, float)):
            continue
        seen.add(id(value))
        if isinstance(value, type) and issubclass(value, _ObjectCall):
            calls.add(value)
        elif isinstance(value, _ObjectCall):
            queue += [type(value), *value.parts]
        elif isinstance(value, dict):
            queue += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            queue += value
    return calls, texts


def declared_safe() -> dict[str, Any]:
    """Return the user's entries of ``torch.serialization.add_safe_globals``, keyed by their names in files."""
    entries = [entry if isinstance(entry, tuple) else (entry, "") for entry in get_safe_globals()]
    return {name or f"{entry.__module__}.{entry.__qualname__}": entry for entry, name in entries}


@contextmanager
def allow_stand_ins(file: IO[bytes]) -> Iterator[None]:
    """Let ``torch.load(weights_only=True)`` read objects among a checkpoint's hyperparameters as stand-ins.

    Args:
        file: the checkpoint. Any other file has no effect.
    """
    try:
        stand_ins = _Outline(file).stand_ins()
    except Exception:  # torch raises if the archive is missing or damaged
        stand_ins = []
    if not stand_ins:
        yield
        return
    with _lock, safe_globals(stand_ins):
        try:
            yield
        except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            names = ", ".join(name for _, name in stand_ins[:5])
            raise pickle.UnpicklingError(f"its hyperparameters cannot be skipped ({names}): {error}") from error


def load_inert(source: Path | BytesIO, *, weights_only: bool = True, mmap: bool = False) -> Any:
    """Load a file of ``torch.save`` into host memory; if ``weights_only``, in the context :func:`allow_stand_ins`."""
    opened = source.open("rb") if isinstance(source, Path) else nullcontext(source)
    with opened as file, allow_stand_ins(file) if weights_only else nullcontext():
        file.seek(0)
        return torch.load(source, map_location="cpu", weights_only=weights_only, mmap=mmap)


@contextmanager
def known_classes(classes: list[tuple[Any, str]]) -> Iterator[None]:
    """Let ``torch.load(weights_only=True)`` create objects of these classes, each given with its name in files."""
    with _lock, safe_globals([*classes]):
        yield


def refusal(hyper_parameters: Any) -> str:
    """Return the reason why a checkpoint with these hyperparameters cannot be written or read, or "".

    Writes a checkpoint in memory, without the data of tensors and arrays, and reads it with stand-ins. An object that
    contains a secret is also rejected.
    """
    buffer = BytesIO()
    try:
        write_without_data({"hyper_parameters": hyper_parameters}, buffer)
    except Exception as error:  # pickling a user's class can raise anything
        return f"it cannot be pickled ({type(error).__name__}: {redaction.text(str(error))})"
    texts = _texts_of(buffer.getvalue())
    if texts is None:
        return "it could not be read again without running code"
    if any(redaction.text(text) != text for text in texts):
        return "it contains the value of an environment variable, or a password"
    return ""


@lru_cache(maxsize=4)  # usually the same at every save
def _texts_of(file: bytes) -> frozenset[str] | None:
    """Return the strings among the hyperparameters in a checkpoint, or None if reading it would run code."""
    try:
        outline = _Outline(BytesIO(file))
        with warnings.catch_warnings(), _lock, safe_globals(outline.stand_ins()):
            warnings.simplefilter("ignore")
            load(BytesIO(file), weights_only=True)
    except Exception:  # raised by torch or by this module
        return None
    return frozenset(outline.texts)


def write_without_data(value: Any, file: IO[bytes]) -> None:
    """Write like ``torch.save``, but with empty tensors and arrays, for a trial that takes milliseconds."""
    save(value, file, pickle_module=SimpleNamespace(Pickler=_WithoutData, __name__="pickle"))


class _WithoutData(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        class_ = type(value)
        if class_ in (torch.Tensor, torch.nn.Parameter) and not value.__dict__:
            return torch.empty(0, dtype=value.dtype).__reduce_ex__(2)  # type: ignore[no-untyped-call]
        numpy = sys.modules.get("numpy")
        if numpy is not None and class_ is numpy.ndarray and value.size > _MAX_ELEMENTS and not value.dtype.hasobject:
            return numpy.empty(0, value.dtype).__reduce__()
        return NotImplemented
