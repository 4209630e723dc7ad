"""The local part of a sharded tensor, and the whole of it."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return the shard of a ``DTensor`` in this process, sharing its memory, or any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001 - `to_local` takes 4 us


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a ``DTensor``, or any other tensor itself. A collective for a ``DTensor``."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
