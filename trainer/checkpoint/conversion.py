"""Convert a checkpoint in one process: between folder and file, or to weights only."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import loading as state
from trainer.checkpoint import reading as files
from trainer.checkpoint import sharded_files, shards
from trainer.checkpoint.inert import PLACES, StandIn, load_inert
from trainer.checkpoint.manifest import facts_of
from trainer.checkpoint.weights import read as read_weights
from trainer.errors import CheckpointError, CheckpointWriteError


def consolidate(folder: Path, file: Path) -> list[str]:
    """Convert a sharded checkpoint, a folder, to one file in Lightning's format.

    Returns:
        The places of hyperparameters that are objects. They are left out, because reading does not create them.

    Raises:
        CheckpointError: if the folder is damaged or contains unexpected objects, or the file cannot be written.
    """
    checkpoint, left_out = _read(folder)
    files.write(partial(torch.save, checkpoint), file, facts_of(checkpoint))
    return left_out


def split(file: Path, folder: Path) -> list[str]:
    """Convert a file to a sharded checkpoint, as a run of one process writes it. The inverse of :func:`consolidate`.

    Returns:
        See :func:`consolidate`.

    Raises:
        CheckpointError: if the file is damaged or contains unexpected objects, or the folder cannot be written.
    """
    checkpoint, left_out = _read(file)
    tree, tensors, processes = shards.split_for_write(checkpoint)
    try:
        shards.write(folder, tree, tensors, processes, facts_of(checkpoint), None)
    except OSError as error:
        raise CheckpointWriteError(f"{folder} was not written: {error.strerror or error}.", error.errno) from error
    return left_out


def weights_of(checkpoint: Path, prefix: str = "") -> dict[str, Tensor]:
    """Return a checkpoint's weights with names that begin with ``prefix``, by their names without the prefix.

    Raises:
        CheckpointError: if the checkpoint is damaged, contains unexpected objects, or has no such weights.
    """
    weights = read_weights(checkpoint)
    chosen = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if not chosen:
        examples = ", ".join(list(weights)[:3])
        raise CheckpointError(
            f"{checkpoint} has no weights with names that start with {prefix!r}; it has {examples} ..."
        )
    return chosen


def export(weights: Mapping[str, Tensor], file: Path) -> None:
    """Write weights as a safetensors file. An older file is replaced completely or stays unchanged.

    Raises:
        ModuleNotFoundError: if safetensors is not installed.
        CheckpointError: if safetensors does not support one of the tensors.
        CheckpointWriteError: if the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    taken: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, value in weights.items():  # safetensors rejects tensors that share memory, such as tied weights
        if not _is_supported(value):
            dtype = f"{value.dtype}, {value.layout}".replace("torch.", "")
            raise CheckpointError(f"safetensors does not support {name} ({dtype}). Leave it out with a PREFIX.")
        is_shared = value.untyped_storage().data_ptr() in taken
        taken.add(value.untyped_storage().data_ptr())
        value = value.detach().resolve_conj().resolve_neg().contiguous()
        plain[name] = value.clone() if is_shared else value
    temporary = sharded_files.temporary_path(file)
    try:
        files.make_folder(file.parent)
        save_file(plain, temporary, metadata={"format": "pt"})
        temporary.replace(file)
    except (OSError, SafetensorError) as error:  # SafetensorError if the disk is full
        reason, number = getattr(error, "strerror", None) or error, getattr(error, "errno", None)
        raise CheckpointWriteError(f"{file} was not written: {reason}.", number) from error
    finally:
        sharded_files.discard(temporary)


def _is_supported(value: Tensor) -> bool:
    """Return whether safetensors supports the tensor."""
    is_too_wide = value.is_complex() and value.dtype is not torch.complex64
    return value.layout is torch.strided and not value.is_quantized and not is_too_wide


def _read(checkpoint: Path) -> tuple[dict[str, Any], list[str]]:
    """Verify a folder or file. Return its contents without stand-ins, and the places of these stand-ins.

    Stand-ins are among the hyperparameters. They are left out, because the original objects are not known.
    """

    def load(path: Path, weights_only: bool) -> dict[str, Any]:
        is_archive = files.verify(path)
        loaded: dict[str, Any] = shards.read_whole(path) if path.is_dir() else load_inert(path, mmap=is_archive)
        return loaded

    left_out: list[str] = []
    contents = state.read(load, checkpoint, None)
    contents |= {name: _plain(contents[name], name, left_out) for name in PLACES & contents.keys()}
    return {name: value for name, value in contents.items() if value is not _REMOVED}, left_out


_REMOVED = object()


def _plain(value: Any, place: str, left_out: list[str]) -> Any:
    if isinstance(value, StandIn) or (isinstance(value, type) and issubclass(value, StandIn)):
        left_out.append(place)
        return _REMOVED
    if isinstance(value, dict):
        entries = {name: _plain(item, f"{place}.{name}", left_out) for name, item in value.items()}
        return type(value)((name, item) for name, item in entries.items() if item is not _REMOVED)
    if type(value) in (list, tuple):
        items = [_plain(item, f"{place}[{i}]", left_out) for i, item in enumerate(value)]
        return type(value)(item for item in items if item is not _REMOVED)
    return value
