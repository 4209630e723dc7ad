"""Precisions with one dtype throughout: ``32-true`` and ``64-true``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn

from trainer.errors import PrecisionError
from trainer.precision.base import Precision


class FullPrecision(Precision):
    """``32-true``: everything in the dtype it has, usually float32."""

    name = "32-true"


class DoublePrecision(Precision):
    """``64-true``: parameters, batches and newly made tensors in float64. For gradient checks and references."""

    name = "64-true"

    def __init__(self) -> None:
        self._default_dtype = _DefaultDtype(torch.float64)

    def check(self, device: torch.device) -> None:
        """MPS has no float64."""
        if device.type == "mps":
            raise PrecisionError(
                "Got precision='64-true' on an MPS device, which has no float64. Use precision='32-true',"
                " or accelerator='cpu'."
            )

    def convert_module(self, module: nn.Module) -> nn.Module:
        """All floating-point parameters and buffers as float64."""
        return module.double()

    def convert_batch(self, batch: Any) -> Any:
        """All floating-point tensors of the batch as float64."""
        return apply_to_collection(batch, torch.Tensor, _to_double)

    def autocast(self) -> AbstractContextManager[object]:
        """Tensors that the forward makes (``torch.zeros(3)``) are float64 too."""
        return self._default_dtype


def _to_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


class _DefaultDtype:
    """Sets torch's default dtype inside, restores it outside. Not re-entrant; reused every step."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._inside = dtype
        self._outside = torch.get_default_dtype()

    def __enter__(self) -> None:
        self._outside = torch.get_default_dtype()
        torch.set_default_dtype(self._inside)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_default_dtype(self._outside)
