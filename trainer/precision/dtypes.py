"""Cast nested data, and set the dtype of new tensors, for several precisions."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from trainer.errors import PrecisionError


def cast(data: Any, dtype: torch.dtype) -> Any:
    """Return ``data`` with every floating-point tensor in it cast to ``dtype``; other objects are unchanged."""
    return apply_to_collection(
        data, Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, allow_frozen=True
    )


def half_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return a 16-bit dtype, given by name or as a dtype.

    Raises:
        PrecisionError: if it is not ``float16`` or ``bfloat16``.
    """
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if chosen not in (torch.float16, torch.bfloat16):
        raise PrecisionError(f"Got dtype={dtype!r}, expected 'float16' or 'bfloat16'.")
    assert isinstance(chosen, torch.dtype)
    return chosen


def real_view(tensor: Tensor) -> Tensor:
    """Return a complex tensor as a real view of shape (..., 2), and any other tensor unchanged."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def widen(data: Any) -> Any:
    """Return ``data`` with every floating-point tensor in it cast to float32, except float64.

    This is the rule of ``torch.amp.custom_fwd(cast_inputs=torch.float32)``. If no tensor needs a cast, the same object
    is returned. Thus a list that a module fills for its caller is not replaced by a copy.
    """
    if isinstance(data, Tensor):
        return _float32(data)
    cast_some: list[bool] = []

    def widened(tensor: Tensor) -> Tensor:
        wide = _float32(tensor)
        if wide is not tensor:
            cast_some.append(True)
        return wide

    wide = apply_to_collection(data, Tensor, widened, allow_frozen=True)
    return wide if cast_some else data


def _float32(tensor: Tensor) -> Tensor:
    keeps = not tensor.is_floating_point() or tensor.dtype is torch.float64
    return tensor if keeps else tensor.float()  # the tensor itself if it is already float32


class DefaultDtype:
    """Set torch's default dtype inside the context, and restore it outside. Not re-entrant; reusable.

    Args:
        dtype: dtype of tensors created inside without a ``dtype`` (``torch.zeros(3)``).
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._inside = dtype
        self._outside = torch.get_default_dtype()

    def __enter__(self) -> None:
        self._outside = torch.get_default_dtype()
        if self._outside is not self._inside:  # reading it is free, setting it takes a microsecond
            torch.set_default_dtype(self._inside)

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._outside is not self._inside:
            torch.set_default_dtype(self._outside)
