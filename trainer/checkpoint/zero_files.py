"""Checkpoint folders of DeepSpeed. It writes and reads its files through :class:`ZeroCheckpointEngine`.

=============================  =====================================================================================
``*_model_states.pt``          DeepSpeed's: the module, in the dtype that it computes in; one per process at stage 3
``*_optim_states.pt``          DeepSpeed's, one per process: its part of the float32 weights and of the optimizer
                               states, in flat tensors
``latest``, ``zero_to_*.py``   DeepSpeed's, for its own tools
``state.ckpt`` and others      as in every sharded checkpoint (:mod:`trainer.checkpoint.shards`)
=============================  =====================================================================================

DeepSpeed reads its files as pickles that may run any code. This module first verifies their hashes, and then reads only
tensors, plain containers and a few of DeepSpeed's classes. Without DeepSpeed, or with another number of processes or
another stage, :func:`fill` assembles whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import count
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from trainer.checkpoint.inert import known_classes
from trainer.checkpoint.manifest import Manifest
from trainer.errors import CheckpointError

FACT = "deepspeed"
"""Key in the manifest of a DeepSpeed checkpoint. Its value contains stage, number of processes, and precision."""

TAG = "."
"""DeepSpeed's tag, the name of a subfolder. This value selects the folder itself."""

_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


class FileHasher(Protocol):
    """Writes files and records their hashes."""

    def save(self, value: Any, path: Path) -> None:
        """Write a file."""

    def add(self, path: Path) -> None:
        """Record an existing file."""


class _PlainObject:
    """Replaces an object of DeepSpeed: it has the attributes, but no behavior."""

    def __init__(self, *arguments: Any) -> None:
        pass


class ZeroCheckpointEngine:
    """Replaces DeepSpeed's checkpoint engine, which reads and writes its files.

    Args:
        sums: writes the files. Default: None, for reading.
    """

    def __init__(self, sums: FileHasher | None = None) -> None:
        self._sums = sums
        self.error: Exception | None = None

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file. An error is stored instead of raised, because the other processes wait for all files."""
        assert self._sums is not None
        try:
            self._sums.save(state_dict, Path(path))
        except Exception as error:
            self.error = error

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file as tensors, containers, and DeepSpeed's own objects."""
        from importlib import import_module

        classes = []
        for name in _CLASSES:
            module, _, attribute = name.rpartition(".")
            classes.append((getattr(import_module(module), attribute), name))
        return _load(Path(path), classes)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """No-op: the folders exist."""

    def create(self, info: Any) -> None:
        """No-op: there is nothing to prepare."""

    def commit(self, info: Any) -> bool:
        """Return True. The manifest marks the checkpoint as complete."""
        return True

    def is_data_parallel_writer(self, rank: int) -> bool:
        """Return whether this process writes the data that all processes share."""
        return rank == 0

    def is_decoupled(self) -> bool:
        """Return False, because ``save`` writes synchronously."""
        return False

    def cleanup(self) -> None:
        """No-op: there is nothing to clean up."""


def write(engine: Any, folder: Path, sums: FileHasher) -> None:
    """Write DeepSpeed's files. All processes must call it together.

    Raises:
        OSError: if the files of this process cannot be written.
    """
    before, engine.checkpoint_engine = engine.checkpoint_engine, (parts := ZeroCheckpointEngine(sums))
    try:
        engine.save_checkpoint(str(folder), tag=TAG)
    finally:
        engine.checkpoint_engine = before
    if parts.error is not None:
        raise parts.error
    if torch.distributed.get_rank() == 0:
        for path in folder.iterdir():
            if path.name == "latest" or path.suffix == ".py":
                sums.add(path)


def check(folder: Path, manifest: Manifest, reader: int, readers: int) -> None:
    """Check that DeepSpeed's files contain no unexpected objects, before the processes read them together.

    Each process checks a share of the list of files: every ``readers``-th file, beginning with number ``reader``.

    Args:
        folder: the folder.
        manifest: its manifest.
        reader: number of this reader.
        readers: number of readers.

    Raises:
        pickle.UnpicklingError: if a file contains an unexpected object.
    """
    for name in sorted(manifest.files)[reader::readers]:
        if name.endswith(".pt"):
            for global_name in get_unsafe_globals_in_checkpoint(folder / name):
                if global_name not in _CLASSES:
                    raise UnpicklingError(f"GLOBAL {global_name} was not an allowed global in {name}")


def read(engine: Any, folder: Path, strict: bool) -> None:
    """Read DeepSpeed's files, written by the same number of processes at the same stage. All processes must call it."""
    before, engine.checkpoint_engine = engine.checkpoint_engine, ZeroCheckpointEngine()
    try:
        engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=strict, load_lr_scheduler_states=False)
    finally:
        engine.checkpoint_engine = before


class _FlatPart(NamedTuple):
    """One process's part of a group of parameters: the weights and their optimizer states."""

    weights: Tensor
    states: Mapping[str, Any]


def fill(tree: dict[str, Any], folder: Path, manifest: Manifest, only: str = "") -> dict[str, Any]:
    """Return ``tree`` with whole tensors: the module's state dict, and its optimizer's states by parameter name.

    Args:
        tree: the contents of ``state.ckpt``.
        folder: the verified checkpoint.
        manifest: its manifest.
        only: ``"state_dict"`` to fill only the state dict. Default: "", both are filled.

    Raises:
        CheckpointError: if some data is missing.
    """
    stage, processes = manifest.facts[FACT]["stage"], manifest.facts[FACT]["processes"]
    spread = stage == 3
    try:
        prefixes = [f"zero_pp_rank_{rank}_" for rank in range(processes)] if spread else [""]
        models = [_load(folder / f"{prefix}mp_rank_00_model_states.pt") for prefix in prefixes]
        optimizers = [_load(_optimizer_file(folder, rank))["optimizer_state_dict"] for rank in range(processes)]
        tensors_of = _tensors_of_partitions if spread else _tensors_of_slices
        weights: dict[str, Tensor] = {}
        states: dict[str, dict[str, Any]] = {}
        for name, key, value in tensors_of(models[0]["param_shapes"], optimizers):
            if key is None:
                weights[name] = value
            else:
                states.setdefault(name, {})[key] = value
        if spread and models[0]["frozen_param_shapes"]:
            for name, shape in models[0]["frozen_param_shapes"].items():
                parts = [model["frozen_param_fragments"][name].reshape(-1) for model in models]
                weights[name] = torch.cat(parts)[: shape.numel()].view(shape)
        whole = {name: weights.get(name, value) for name, value in models[0]["module"].items()}
        for name, other in models[0]["shared_params"].items():
            whole[name] = whole[other]
    except (KeyError, IndexError, AttributeError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"{folder} is damaged: DeepSpeed's files do not belong together ({error}).") from error
    tree = {**tree, "state_dict": whole}
    if only != "state_dict" and tree.get("optimizer_states"):
        (state,) = tree["optimizer_states"]
        tree["optimizer_states"] = [{**state, "state": states}]
    return tree


def _optimizer_file(folder: Path, rank: int) -> Path:
    name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    return folder / f"bf16_{name}" if (folder / f"bf16_{name}").is_file() else folder / name


NamedTensors = Iterator[tuple[str, str | None, Any]]
"""Name of a parameter; key of an optimizer state, or None for the weights; the whole value."""


def _tensors_of_slices(shapes: list[dict[str, torch.Size]], optimizers: list[dict[str, Any]]) -> NamedTensors:
    """Yield the tensors of stages 1 and 2: each process has a slice of the concatenated parameters of a group."""
    for group, group_shapes in enumerate(shapes):
        flats = [
            _FlatPart(
                optimizer["single_partition_of_fp32_groups"][group],
                optimizer["base_optimizer_state"]["state"].get(group, {}),
            )
            for optimizer in optimizers
        ]
        places = [optimizer["param_slice_mappings"][group] for optimizer in optimizers]
        for name, shape in group_shapes.items():
            slices = [
                (flat, at[name].start, at[name].numel) for flat, at in zip(flats, places, strict=True) if name in at
            ]
            yield from _join_slices(name, shape, slices)


def _tensors_of_partitions(shapes: list[dict[str, torch.Size]], optimizers: list[dict[str, Any]]) -> NamedTensors:
    """Yield the tensors of stage 3: each process stores its pieces of the parameters in flat tensors."""
    flats = [
        [
            _FlatPart(weights, optimizer["optimizer_state_dict"]["state"].get(index, {}))
            for index, weights in enumerate(optimizer["fp32_flat_groups"])
        ]
        for optimizer in optimizers
    ]
    numbers, start = count(1), 0
    index = 0
    for group_shapes in shapes:
        for name, shape in group_shapes.items():
            size = math.ceil(shape.numel() / len(optimizers))
            if start == flats[0][index].weights.numel():
                index, start = next(numbers), 0
            yield from _join_slices(name, shape, [(rank_flats[index], start, size) for rank_flats in flats])
            start += size


def _join_slices(name: str, shape: torch.Size, slices: list[tuple[_FlatPart, int, int]]) -> NamedTensors:
    def join(key: str | None) -> Tensor:
        parts = [
            (flat.weights if key is None else flat.states[key])[start : start + size] for flat, start, size in slices
        ]
        return torch.cat(parts)[: shape.numel()].view(shape)

    yield name, None, join(None)
    first = slices[0][0]
    for key, value in first.states.items():
        spread = isinstance(value, Tensor) and value.dim() and value.numel() >= first.weights.numel()
        yield name, key, join(key) if spread else deepcopy(value)  # copied: step counts change in place


def _load(path: Path, classes: list[tuple[Any, str]] | None = None) -> Any:
    with known_classes([(_PlainObject, name) for name in _CLASSES] if classes is None else classes):
        return torch.load(path, map_location="cpu", weights_only=True)
