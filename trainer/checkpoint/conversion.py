"""From one form of a checkpoint to another, in one process: folder, file, weights alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import files, sharded_files, shards
from trainer.checkpoint.inert import PLACES, StandIn, inert
from trainer.errors import CheckpointError, CheckpointWriteError


def consolidate(folder: Path, file: Path) -> list[str]:
    """Make one file, in Lightning's format, of a folder that a run has written in parts.

    Returns:
        The places of hyper-parameters that are objects, which are left out: they are not made when they are read.

    Raises:
        CheckpointError: the folder is damaged, or the file cannot be written.
        pickle.UnpicklingError: the folder holds more than what belongs there.
    """
    manifest = sharded_files.verify(folder)
    checkpoint = shards.read_whole(folder)
    left_out: list[str] = []
    checkpoint = _without_objects(checkpoint, left_out)
    files.write(partial(torch.save, checkpoint), file, _facts(manifest.facts))
    return left_out


def split(file: Path, folder: Path) -> list[str]:
    """Make a folder, as a run of one process writes it in parts, of a file. The opposite of :func:`consolidate`.

    Returns:
        As :func:`consolidate`.

    Raises:
        CheckpointError: the file is damaged, or the folder cannot be written.
        pickle.UnpicklingError: the file holds more than what belongs there.
    """
    checkpoint = _read_file(file)
    manifest = files.read_manifest(file)
    facts = _facts(manifest.facts) if manifest is not None else {"weights_only": "optimizer_states" not in checkpoint}
    left_out: list[str] = []
    tree, tensors, own = shards.taken_apart(_without_objects(checkpoint, left_out))
    try:
        shards.write(folder, tree, tensors, own, facts, None)
    except OSError as error:
        raise CheckpointWriteError(f"{folder} was not written: {error.strerror or error}.", error.errno) from error
    return left_out


def weights_of(checkpoint: Path, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a checkpoint's module; of those whose names begin with ``prefix``, without it.

    Raises:
        CheckpointError: it is damaged, or has no such weights.
        pickle.UnpicklingError: it holds more than what belongs there.
    """
    if checkpoint.is_dir():
        sharded_files.verify(checkpoint)
        state = shards.read(checkpoint, only="state_dict")[0].get("state_dict", {})
    else:
        state = _read_file(checkpoint)["state_dict"]
    weights = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    found = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if not found:
        some = ", ".join(list(weights)[:3])
        raise CheckpointError(f"{checkpoint} has no weights whose names begin with {prefix!r}; it has {some} ...")
    return found


def export(weights: Mapping[str, Tensor], file: Path) -> None:
    """Write weights as a file of safetensors, in the place of an older one or not at all.

    Raises:
        ModuleNotFoundError: safetensors is not installed.
        CheckpointWriteError: it cannot be written.
    """
    from safetensors.torch import save_file

    taken: set[int] = set()
    plain: dict[str, Tensor] = {}
    for name, value in weights.items():  # no two may share memory, as tied weights do
        is_shared = value.untyped_storage().data_ptr() in taken
        taken.add(value.untyped_storage().data_ptr())
        value = value.detach().contiguous()
        plain[name] = value.clone() if is_shared else value
    part = sharded_files.part_of(file)
    try:
        files.make_folder(file.parent)
        save_file(plain, part, metadata={"format": "pt"})
        part.replace(file)
    except OSError as error:
        raise CheckpointWriteError(f"{file} was not written: {error.strerror or error}.", error.errno) from error
    finally:
        sharded_files.discard(part)


def _read_file(file: Path) -> dict[str, Any]:
    files.verify(file)
    with file.open("rb") as stream, inert(stream):
        checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CheckpointError(f"{file} is not a checkpoint: it has no 'state_dict'.")
    return checkpoint


def _facts(said: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in said.items() if name in ("epoch", "step", "weights_only")}


def _without_objects(checkpoint: dict[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Without the stand-ins among the hyper-parameters: what they stand for is not known."""
    here = {name: _plain(checkpoint[name], name, left_out) for name in PLACES & checkpoint.keys()}
    return {**checkpoint, **{name: value for name, value in here.items() if value is not _GONE}}


_GONE = object()


def _plain(value: Any, place: str, left_out: list[str]) -> Any:
    if isinstance(value, StandIn) or (isinstance(value, type) and issubclass(value, StandIn)):
        left_out.append(place)
        return _GONE
    if isinstance(value, dict):
        made = {name: _plain(one, f"{place}.{name}", left_out) for name, one in value.items()}
        return type(value)((name, one) for name, one in made.items() if one is not _GONE)
    if type(value) in (list, tuple):
        items = [_plain(one, f"{place}[{i}]", left_out) for i, one in enumerate(value)]
        return type(value)(one for one in items if one is not _GONE)
    return value
