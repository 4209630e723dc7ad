"""Memory usage of a device by kind, for the report after an out-of-memory error."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from trainer.common import machine
from trainer.common.module_tree import parameters_of
from trainer.precision.scaler import gradients_of

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that torch's allocator reads once, when CUDA is initialized. The second is the older name."""
_COUNTED = ("cuda", "xpu")
"""Devices with an allocator that reports allocated, reserved and free memory."""


@dataclass(frozen=True)
class Usage:
    """Memory usage of a device in bytes. None for values that are not known.

    Args:
        kinds: bytes on the device by kind: ``weights``, ``gradients``, ``optimizer`` (its states), ``buffers`` and
            ``batch``. Tensors that share memory count once.
        allocated: all tensors of the process; on a CPU the memory of the process.
        unused: memory that torch has reserved on the device and that no tensor occupies.
        elsewhere: memory that torch's allocator does not manage: other processes, the driver's context, workspaces of
            libraries.
        peak: maximum of ``allocated``; on CUDA since the fit began, on a CPU since the process began.
        total: memory of the device; on a CPU, the machine's memory or the limit of the process's control group.
    """

    kinds: dict[str, int]
    allocated: int | None = None
    unused: int | None = None
    elsewhere: int | None = None
    peak: int | None = None
    total: int | None = None

    @property
    def rest(self) -> int | None:
        """Return the allocated bytes that belong to none of the kinds: activations and other live tensors."""
        return None if self.allocated is None else max(0, self.allocated - sum(self.kinds.values()))

    @property
    def is_fragmented(self) -> bool:
        """Return whether at least an eighth of the memory that torch has reserved is unused."""
        return bool(self.unused and self.allocated is not None and self.unused * 7 >= self.allocated)

    @property
    def is_mostly_states(self) -> bool:
        """Return whether weights, gradients and optimizer states take more than half of the device."""
        states = sum(self.kinds[kind] for kind in ("weights", "gradients", "optimizer"))
        return self.total is not None and states * 2 > self.total

    def facts(self) -> dict[str, int]:
        """Return all known values, for a record."""
        sizes = {**self.kinds, "rest": self.rest, **vars(self)}
        return {name: size for name, size in sizes.items() if isinstance(size, int)}


def measure(
    device: torch.device, module: nn.Module | None, optimizers: Iterable[Optimizer], batch: Iterable[Tensor]
) -> Usage:
    """Measure the memory usage of a device, without a host-device synchronization.

    Args:
        device: the device of this process.
        module: the module with the parameters, gradients and buffers, or None.
        optimizers: optimizers with states and parameters. Their parameters count in addition to the module's, because
            the two may differ while an engine shards the module.
        batch: the tensors of the current batch.
    """
    optimizers = list(optimizers)
    module_parameters = [] if module is None else list(module.parameters())
    parameters = [*module_parameters, *(p for optimizer in optimizers for p in parameters_of(optimizer))]
    tensors_by_kind: dict[str, Iterable[Any]] = {
        "weights": parameters,
        "gradients": [gradient for optimizer in optimizers for gradient in gradients_of(optimizer)],
        "optimizer": [leaf for optimizer in optimizers for leaf in tree_leaves(list(optimizer.state.values()))],
        "buffers": [] if module is None else module.buffers(),
        "batch": batch,
    }
    seen: dict[int, torch.UntypedStorage] = {}
    kinds = {kind: sum(_sizes(tensors, device, seen)) for kind, tensors in tensors_by_kind.items()}
    return Usage(kinds, **_of_device(device))


def _sizes(tensors: Iterable[Any], device: torch.device, seen: dict[int, torch.UntypedStorage]) -> Iterator[int]:
    """Yield the sizes of the storages on ``device`` that have not been seen before."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or tensor.device != device:
            continue
        if hasattr(tensor, "__tensor_flatten__"):  # a DTensor contains this process's part of a parameter
            parts = tensor.__tensor_flatten__()[0]
            yield from _sizes([getattr(tensor, name) for name in parts], device, seen)
        elif tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if id(storage) not in seen:
                seen[id(storage)] = storage  # the reference prevents another object from getting the same id
                yield storage.nbytes()


def _of_device(device: torch.device) -> dict[str, int | None]:
    if device.type in _COUNTED:
        backend = torch.get_device_module(device)
        free, total = backend.mem_get_info(device)
        allocated, reserved = backend.memory_allocated(device), backend.memory_reserved(device)
        return {
            "allocated": allocated,
            "unused": reserved - allocated,
            "elsewhere": max(0, total - free - reserved),
            "peak": backend.max_memory_allocated(device),
            "total": total,
        }
    if device.type == "mps":
        allocated = torch.mps.current_allocated_memory()
        unused = torch.mps.driver_allocated_memory() - allocated
        return {"allocated": allocated, "unused": unused, "total": torch.mps.recommended_max_memory()}
    if device.type == "cpu":
        sizes = {"allocated": machine.memory_in_use(), "peak": machine.peak_memory(), "total": machine.memory().most}
        return {name: size or None for name, size in sizes.items()}
    return {}


def expands_segments() -> bool:
    """Return whether CUDA's allocator is configured to avoid fragmentation."""
    return any("expandable_segments:True" in os.environ.get(name, "") for name in ALLOCATOR)


def write_snapshot(device: torch.device, file: Path) -> bool:
    """Write torch's snapshot of CUDA's allocator, for https://pytorch.org/memory_viz.

    It lists the blocks by segment and, if ``torch.cuda.memory._record_memory_history`` was called, the line that
    allocated each block. Does not synchronize with the device.

    Returns:
        Whether it was written. False on other devices than CUDA, and if torch does not have this private function.

    Raises:
        OSError: if the file cannot be written.
    """
    dump = getattr(torch.cuda.memory, "_dump_snapshot", None)
    if device.type != "cuda" or dump is None:
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    dump(str(file))
    return True
