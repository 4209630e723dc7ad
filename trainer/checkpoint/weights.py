"""Read the weights in a file or folder of any origin, without optimizers, counters and settings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer.checkpoint import loading as state
from trainer.checkpoint import reading as files
from trainer.checkpoint.inert import load_inert
from trainer.common import packages
from trainer.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from trainer.checkpoint.shards import Template

SAFETENSORS = ".safetensors"
"""Suffix of the files that the package safetensors reads. ``torch.load`` reads all other files."""

_KEYS = ("state_dict", "model_state_dict", "model")
"""Keys of the weights in files that contain more, as used by Lightning, PyTorch's tutorials and torchvision."""


def read(path: Path, weights_only: bool | None = None, template: Template | None = None) -> dict[str, Tensor]:
    """Return the tensors of a module in a file or folder, by name.

    Supports checkpoints (a file or a folder), safetensors files, and state dicts written by ``torch.save``, either at
    the top level or under the key ``state_dict``, ``model_state_dict`` or ``model``. Files are verified, and
    memory-mapped if possible, so that only the used part is loaded into memory.

    Args:
        path: the file or folder.
        weights_only: as for :func:`trainer.checkpoint.loading.read`. Default: None.
        template: returns the tensors to read a folder into, as for :func:`trainer.checkpoint.shards.read`. Default:
            None.

    Raises:
        CheckpointNotFoundError: if the file does not exist.
        UnsafeCheckpointError: if the file contains objects other than tensors and plain containers.
        CheckpointError: if the file is damaged, or has no weights.
        ConfigurationError: if the package safetensors is required but not installed.
    """
    if path.suffix == SAFETENSORS and (problem := packages.missing("safetensors")):
        raise ConfigurationError(f"{path} needs {problem}")
    tensors: dict[str, Tensor] = state.read(partial(_load, template=template), path, weights_only)["state_dict"]
    return tensors


def _load(path: Path, weights_only: bool, template: Template | None) -> dict[str, Any]:
    if path.is_dir():
        from trainer.checkpoint import shards

        files.verify(path)
        tree, _ = shards.read(path, weights_only=weights_only, template=template, only="state_dict")
        return {"state_dict": _tensors_in(tree, path)}
    if path.suffix == SAFETENSORS:
        from safetensors.torch import load_file

        return {"state_dict": load_file(path)}
    return {"state_dict": _tensors_in(load_inert(path, weights_only=weights_only, mmap=files.verify(path)), path)}


def _tensors_in(loaded: Any, path: Path) -> dict[str, Tensor]:
    nodes = [loaded[key] for key in _KEYS if key in loaded] if isinstance(loaded, Mapping) else []
    for node in (*nodes, loaded):
        if isinstance(node, Mapping):
            tensors = {name: value for name, value in node.items() if isinstance(value, Tensor)}
            if tensors and all(isinstance(name, str) for name in tensors):
                return tensors
    contents = f"a {type(loaded).__name__}"
    if isinstance(loaded, Mapping):
        contents = f"a mapping with the keys {', '.join(map(str, list(loaded)[:5]))}" if loaded else "an empty mapping"
    raise CheckpointError(
        f"{path} has no weights: it contains {contents}. Expected a checkpoint, or tensors by name, at the top level or"
        f" under the key {', '.join(_KEYS[:-1])} or {_KEYS[-1]}."
    )
