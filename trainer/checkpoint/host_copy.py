"""Copy a checkpoint to host memory, so that training cannot change it."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from trainer.state.containers import KeyPath, mapped


def on_host(checkpoint: Any) -> Any:
    """Return a copy of ``checkpoint``, with every tensor in its dicts, lists and tuples copied to host memory.

    Tensors that are one object or share memory in ``checkpoint`` also do so in the copy. Therefore ``torch.save``
    writes the same bytes for a checkpoint on the CPU and for its copy.
    """
    copies: dict[int, Any] = {}  # by the id of the original: the memo of `copy.deepcopy`
    storages: dict[int, torch.UntypedStorage] = {}

    def copy_tensor(_: KeyPath, tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = _copy(tensor, storages)
        return tensor

    mapped(checkpoint, copy_tensor)
    return copy.deepcopy(checkpoint, copies)


def is_sharded(value: Any) -> bool:
    """Return whether ``value`` is a ``DTensor``, which is distributed over processes."""
    module = sys.modules.get("torch.distributed.tensor")  # a DTensor exists only if its module has been imported
    return module is not None and isinstance(value, module.DTensor)


def is_plain(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a dense Tensor or Parameter whose storage contains its values (no lazy negation)."""
    is_dense = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    return type(tensor) in (Tensor, Parameter) and is_dense


def _copy(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    if tensor.is_meta:
        return tensor
    if not is_plain(tensor):
        return copy.deepcopy(tensor.detach()).cpu()
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = on_cpu = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
        on_cpu.copy_(storage)  # host-device synchronization
    copied = torch.empty(0, dtype=tensor.dtype)
    copied.set_(storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
    if type(tensor) is Parameter:
        return Parameter(copied, requires_grad=tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)
