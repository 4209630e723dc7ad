"""Precisions with one dtype throughout: ``32-true`` and ``64-true``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from trainer.errors import PrecisionError
from trainer.precision.base import Precision
from trainer.precision.dtypes import DefaultDtype, cast


class FullPrecision(Precision):
    """``32-true``: tensors keep their dtype, usually float32."""

    name = "32-true"
    names = {"32-true": {}}


class DoublePrecision(Precision):
    """``64-true``: parameters, batches and new tensors in float64, for gradient checks and reference results."""

    name = "64-true"
    names = {"64-true": {}}
    dtype = torch.float64

    def __init__(self) -> None:
        self._default_dtype = DefaultDtype(torch.float64)

    def check(self, device: torch.device) -> None:
        """Raise on MPS, which has no float64.

        Raises:
            PrecisionError: if the device is an MPS device.
        """
        if device.type == "mps":
            raise PrecisionError(
                "Got precision='64-true' on an MPS device, which has no float64. Use precision='32-true',"
                " or accelerator='cpu'."
            )

    def init_context(self) -> AbstractContextManager[object]:
        """Return a context that creates weights in float64."""
        return DefaultDtype(torch.float64)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module with all floating-point parameters and buffers in float64."""
        return module.double()

    def convert_batch(self, batch: Any) -> Any:
        """Return the batch with all floating-point tensors in float64."""
        return cast(batch, torch.float64)

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context that also creates new tensors (``torch.zeros(3)``) in float64."""
        return self._default_dtype
