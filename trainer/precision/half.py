"""``bf16-true`` and ``16-true``: weights, batches and all arithmetic in 16 bits, without loss scaling."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torchmetrics import Metric

from trainer.common.module_tree import all_modules, owned_buffers, owned_parameters, owned_tensors
from trainer.errors import warn
from trainer.precision.base import Precision
from trainer.precision.cpu_fp16 import Float16Kernels
from trainer.precision.devices import check_kernels, float16_kernels, warn_of_emulation
from trainer.precision.dtypes import DefaultDtype, cast, half_dtype
from trainer.precision.fp32_modules import check_patterns, find_modules, in_float32


class HalfPrecision(Precision):
    """Everything in 16 bits: half the memory of float32 for weights, gradients and optimizer states.

    The disadvantage: an update smaller than 1/256 of a weight (bfloat16; 1/2048 in float16) is rounded away, so
    training with low learning rates stalls, and in float16 gradients below 6e-8 are zero. Mixed precisions keep float32
    weights for these reasons.

    Args:
        dtype: ``"bfloat16"`` or ``"float16"``. Default: ``"bfloat16"``.
        fp32_modules: modules that keep float32 weights and compute in float32, by name or pattern as in
            :class:`~trainer.precision.MixedPrecision`. Their inputs are cast to float32, and their outputs back to
            ``dtype``, which the next layer expects. A weight that is shared with another module is also float32 there.
            Default: none.
        cpu_kernels: how float16 is computed on a CPU, as in :class:`~trainer.precision.MixedPrecision`.

    Attributes:
        kernels: the float16 kernels of the current or the last run; None before the first.

    Raises:
        PrecisionError: if the dtype or the type of kernels is unknown, or a pattern is not a string.
    """

    names = {"16-true": {"dtype": "float16"}, "bf16-true": {"dtype": "bfloat16"}}

    def __init__(
        self,
        dtype: Literal["bfloat16", "float16"] | torch.dtype = "bfloat16",
        fp32_modules: str | Sequence[str] = (),
        cpu_kernels: Literal["auto", "fast", "native"] = "auto",
    ) -> None:
        check_kernels(cpu_kernels)
        self.dtype = half_dtype(dtype)
        self.name = "16-true" if self.dtype is torch.float16 else "bf16-true"
        self.max_accumulation = 2 / torch.finfo(self.dtype).eps  # 1 added to a larger sum is rounded away
        self.fp32_modules = check_patterns(fp32_modules)
        self.cpu_kernels = cpu_kernels
        self._default_dtype = DefaultDtype(self.dtype)
        self.kernels: Float16Kernels | None = None

    def check(self, device: torch.device) -> None:
        """Warn about small gradients with float16 weights, and about GPUs that only emulate bfloat16."""
        if self.dtype is torch.bfloat16:
            warn_of_emulation(self.name, device)
        else:
            warn(
                "precision='16-true' keeps weights and gradients in float16 and does not scale the loss: gradients"
                " below 6e-8 vanish, and so do updates below 1/2048 of a weight. Use precision='16-mixed', which has"
                " float32 weights and a loss scale, or 'bf16-true', which has float32's range."
            )

    def check_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Warn if ``eps`` is too small for float16 (Adam's default is 1e-8).

        Adam's second moment is the mean of squared gradients, and is 0 in float16 for gradients below about 5e-3. The
        divisor is then ``eps``: if it is rounded to 0, weights become NaN in the first step, and if it is tiny, updates
        are far too large. The bound is float16's smallest normal number, 6.1e-5.
        """
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                eps = group.get("eps")
                has_float16 = any(parameter.dtype is torch.float16 for parameter in group["params"])
                if has_float16 and eps is not None and eps < torch.finfo(torch.float16).tiny:
                    warn(
                        f"{type(optimizer).__name__} has eps={eps:g} and float16 weights: if squared gradients"
                        " underflow in float16, it divides by eps, and weights become inf or NaN. Use eps=1e-4, SGD,"
                        " or precision='16-mixed'."
                    )
                    break

    def init_context(self) -> AbstractContextManager[object]:
        """Return a context that creates weights in ``dtype``, or in float32 if there are ``fp32_modules``."""
        return nullcontext() if self.fp32_modules else DefaultDtype(self.dtype)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module with its floating-point tensors in ``dtype``, except in ``fp32_modules`` and metrics.

        Metrics keep their dtype because a sum of ones in bfloat16 ends at 256.

        Raises:
            PrecisionError: if a pattern of ``fp32_modules`` matches no module.
        """
        float32_modules = all_modules(*find_modules(module, self.fp32_modules))
        set_aside = [owned for owned in owned_tensors(module) if is_lazy(owned.tensor) or owned.tensor.is_quantized]
        for _, owner, name, _ in set_aside:
            setattr(owner, name, None)
        parameters = [
            (parameter, parameter.data)
            for _, owner, _, parameter in owned_parameters(module)
            if owner in float32_modules or not parameter.is_floating_point()
        ]
        buffers = [
            (owner, name, buffer)
            for _, owner, name, buffer in owned_buffers(module)
            if owner in float32_modules or isinstance(owner, Metric) or not buffer.is_floating_point()
        ]
        # `type` instead of `to`: `type` updates a LightningModule's `dtype`, and torchmetrics does not apply it to
        # states. It fails for the tensors that were set aside. It also converts tensors that must keep their dtype
        # (integers, complex numbers, `fp32_modules`), which are restored below.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Casting complex values to real")
            module.type(self.dtype)
        for parameter, data in parameters:
            parameter.data = data
        for owner, name, buffer in buffers:
            setattr(owner, name, buffer)
        for _, owner, name, tensor in set_aside:
            if owner not in float32_modules and tensor.is_floating_point():
                tensor.data = tensor.to(self.dtype)
            setattr(owner, name, tensor)
        return module

    @contextmanager
    def session(self, module: nn.Module, device: torch.device) -> Iterator[None]:
        """Select the float16 kernels of a CPU, and set up ``fp32_modules``.

        Raises:
            PrecisionError: if a pattern of ``fp32_modules`` matches no module.
        """
        in_full = find_modules(module, self.fp32_modules)
        kernels = self.kernels = float16_kernels(self.cpu_kernels, self.dtype, module, device)
        with kernels, in_float32(in_full, device.type, back_to=self.dtype):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the float16 kernels of a CPU."""
        return {} if self.kernels is None else self.kernels.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use the float16 kernels of the saved run, unless ``cpu_kernels`` is set."""
        if self.kernels is not None:
            self.kernels.load_state_dict(state)

    def convert_batch(self, batch: Any) -> Any:
        """Return the batch with all floating-point tensors in ``dtype``."""
        return cast(batch, self.dtype)

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context that also creates new tensors (``torch.zeros(3)``) in ``dtype``."""
        return self._default_dtype
