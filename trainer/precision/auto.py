"""``auto``: the fastest precision that the device has hardware for."""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core import rank_zero

from trainer.precision.base import Precision
from trainer.precision.devices import native_bfloat16, tensor_cores
from trainer.precision.full import FullPrecision
from trainer.precision.mixed import MixedPrecision


class AutoPrecision(Precision):
    """``bf16-mixed`` where the device computes in bfloat16 natively, else ``16-mixed`` where it has Tensor Cores,
    else ``32-true``. It says once which one it is, and why; ``trainer.precision`` is the name of that one.

    Every process asks its own device: where they differ, name a precision.

    Args:
        **settings: of :class:`~trainer.precision.MixedPrecision`, for where that is chosen: all but ``dtype`` and
            ``loss_scaling``.

    Raises:
        PrecisionError: settings out of range.
    """

    name = "auto"

    def __init__(self, **settings: Any) -> None:
        self._bfloat16 = MixedPrecision("bfloat16", **settings)
        self._float16 = MixedPrecision("float16", **settings)

    def for_device(self, device: torch.device) -> Precision:
        """The precision for ``device``; one line in the log says which and why."""
        choice, reason = self.choose(device)
        if getattr(rank_zero.rank_zero_only, "rank", 0) == 0:
            rank_zero.log.info(f"precision='auto' is {choice.name} here: {reason}.")
        return choice

    def choose(self, device: torch.device) -> tuple[Precision, str]:
        """The precision for ``device``, and the reason for it in words."""
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"this {device.type.upper()}"
        if native_bfloat16(device):
            return self._bfloat16, f"{where} computes in bfloat16 natively"
        if tensor_cores(device):
            return self._float16, f"{where} has Tensor Cores, but no bfloat16 units"
        if device.type == "cuda":
            return FullPrecision(), f"{where} has neither bfloat16 units nor Tensor Cores"
        if device.type == "cpu":
            return FullPrecision(), "this CPU has no bfloat16 instructions that torch uses"
        return FullPrecision(), f"torch cannot tell whether {where} device computes in bfloat16 natively"
