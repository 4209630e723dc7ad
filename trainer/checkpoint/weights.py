"""The weights in a file or folder, whoever has written it: without optimizers, counters and settings."""

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
"""How the names of files end that the package safetensors reads; all others are read by torch."""

_PLACES = ("state_dict", "model_state_dict", "model")
"""Where the weights stand in files that hold more: as Lightning, tutorials of PyTorch, and torchvision have it."""


def read(path: Path, weights_only: bool | None = None, template: Template | None = None) -> dict[str, Tensor]:
    """The tensors of a module that a file or folder holds, by their names.

    A checkpoint, file or folder; a state dict that ``torch.save`` has written, alone or in a mapping under
    ``state_dict``, ``model_state_dict`` or ``model``; a file of safetensors. Files are verified as far as they can be,
    and mapped where they can be, so that no more of them than is used gets into memory.

    Args:
        path: the file or folder.
        weights_only: as for :func:`trainer.checkpoint.loading.read`.
        template: what tensors of a folder are read into, as for :func:`trainer.checkpoint.shards.read`.

    Raises:
        CheckpointNotFoundError: there is no such file.
        UnsafeCheckpointError: it holds more than tensors and plain containers.
        CheckpointError: it is damaged, or has no weights.
        ConfigurationError: the package safetensors is needed, and is not installed.
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
        f"{path} has no weights in it: it is {what or f'a {type(loaded).__name__}'}. Expected a checkpoint, or tensors"
        f" by their names, alone or under {', '.join(_PLACES[:-1])} or {_PLACES[-1]}."
    )
