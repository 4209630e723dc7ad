"""Find the index, label or probability that torch rejects because it is out of range."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MESSAGE = re.compile("out of (range|bounds)|not in the valid range|Class values must be|should be between 0 and 1")
"""Part of torch's error messages."""
_INDEX_THIRD = ("gather", "take_along_dim", "scatter", "scatter_add", "index_select", "index_add", "index_copy")
_LABELS = ("cross_entropy", "nll_loss", "multi_margin_loss")


class OutOfRange(NamedTuple):
    """A tensor that torch rejects.

    Attributes:
        values: the tensor.
        low, high: the lowest and highest number that is accepted.
        ignored: another number that is accepted, or None.
        error: the message of the exception.
    """

    values: Tensor
    low: int
    high: int
    ignored: int | None = None
    error: str = ""

    @property
    def rejected(self) -> Tensor:
        """Whether each number is rejected."""
        return self.rejected_in(self.values)

    def rejected_in(self, values: Tensor) -> Tensor:
        """Return whether each of these numbers would be rejected."""
        values = values if values.is_floating_point() else values.long()  # the limits may exceed the range of int16
        outside = (values < self.low) | (values > self.high)
        return outside if self.ignored is None else outside & (values != self.ignored)


class RaisedCall(TorchFunctionMode):
    """Remembers the call of a function of torch that raises an exception.

    Attributes:
        rejection: the argument that is out of range, or None.
    """

    rejection: OutOfRange | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except (IndexError, RuntimeError) as error:
            name = getattr(func, "__name__", "")
            candidates = _tensors_with_range(name if name.startswith("__") else name.rstrip("_"), args, kwargs or {})
            rejected = (candidate._replace(error=f"{error}") for candidate in candidates if candidate.rejected.any())
            self.rejection = next(rejected, None)
            raise


def _tensors_with_range(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[OutOfRange]:
    def given(position: int, *names: str) -> Any:
        return args[position] if position < len(args) else next((kwargs[key] for key in names if key in kwargs), None)

    first = given(0, "input", "tensor")
    if name in ("embedding", "embedding_bag"):
        return [OutOfRange(first, 0, len(given(1, "weight")) - 1)]
    if name in _LABELS and not given(1, "target").is_floating_point():
        classes = first.shape[min(1, first.dim() - 1)]
        return [OutOfRange(given(1, "target"), 0, classes - 1, kwargs.get("ignore_index", -100))]
    if name == "binary_cross_entropy":
        return [OutOfRange(given(1, "target"), 0, 1)]
    if name == "one_hot":
        classes = given(1, "num_classes")
        return [OutOfRange(first, 0, torch.iinfo(torch.int64).max if classes in (None, -1) else classes - 1)]
    if name in _INDEX_THIRD:
        return [OutOfRange(given(2, "index"), 0, first.shape[given(1, "dim")] - 1)]
    if name in ("__getitem__", "__setitem__"):
        return _indices(first, args[1] if isinstance(args[1], tuple) else (args[1],))
    return []


def _indices(tensor: Tensor, items: tuple[Any, ...]) -> list[OutOfRange]:
    """Return the integer tensors that index dimensions of a tensor."""
    rejections, dim = [], 0
    used = [item.dim() if _is_mask(item) else int(item is not None and item is not ...) for item in items]
    for item, number in zip(items, used, strict=True):
        if isinstance(item, Tensor) and not _is_mask(item):
            size = tensor.shape[dim]
            rejections.append(OutOfRange(item, -size if (item < 0).any() else 0, size - 1))
        dim += tensor.dim() - sum(used) if item is ... else number
    return rejections


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype is torch.bool
