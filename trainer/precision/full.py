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
    """``32-true``: everything in the dtype it has, usually float32."""

    name = "32-true"
    names = {"32-true": {}}


class DoublePrecision(Precision):
    """``64-true``: parameters, batches and newly made tensors in float64. For gradient checks and references."""

    name = "64-true"
    names = {"64-true": {}}
    dtype = torch.float64

    def __init__(self) -> None:
        self._default_dtype = DefaultDtype(torch.float64)

    def check(self, device: torch.device) -> None:
        """MPS has no float64."""
        if device.type == "mps":
            raise PrecisionError(
                "Got precision='64-true' on an MPS device, which has no float64. Use precision='32-true',"
                " or accelerator='cpu'."
            )

    def init_context(self) -> AbstractContextManager[object]:
        """Weights are float64 from the start."""
        return DefaultDtype(torch.float64)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """All floating-point parameters and buffers as float64."""
        return module.double()

    def convert_batch(self, batch: Any) -> Any:
        """All floating-point tensors of the batch as float64."""
        return cast(batch, torch.float64)

    def autocast(self) -> AbstractContextManager[object]:
        """Tensors that the forward makes (``torch.zeros(3)``) are float64 too."""
        return self._default_dtype
