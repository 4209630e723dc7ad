"""A copy of a checkpoint in host memory, which training cannot change any more."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def on_host(checkpoint: Any) -> Any:
    """A copy of ``checkpoint`` with every tensor in host memory of its own.

    What is one object, or shares memory, is one object and shares memory in the copy. So ``torch.save`` writes the same
    bytes for the copy of a checkpoint on the CPU as for the checkpoint.
    """
    return _Copier().copy(checkpoint)


def is_sharded(value: Any) -> bool:
    """Whether ``value`` is a ``DTensor``: one of which each process holds a part."""
    module = sys.modules.get("torch.distributed.tensor")  # who has one has imported it
    return module is not None and isinstance(value, module.DTensor)


def is_plain(tensor: Tensor) -> bool:
    """Whether it is of torch's own classes, and nothing but its elements in its storage."""
    is_dense = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    return type(tensor) in (Tensor, Parameter) and is_dense


class _Copier:
    """Keeps in mind what it has copied."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}  # by the original's id; as `copy.deepcopy` keeps it, which goes on with it
        self._storages: dict[int, torch.UntypedStorage] = {}

    def copy(self, value: Any) -> Any:
        if id(value) in self._made:
            return self._made[id(value)]
        made: Any
        if type(value) in (dict, OrderedDict):
            made = self._made[id(value)] = type(value)()
            for key, item in value.items():
                made[self.copy(key)] = self.copy(item)
            if type(value) is OrderedDict:  # a state dict has its version numbers as an attribute
                vars(made).update(self.copy(vars(value)))
        elif type(value) is list:
            made = self._made[id(value)] = []
            made.extend(map(self.copy, value))
        elif type(value) is tuple:
            made = self._made[id(value)] = tuple(map(self.copy, value))
        elif isinstance(value, Tensor):
            made = self._made[id(value)] = self._copy_tensor(value)
        else:
            made = copy.deepcopy(value, self._made)
        return made

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        if not is_plain(tensor):
            return copy.deepcopy(tensor.detach()).cpu()
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = _copied(storage)
        made = torch.empty(0, dtype=tensor.dtype)
        made.set_(self._storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
        if type(tensor) is Parameter:
            return Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)


def _copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    made = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
    made.copy_(storage)  # waits for the device
    return made
