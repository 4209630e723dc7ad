"""Weights and buffers of modules that are not part of the LightningModule, such as an average that a callback keeps."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Set

import torch
from torch import Tensor, nn

from trainer.errors import join_first
from trainer.module_tree import bytes_of, is_dense
from trainer.state.plain_values import memory_of

Saved = dict[int, Tensor | None]
"""The changed tensors by number, or None instead of a tensor of which no copy is saved."""


class OutsideModules:
    """The weights and buffers of modules that changed since this instance was created.

    Whether a tensor has changed is known from a checksum, because copies of large frozen modules may not fit in memory.

    Args:
        modules: the modules, without their submodules. Default: none.
        elsewhere: storages (`memory_of`) of tensors that are saved elsewhere, and left out here. Default: none.
    """

    def __init__(self, modules: Iterable[nn.Module] = (), elsewhere: Set[int] = frozenset()) -> None:
        self._names: list[str] = []
        self._tensors: list[Tensor] = []
        for module in modules:
            for name, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                is_plain = type(value) in (Tensor, nn.Parameter) and is_dense(value) and not value.is_meta
                if is_plain and not memory_of([value]) & elsewhere:
                    self._names.append(f"{type(module).__name__}.{name}")
                    self._tensors.append(value)
        self._first: list[int | None] = [*map(_checksum, self._tensors)]

    def read(self, *, copies: bool) -> Saved:
        """Return the changed tensors, or only their numbers if ``copies`` is False."""
        changed = [number for number, value in enumerate(self._tensors) if _checksum(value) != self._first[number]]
        return {number: self._tensors[number].detach() if copies else None for number in changed}

    def write(self, saved: Saved) -> str:
        """Restore the tensors, and return a message about those that are not restored; "" if all are restored."""
        lost = []
        for number, value in saved.items():
            current = self._tensors[number] if number < len(self._tensors) else None
            if current is None or value is None or current.shape != value.shape:
                lost.append(f"tensor {number}" if current is None else self._names[number])
                continue
            with torch.no_grad():
                current.copy_(value)
            self._first[number] = None  # counts as changed, because the next process may begin with another value
        if not lost:
            return ""
        return (
            f"These weights of modules outside of the LightningModule are not restored: {join_first(lost, 5)}."
            " Either several processes wrote the checkpoint, which then does not have them, or the program has other"
            " modules now. If the training depends on them, make the modules attributes of the LightningModule."
        )


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(bytes_of(tensor).data)
