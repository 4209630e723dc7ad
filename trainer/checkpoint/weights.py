"""Read the weights in a file or folder of any origin, without optimizers, counters and settings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer import packages
from trainer.checkpoint import files
from trainer.checkpoint import loading as state
from trainer.checkpoint.inert import load_inert
from trainer.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from trainer.checkpoint.shards import Template

SAFETENSORS = ".safetensors"
"""Suffix of files that are read by the package safetensors. All others are read by torch."""

_PLACES = ("state_dict", "model_state_dict", "model")
"""Keys of the weights in files that contain more, as used by Lightning, PyTorch's tutorials and torchvision."""


def read(path: Path, weights_only: bool | None = None, template: Template | None = None) -> dict[str, Tensor]:
    """Return the tensors of a module in a file or folder, by name.

    Supported are checkpoints (file or folder), state dicts written by ``torch.save``, directly or in a mapping under
    ``state_dict``, ``model_state_dict`` or ``model``, and safetensors files. Files are verified and memory-mapped if
    possible, so that only the used part is loaded into memory.

    Args:
        path: the file or folder.
        weights_only: as for :func:`trainer.checkpoint.loading.read`. Default: None.
        template: returns the tensors to read a folder into, as for :func:`trainer.checkpoint.shards.read`. Default:
            None.

    Raises:
        CheckpointNotFoundError: if the file does not exist.
        UnsafeCheckpointError: if it contains other objects than tensors and plain containers.
        CheckpointError: if it is damaged, or has no weights.
        ConfigurationError: if the package safetensors is required, but not installed.
    """
    if path.suffix == SAFETENSORS and (problem := packages.missing("safetensors")):
        raise ConfigurationError(f"{path} needs {problem}")
    found: dict[str, Tensor] = state.read(partial(_load, template=template), path, weights_only)["state_dict"]
    return found


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
    nodes = [loaded[name] for name in _PLACES if name in loaded] if isinstance(loaded, Mapping) else []
    for node in (*nodes, loaded):
        if isinstance(node, Mapping):
            tensors = {name: value for name, value in node.items() if isinstance(value, Tensor)}
            if tensors and all(isinstance(name, str) for name in tensors):
                return tensors
    what = f"a mapping of {', '.join(map(str, list(loaded)[:5])) or 'nothing'}" if isinstance(loaded, Mapping) else ""
    raise CheckpointError(
        f"{path} has no weights: it is {what or f'a {type(loaded).__name__}'}. Expected a checkpoint, or tensors by"
        f" name, at the top level or under {', '.join(_PLACES[:-1])} or {_PLACES[-1]}."
    )
