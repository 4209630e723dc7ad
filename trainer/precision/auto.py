"""``auto``: the fastest precision that the device has hardware for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from lightning_utilities.core import rank_zero

from trainer.precision.base import Precision
from trainer.precision.devices import native_bfloat16, tensor_cores
from trainer.precision.full import FullPrecision
from trainer.precision.mixed import MixedPrecision


class AutoPrecision(Precision):
    """Choose ``bf16-mixed`` if the device has native bfloat16, ``16-mixed`` if it has Tensor Cores, else ``32-true``.

    Logs the choice and the reason once. ``trainer.precision`` is the name of the chosen precision.

    Every process checks its own device. If the devices differ, name a precision explicitly.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale: as in
            :class:`~trainer.precision.MixedPrecision`. They have an effect only if ``16-mixed`` is chosen.
        cpu_kernels: has no effect, because ``16-mixed`` is chosen only on a GPU.
        fp32_modules, autocast_ops, autocast_cache: as in :class:`~trainer.precision.MixedPrecision`. They have no
            effect if ``32-true`` is chosen.

    Attributes:
        description: the chosen precision and the reason; empty before the choice.

    Raises:
        PrecisionError: if a setting is out of range.
    """

    name = "auto"
    names = {"auto": {}}

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        max_scale: float | None = None,
        cpu_kernels: Literal["auto", "fast", "native"] = "auto",
        fp32_modules: str | Sequence[str] = (),
        autocast_ops: Literal["native", "cuda"] = "native",
        autocast_cache: bool | None = None,
    ) -> None:
        settings = dict(locals())
        del settings["self"]
        self.description = ""
        self._bfloat16, self._float16 = MixedPrecision("bfloat16", **settings), MixedPrecision("float16", **settings)

    def for_device(self, device: torch.device) -> Precision:
        """Return the precision for ``device``, and log it with the reason."""
        choice, reason = self.choose(device)
        self.description = f"precision='auto' is {choice.name} here: {reason}."
        if getattr(rank_zero.rank_zero_only, "rank", 0) == 0:
            rank_zero.log.info(self.description)
        return choice

    def choose(self, device: torch.device) -> tuple[Precision, str]:
        """Return the precision for ``device``, and the reason as text."""
        device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"this {device.type.upper()}"
        if native_bfloat16(device):
            return self._bfloat16, f"{device_name} computes in bfloat16 natively"
        if tensor_cores(device):
            return self._float16, f"{device_name} has Tensor Cores, but no bfloat16 units"
        if device.type == "cuda":
            return FullPrecision(), f"{device_name} has neither bfloat16 units nor Tensor Cores"
        if device.type == "cpu":
            return FullPrecision(), "this CPU has no bfloat16 instructions that torch uses"
        return FullPrecision(), f"torch does not report whether {device_name} device computes in bfloat16 natively"
