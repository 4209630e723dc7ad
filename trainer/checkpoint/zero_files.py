"""A checkpoint as a folder of DeepSpeed's: its own engine writes each process's part, and reads it.

=============================  =====================================================================================
``*_model_states.pt``          DeepSpeed's: the module, in the dtype that it computes in; at stage 3 of each process
``*_optim_states.pt``          DeepSpeed's, of each process: its part of the float32 weights and of what the optimizer
                               keeps, in flat tensors
``latest``, ``zero_to_*.py``   DeepSpeed's, for its own tools
``state.ckpt`` and others      ours, as in every folder (:mod:`trainer.checkpoint.shards`)
=============================  =====================================================================================

DeepSpeed reads its files as pickles that may run any code. Here they are read after their sums have been verified, as
tensors and plain containers, with three classes of DeepSpeed's and no other. Without DeepSpeed, or where its processes
or its stage are other ones now, :func:`fill` puts whole tensors together.
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
"""What the manifest of such a folder has: the stage, the number of processes, and the precision."""

TAG = "."
"""What DeepSpeed calls the folder inside of the folder: none."""

_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


class Sums(Protocol):
    """Knows the sums of the files that it writes."""

    def save(self, value: Any, path: Path) -> None:
        """Write a file."""

    def add(self, path: Path) -> None:
        """Take note of a file that is there."""


class _Plain:
    """Stands for an object of DeepSpeed's: has its attributes, and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        pass


class Parts:
    """In the place of DeepSpeed's checkpoint engine: what writes and reads its files.

    Args:
        sums: writes; None to read.
    """

    def __init__(self, sums: Sums | None = None) -> None:
        self._sums = sums
        self.error: Exception | None = None

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file. An error is kept: the other processes wait at the end of all files."""
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
        """They are there."""

    def create(self, info: Any) -> None:
        """Nothing is to be prepared."""

    def commit(self, info: Any) -> bool:
        """The manifest does that."""
        return True

    def is_data_parallel_writer(self, rank: int) -> bool:
        """Whether this process writes what all have."""
        return rank == 0

    def is_decoupled(self) -> bool:
        """False: all is written when ``save`` returns."""
        return False

    def cleanup(self) -> None:
        """Nothing is left."""


def write(engine: Any, folder: Path, sums: Sums) -> None:
    """Have DeepSpeed write its files. All processes call this together.

    Raises:
        OSError: this process's cannot be written.
    """
    before, engine.checkpoint_engine = engine.checkpoint_engine, (parts := Parts(sums))
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


def check(folder: Path, manifest: Manifest, part: int, parts: int) -> None:
    """See whether DeepSpeed's files hold more than what belongs there, before its processes read them together.

    Looks at this one of several parts of them.

    Raises:
        pickle.UnpicklingError: they do.
    """
    for name in sorted(manifest.files)[part::parts]:
        if name.endswith(".pt"):
            for found in get_unsafe_globals_in_checkpoint(folder / name):
                if found not in _CLASSES:
                    raise UnpicklingError(f"GLOBAL {found} was not an allowed global in {name}")


def read(engine: Any, folder: Path, strict: bool) -> None:
    """Have DeepSpeed read what as many processes at the same stage have written. All call this together."""
    before, engine.checkpoint_engine = engine.checkpoint_engine, Parts()
    try:
        engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=strict, load_lr_scheduler_states=False)
    finally:
        engine.checkpoint_engine = before


class _Flat(NamedTuple):
    """What one process has of a group of parameters: the weights, and what the optimizer keeps of them."""

    weights: Tensor
    kept: Mapping[str, Any]


def fill(tree: dict[str, Any], folder: Path, manifest: Manifest, only: str = "") -> dict[str, Any]:
    """``tree`` with whole tensors: the module's state dict and, by the names of parameters, its optimizer's.

    Args:
        tree: what ``state.ckpt`` has.
        folder: the checkpoint, which has been verified.
        manifest: its manifest.
        only: ``"state_dict"`` for that alone.

    Raises:
        CheckpointError: something is missing in it.
    """
    stage, processes = manifest.facts[FACT]["stage"], manifest.facts[FACT]["processes"]
    spread = stage == 3
    try:
        models = [
            _load(
                folder / (f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if spread else "mp_rank_00_model_states.pt")
            )
            for rank in range(processes if spread else 1)
        ]
        optimizers = [_load(_optimizer_file(folder, rank))["optimizer_state_dict"] for rank in range(processes)]
        put_together = _by_partition if spread else _by_mapping
        weights: dict[str, Tensor] = {}
        kept: dict[str, dict[str, Any]] = {}
        for name, key, value in put_together(models[0]["param_shapes"], optimizers):
            if key is None:
                weights[name] = value
            else:
                kept.setdefault(name, {})[key] = value
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
        tree["optimizer_states"] = [{**state, "state": kept}]
    return tree


def _optimizer_file(folder: Path, rank: int) -> Path:
    name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    return folder / f"bf16_{name}" if (folder / f"bf16_{name}").is_file() else folder / name


Found = Iterator[tuple[str, str | None, Any]]
"""The name of a parameter; what the optimizer keeps of it, or None for its weights; and that, whole."""


def _by_mapping(shapes: list[dict[str, torch.Size]], optimizers: list[dict[str, Any]]) -> Found:
    """Of stages 1 and 2, where a process has a stretch of all parameters of a group, one after the other."""
    for group, group_shapes in enumerate(shapes):
        flats = [
            _Flat(one["single_partition_of_fp32_groups"][group], one["base_optimizer_state"]["state"].get(group, {}))
            for one in optimizers
        ]
        places = [one["param_slice_mappings"][group] for one in optimizers]
        for name, shape in group_shapes.items():
            where = [
                (flat, at[name].start, at[name].numel) for flat, at in zip(flats, places, strict=True) if name in at
            ]
            yield from _joined(name, shape, where)


def _by_partition(shapes: list[dict[str, torch.Size]], optimizers: list[dict[str, Any]]) -> Found:
    """Of stage 3, where each parameter is divided among all processes, one after the other, in several flat tensors."""
    flats = [
        [
            _Flat(weights, one["optimizer_state_dict"]["state"].get(index, {}))
            for index, weights in enumerate(one["fp32_flat_groups"])
        ]
        for one in optimizers
    ]
    numbers, start = count(1), 0
    index = 0
    for group_shapes in shapes:
        for name, shape in group_shapes.items():
            size = math.ceil(shape.numel() / len(optimizers))
            if start == flats[0][index].weights.numel():
                index, start = next(numbers), 0
            yield from _joined(name, shape, [(mine[index], start, size) for mine in flats])
            start += size


def _joined(name: str, shape: torch.Size, where: list[tuple[_Flat, int, int]]) -> Found:
    def join(key: str | None) -> Tensor:
        parts = [(one.weights if key is None else one.kept[key])[start : start + size] for one, start, size in where]
        return torch.cat(parts)[: shape.numel()].view(shape)

    yield name, None, join(None)
    first = where[0][0]
    for key, value in first.kept.items():
        spread = isinstance(value, Tensor) and value.dim() and value.numel() >= first.weights.numel()
        yield name, key, join(key) if spread else deepcopy(value)  # a step is its own, for it is counted up in place


def _load(path: Path, classes: list[tuple[Any, str]] | None = None) -> Any:
    with known_classes([(_Plain, name) for name in _CLASSES] if classes is None else classes):
        return torch.load(path, map_location="cpu", weights_only=True)
