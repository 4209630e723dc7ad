"""Buffers that are not in the module's state dict, because they are registered with ``persistent=False``.

A run may change their shapes and dtypes, set them to None, and register more of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainer.engine.parts import local
from trainer.module_tree import modules_by_name, plain_name

Buffers = Mapping[str, Tensor | None]
"""Buffers by name, without the prefixes of wrappers such as ``torch.compile``."""

Dtypes = Mapping[str, torch.dtype | None]
"""Dtypes of buffers by name; None for a buffer that is None."""


def buffers_of(module: nn.Module, *, persistent: bool) -> dict[str, Tensor | None]:
    """Return the values of the non-persistent buffers. For a DTensor, return the part of this process.

    Args:
        module: the module.
        persistent: whether to include persistent buffers, too, because the saved state dict is another process's.
    """
    found: dict[str, Tensor | None] = {}
    seen: dict[int, Tensor] = {}  # a buffer with several names stays one tensor
    for path, owner, name in _named_buffers(module):
        buffer = owner._buffers[name]
        if name not in owner._non_persistent_buffers_set and (buffer is None or not persistent):
            continue
        if buffer is None:
            found[path] = None
        elif not is_lazy(buffer) and not buffer.is_meta:
            found[path] = seen.setdefault(id(buffer), local(buffer.detach()))
    return found


def dtypes_of(module: nn.Module) -> dict[str, torch.dtype | None]:
    """Return the dtype of each buffer, persistent or not."""
    return {path: getattr(owner._buffers[name], "dtype", None) for path, owner, name in _named_buffers(module)}


def changed_dtypes(saved: Buffers, first: Dtypes) -> dict[str, torch.dtype]:
    """Return the dtype that each buffer in ``saved`` had when the run began, for buffers with another dtype now.

    Args:
        saved: the result of :func:`buffers_of`.
        first: the result of :func:`dtypes_of` at the beginning of the run.
    """
    before = {path: first.get(path) for path, value in saved.items() if value is not None}
    return {path: dtype for path, dtype in before.items() if dtype not in (None, getattr(saved[path], "dtype", None))}


def restore(module: nn.Module, saved: Buffers, changed: Dtypes, first: Dtypes, device: torch.device) -> list[str]:
    """Restore buffers: copy values into buffers of the same shape and dtype, and replace other buffers.

    Buffers that existed when the run began get the dtype of this run's precision if it differs from the saved run's.

    Args:
        module: the module.
        saved: the result of :func:`buffers_of` in the saved run.
        changed: the result of :func:`changed_dtypes` in the saved run.
        first: the result of :func:`dtypes_of` at the beginning of this run. Non-persistent buffers that are neither in
            ``first`` nor in ``saved`` are removed, because they were registered after the checkpoint was saved.
        device: the device of buffers that do not exist yet.

    Returns:
        The names of buffers that cannot be restored, because the module that owned them does not exist.
    """
    owners = modules_by_name(module)
    replaced: dict[int, Tensor] = {}
    missing = []
    for path, value in saved.items():
        prefix, _, name = plain_name(path).rpartition(".")
        if (owner := owners.get(prefix)) is None:
            missing.append(path)
            continue
        current = owner._buffers[name] if name in owner._buffers else None  # noqa: SIM401 - a ScriptModule has no `get`
        if value is None:
            _replace(owner, name, None)
            continue
        dtype = value.dtype
        if value.is_floating_point() and changed.get(path, dtype) != (initial := first.get(path)) and initial:
            dtype = initial
        if current is not None and _fits(current, value.shape, dtype):
            with torch.no_grad():
                local(current).copy_(value)
        else:
            new = value.to(device if current is None or current.is_meta else current.device, dtype)
            _replace(owner, name, replaced.setdefault(id(value), new))
    for path, owner, name in list(_named_buffers(module)):
        if name in owner._non_persistent_buffers_set and path not in saved and path not in first:
            delattr(owner, name)
    return missing


def _named_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the full name of each buffer, the module that owns it, and its name there."""
    for path, owner in module.named_modules():
        for name, _ in owner._buffers.items():  # iterating over a ScriptModule's `_buffers` yields numbers
            yield plain_name(f"{path}.{name}" if path else name), owner, name


def _fits(buffer: Tensor, shape: torch.Size, dtype: torch.dtype) -> bool:
    """Return whether values of this shape and dtype can be copied into the buffer."""
    if is_lazy(buffer) or buffer.is_meta or buffer.is_inference() or buffer.dtype != dtype:
        return False
    part = local(buffer)
    overlaps = part.layout is torch.strided and any(
        stride == 0 and size > 1 for stride, size in zip(part.stride(), part.shape, strict=True)
    )
    return part.shape == shape and not overlaps


def _replace(owner: nn.Module, name: str, value: Tensor | None) -> None:
    if name not in owner._buffers:
        vars(owner).pop(name, None)  # a plain attribute that the run has turned into a buffer
        owner._non_persistent_buffers_set.add(name)
    owner._buffers[name] = value
