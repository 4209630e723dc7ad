"""Iterate over the submodules and tensors of a module, and over the parameters of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
"""Components of a module's name that come from ``torch.compile`` and from torch's activation checkpointing wrapper."""


def is_dense(tensor: Tensor) -> bool:
    """Return whether all elements of a tensor are in memory: it is not sparse, nested, quantized or uninitialized."""
    is_plain = not is_lazy(tensor) and tensor.layout is torch.strided
    return is_plain and not tensor.is_nested and not tensor.is_quantized


def bytes_of(tensor: Tensor) -> Any:
    """Return the bytes of the elements of a dense tensor as a NumPy array. Synchronizes with the device."""
    contiguous = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # a contiguous tensor of one element may have any stride, but a view with another dtype needs a stride of 1
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8).numpy()


def is_measurable(tensor: Tensor) -> bool:
    """Return whether a tensor has a norm: it is dense, not empty, and complex or floating-point (except float8)."""
    is_real = is_dense(tensor) and tensor.is_floating_point() and tensor.element_size() > 1  # float8 has no norm
    return (is_real or (is_dense(tensor) and tensor.is_complex())) and tensor.numel() > 0


class OwnedTensor(NamedTuple):
    """A parameter or buffer of a module. A shared tensor has several owners.

    Attributes:
        path: the name of the module that owns it.
        owner: that module.
        name: the name of the tensor in ``owner``.
        tensor: the parameter or buffer.
    """

    path: str
    owner: nn.Module
    name: str
    tensor: Tensor


def owned_tensors(
    root: nn.Module, methods: Sequence[str] = ("named_parameters", "named_buffers")
) -> Iterator[OwnedTensor]:
    """Yield each parameter and buffer, once for each owner. The owners may be changed during the iteration."""
    for path, owner in root.named_modules():
        for method in methods:
            for name, tensor in list(getattr(owner, method)(recurse=False, remove_duplicate=False)):
                yield OwnedTensor(path, owner, name, tensor)


def owned_parameters(root: nn.Module) -> Iterator[OwnedTensor]:
    """Yield the parameters among :func:`owned_tensors`."""
    return owned_tensors(root, ("named_parameters",))


def owned_buffers(root: nn.Module) -> Iterator[OwnedTensor]:
    """Yield the buffers among :func:`owned_tensors`."""
    return owned_tensors(root, ("named_buffers",))


def modules_by_name(root: nn.Module) -> dict[str, nn.Module]:
    """Return the submodules by `plain_name`. A wrapped module replaces its wrapper, which has the same name."""
    return {plain_name(path): module for path, module in root.named_modules(remove_duplicate=False)}


def all_modules(*modules: nn.Module) -> set[nn.Module]:
    """Return the modules and all of their submodules."""
    return {submodule for module in modules for submodule in module.modules()}


def plain_name(path: str) -> str:
    """Return a name from ``named_modules()`` without the names of wrappers around modules."""
    if not any(wrapper in path for wrapper in _WRAPPERS):  # the common case, in a quarter of the time
        return path
    return ".".join(word for word in path.split(".") if word not in _WRAPPERS)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return a module's original class instead of the class that ``fully_shard`` derives from it (``FSDPLinear``)."""
    cls = type(module)
    return cls.__mro__[getattr(cls, "_orig_cls_mro_index", 0)]


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called, unlike a container (``nn.ModuleList``)."""
    if isinstance(module, torch.jit.ScriptModule):
        return True  # reading `forward` from its class raises
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def parameters_of(optimizer: Optimizer) -> list[Any]:
    """Return the parameters of an optimizer, in the order of its state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
