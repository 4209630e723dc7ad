"""The local part of a sharded tensor, and the whole of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """Return the shard of a ``DTensor`` in this process, sharing its memory, or any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001 - `to_local` takes 4 us


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a ``DTensor``, or any other tensor itself. A collective for a ``DTensor``."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread(value: Any, like: Any) -> Any:
    """Return this process's part of a whole tensor, sharded as ``like`` is, or ``value`` if it needs no change."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != like.shape:
        return value  # loading it raises an error
    mesh = like.device_mesh
    part = distribute_tensor(value.to(mesh.device_type), mesh, like.placements, src_data_rank=None)
    return part if part.device == like.device else part.to(like.device)
