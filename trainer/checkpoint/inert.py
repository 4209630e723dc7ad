"""Hyper-parameters that are objects: a checkpoint with such is read without making one of them.

``torch.load(weights_only=True)`` reads the file, all of it, by its own rules. Classes and functions that the
hyper-parameters name, and nothing else in the file does, are told to it as classes of ours that do nothing
(:class:`StandIn`). So nothing that the file names is looked up, imported or called, whatever it holds; and what stands
elsewhere in it is refused as ever.

Which names these are is found in an outline of the file, in which every name is a class that takes note of what it is
given. What an outline gets wrong cannot do harm: torch then refuses a name, or a stand-in lies in another place.
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

from trainer import redaction

PLACES = frozenset({"hyper_parameters", "hparams_type", "datamodule_hyper_parameters", "datamodule_hparams_type"})
"""Keys of a checkpoint under which objects may stand."""

_OPERATIONS = {ord(code.code) for code in pickletools.opcodes if code.proto <= 2 and not code.name.startswith("EXT")}
"""Of pickles, what ``torch.save`` may use; without those that name objects of this process by numbers."""
_FEW = 64  # elements of an array

_NO_NAME = "\n"  # no pickle that torch reads can name this

_lock = Lock()  # what is told to torch holds for the whole process


class StandIn:
    """Stands for an object among the hyper-parameters of a checkpoint, or for its class; it was not made."""

    stands_for: ClassVar[str] = "object of a class that is inside of another"

    def __new__(cls, *arguments: Any, **named: Any) -> Any:
        """Take no notice of what the object would be made of."""
        return object.__new__(cls)

    def __setstate__(self, state: Any) -> None:
        """Take no notice of it."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"There is no {name!r}: a {type(self).stands_for} was saved among the hyper-parameters, and checkpoints are"
            " read without making such objects. Pass weights_only=False, for a file of your own making, to have it."
        )


class _ListStandIn(StandIn):
    def __new__(cls, *arguments: Any, **named: Any) -> Any:
        return []


class _DictStandIn(StandIn):
    def __new__(cls, *arguments: Any, **named: Any) -> Any:
        return OrderedDict()


class _AttributeStandIn(StandIn):
    def __new__(cls, *arguments: Any, **named: Any) -> Any:
        return StandIn  # it may be a class, and be called


_KINDS: dict[Any, type[StandIn]] = {
    None: StandIn,
    list: _ListStandIn,
    dict: _DictStandIn,
    getattr: _AttributeStandIn,
}


class _Thing:
    """In an outline: what the file would have made by calling a name, with all that would have been given to it."""

    names: ClassVar[tuple[str, ...]] = ()
    owner: ClassVar[Any] = None
    """Where it is an attribute: what of."""
    kind: ClassVar[Any] = None
    """What it has to be for torch, which appends to lists and sets items of dicts."""

    parts: list[Any]

    def __new__(cls, *arguments: Any, **named: Any) -> _Thing:
        self = object.__new__(cls)
        self.parts = [arguments, named]
        return self

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)

    def append(self, item: Any) -> None:
        type(self).kind = list
        self.parts.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        type(self).kind = dict
        self.parts.append((key, value))


class _Getattr(_Thing):
    """In an outline: by this, pickles name what is inside of a class."""

    kind = getattr

    def __new__(cls, *arguments: Any, **named: Any) -> Any:
        return type("_Thing", (_Thing,), {"owner": (cls, arguments)})


class _Outliner(pickle._Unpickler):  # that of Python, not of C: its operations can be taken away
    """Reads a pickle as containers, texts, numbers and `_Thing`s."""

    dispatch: ClassVar[dict[int, Any]] = {
        code: operation for code, operation in pickle._Unpickler.dispatch.items() if code in _OPERATIONS
    }

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="latin1")
        self._classes: dict[str, type[_Thing]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """A `_Thing`, one for each name."""
        written = f"{module}.{name}"
        if written not in self._classes:
            now = ".".join(NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name)))
            base = _Getattr if now == "builtins.getattr" else _Thing
            self._classes[written] = type("_Thing", (base,), {"names": (written, now)})
        return self._classes[written]

    def persistent_load(self, pid: Any) -> Any:
        """What names a storage, instead of it."""
        return pid


class _Outline:
    """What a file's hyper-parameters name, and all texts in them."""

    def __init__(self, file: IO[bytes]) -> None:
        with zipfile.ZipFile(file) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1)
            tree = _Outliner(BytesIO(archive.read(name))).load()
        inside = {key: value for key, value in tree.items() if key in PLACES}
        things, self.texts = _found_in(inside)
        if things:
            things -= _found_in({key: value for key, value in tree.items() if key not in PLACES})[0]
        self._things = things

    def stand_ins(self) -> list[Any]:
        """As `torch.serialization.safe_globals` takes them; what the user has told it stays what it is."""
        declared = declared_safe()
        made = [
            (type(_KINDS[thing.kind].__name__, (_KINDS[thing.kind],), {"stands_for": name}), name)
            for thing in self._things
            for name in dict.fromkeys(thing.names)
            if name not in declared
        ]
        return [*made, (StandIn, _NO_NAME)] if made else []


def _found_in(tree: Any) -> tuple[set[type[_Thing]], set[str]]:
    """The names and the texts in a part of an outline."""
    things, texts, seen, waiting = set(), set(), set(), [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            texts.add(value)
        if id(value) in seen or isinstance(value, (str, bytes, int, float)):
            continue
        seen.add(id(value))
        if isinstance(value, type) and issubclass(value, _Thing):
            things.add(value)
            waiting.append(value.owner)
        elif isinstance(value, _Thing):
            waiting += [type(value), *value.parts]
        elif isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += value
    return things, texts


def declared_safe() -> dict[str, Any]:
    """What the user has told to ``torch.serialization.add_safe_globals``, by its name in files."""
    entries = [entry if isinstance(entry, tuple) else (entry, "") for entry in get_safe_globals()]
    return {name or f"{entry.__module__}.{entry.__qualname__}": entry for entry, name in entries}


@contextmanager
def inert(file: IO[bytes]) -> Iterator[None]:
    """Have ``torch.load(weights_only=True)`` read a checkpoint whose hyper-parameters hold objects, as stand-ins.

    Args:
        file: the checkpoint; any other file changes nothing.
    """
    try:
        made = _Outline(file).stand_ins()
    except Exception:  # no such archive, or a damaged one: torch tells
        made = []
    if not made:
        yield
        return
    with _lock, safe_globals(made):
        try:
            yield
        except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            names = ", ".join(name for _, name in made[:5])
            raise pickle.UnpicklingError(f"its hyper-parameters cannot be passed over ({names}): {error}") from error


def load_inert(source: Path | BytesIO, *, weights_only: bool = True, mmap: bool = False) -> Any:
    """What ``torch.save`` has written to a file, in host memory; with ``weights_only`` under :func:`inert`."""
    opened = source.open("rb") if isinstance(source, Path) else nullcontext(source)
    with opened as file, inert(file) if weights_only else nullcontext():
        file.seek(0)
        return torch.load(source, map_location="cpu", weights_only=weights_only, mmap=mmap)


@contextmanager
def known_classes(classes: list[tuple[Any, str]]) -> Iterator[None]:
    """Have ``torch.load(weights_only=True)`` make objects of these classes, each by the name that files have of it."""
    with _lock, safe_globals([*classes]):
        yield


def refusal(hyper_parameters: Any) -> str:
    """Why a checkpoint with these could not be written, or not be read again by :func:`inert`; "" where it can.

    Tries it in memory, without the data of tensors and arrays. An object that holds a secret is refused as well.
    """
    buffer = BytesIO()
    try:
        write_without_data({"hyper_parameters": hyper_parameters}, buffer)
    except Exception as error:  # whatever a class of the user's does when it is pickled
        return f"it cannot be pickled ({type(error).__name__}: {redaction.text(str(error))})"
    texts = _texts_of(buffer.getvalue())
    if texts is None:
        return "it could not be read again without running code"
    if any(redaction.text(text) != text for text in texts):
        return "it holds a value of the environment, or a password"
    return ""


@lru_cache(maxsize=4)  # from save to save most are the same
def _texts_of(file: bytes) -> frozenset[str] | None:
    """The texts among the hyper-parameters in a checkpoint; None where it cannot be read without running code."""
    try:
        outline = _Outline(BytesIO(file))
        with warnings.catch_warnings(), _lock, safe_globals(outline.stand_ins()):
            warnings.simplefilter("ignore")
            load(BytesIO(file), weights_only=True)
    except Exception:  # of torch's, or of our own
        return None
    return frozenset(outline.texts)


def write_without_data(value: Any, file: IO[bytes]) -> None:
    """``torch.save``, but tensors and arrays are written as empty ones: for a trial, in milliseconds."""
    save(value, file, pickle_module=SimpleNamespace(Pickler=_WithoutData, __name__="pickle"))


class _WithoutData(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind in (torch.Tensor, torch.nn.Parameter) and not value.__dict__:
            return torch.empty(0, dtype=value.dtype).__reduce_ex__(2)  # type: ignore[no-untyped-call]
        numpy = sys.modules.get("numpy")
        if numpy is not None and kind is numpy.ndarray and value.size > _FEW and not value.dtype.hasobject:
            return numpy.empty(0, value.dtype).__reduce__()
        return NotImplemented
