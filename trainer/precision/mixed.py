"""``16-mixed`` and ``bf16-mixed``: float32 weights, 16-bit forward under autocast, loss scaling if necessary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.errors import PrecisionError, expect, join_first
from trainer.precision.autocast_ops import cuda_autocast_ops
from trainer.precision.base import Precision
from trainer.precision.cast_cache import CastCache
from trainer.precision.compilation import without_backward_autocast
from trainer.precision.cpu_fp16 import Float16Kernels
from trainer.precision.devices import check_kernels, float16_kernels, scales_losses, warn_of_emulation
from trainer.precision.dtypes import half_dtype
from trainer.precision.fp32_modules import check_patterns, find_modules, in_float32
from trainer.precision.scaler import LossScaler


class MixedPrecision(Precision):
    """Automatic mixed precision.

    Args:
        dtype: dtype that autocast computes in, ``"float16"`` or ``"bfloat16"``. Default: ``"float16"``.
        loss_scaling: whether the loss is scaled. Default: None, it is scaled for float16. ``False`` with float16 is
            autocast without a scaler, so small gradients underflow.
        init_scale: initial scale. The defaults of this and the next three arguments are those of
            ``torch.amp.GradScaler``.
        growth_factor: the scale is multiplied by this after ``growth_interval`` steps without overflow; above 1.
        backoff_factor: the scale is multiplied by this after an overflow; below 1.
        growth_interval: optimizer steps without overflow before the scale grows.
        min_scale: lower limit of the scale. Default: 1, because with a smaller scale a gradient can be finite while
            scaled and overflow when unscaled, which no check would detect.
        max_scale: upper limit of the scale. Default: None, no limit.
        cpu_kernels: how float16 is computed on a CPU. ``"native"`` uses torch's own kernels, some or all of which are
            many times slower than float32 on most CPUs. ``"fast"`` computes products in float32 on values rounded to
            float16 (as Tensor Cores do). ``"auto"`` measures both once per process, in at most 50 ms, and uses
            ``"fast"`` for the operations with kernels of torch that raise an error or take at least twice the time, if
            the model is large enough to gain. All ranks use the choice of rank 0, and a resumed run that of the saved
            run. Default: ``"auto"``.
        fp32_modules: modules that run in float32, by name or pattern (``("head", "*.norm")``; names as in
            ``module.named_modules()``, patterns as in ``fnmatch``). Autocast is disabled in them, and their inputs are
            cast to float32. They must exist when a run starts, and their ``forward`` must be called. If other modules
            also use the weights of a module (tied embeddings), only the module's own calls are in float32. A pattern
            that matches nothing is an error when a run is set up. Default: none.
        autocast_ops: autocast's list of operations. ``"native"`` is torch's list for the device; ``"cuda"`` uses CUDA's
            list on a CPU during a run, to test for a GPU (:func:`~trainer.precision.cuda_autocast_ops`). On CUDA itself
            both are the same. Default: ``"native"``.
        autocast_cache: whether autocast caches the 16-bit casts of weights within a step, so that a weight that is used
            several times is cast once. Default: None, the first 16 training steps decide: training continues with the
            cache if a step used a weight several times, and no step changed a weight between two uses. Evaluation runs
            without it. True enables it everywhere, as in plain torch; steps must then not change weights, except by
            optimizers and ``load_state_dict``. False disables it. With torch 2.10, it is always disabled.

    Attributes:
        kernels: the float16 kernels of the current or the last run; None before the first.

    Raises:
        PrecisionError: if the dtype is unknown, a scaling factor is out of range, a pattern is not a string, or
            ``autocast_cache`` is not True, False or None.
    """

    names = {"16-mixed": {"dtype": "float16"}, "bf16-mixed": {"dtype": "bfloat16"}}

    def __init__(
        self,
        dtype: Literal["float16", "bfloat16"] | torch.dtype = "float16",
        loss_scaling: bool | None = None,
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
        check_kernels(cpu_kernels)
        expect(autocast_ops in ("native", "cuda"), "'native' or 'cuda'", PrecisionError, autocast_ops=autocast_ops)
        is_known = autocast_cache is None or isinstance(autocast_cache, bool)
        expect(is_known, "True, False or None", PrecisionError, autocast_cache=autocast_cache)
        self.dtype = half_dtype(dtype)
        self.name = "16-mixed" if self.dtype is torch.float16 else "bf16-mixed"
        self.loss_scaling = self.dtype is torch.float16 if loss_scaling is None else loss_scaling
        self.init_scale = init_scale
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.min_scale = min_scale
        self.max_scale = max_scale
        self.cpu_kernels = cpu_kernels
        self.fp32_modules = check_patterns(fp32_modules)
        self.autocast_ops = autocast_ops
        self.autocast_cache = autocast_cache
        self._cast_cache: CastCache | None = None
        self.kernels: Float16Kernels | None = None
        self.build_scaler(torch.device("cpu"))  # raise for invalid factors here, not at the first overflow

    @property
    def scales_loss(self) -> bool:  # type: ignore[override]
        """Whether the loss is scaled."""
        return self.loss_scaling

    def check(self, device: torch.device) -> None:
        """Raise if the device has no autocast for the dtype; warn if bfloat16 is only emulated.

        Raises:
            PrecisionError: if the device does not support autocast, loss scaling, or CUDA's operations.
        """
        if self.loss_scaling and not scales_losses(device):
            dtype = str(self.dtype).removeprefix("torch.")
            raise PrecisionError(
                f"Got precision={self.name!r} with loss scaling on an MPS device, which torch {torch.__version__}'s"
                " GradScaler does not support. Use precision='bf16-mixed' without loss scaling, or switch scaling"
                f" off: MixedPrecision({dtype!r}, loss_scaling=False)."
            )
        if self.autocast_ops == "cuda" and device.type not in ("cpu", "cuda"):
            raise PrecisionError(
                f"Got autocast_ops='cuda' on a device of type {device.type!r}, expected cpu, which can emulate CUDA"
                " autocast. Use autocast_ops='native', or accelerator='cpu'."
            )
        if device.type not in ("cpu", "cuda", "mps", "xpu"):
            raise PrecisionError(
                f"Got precision={self.name!r} on a device of type {device.type!r}, expected cpu, cuda, mps or xpu."
                " Use precision='32-true'."
            )
        if self.dtype is torch.bfloat16:
            warn_of_emulation(self.name, device)

    def build_scaler(self, device: torch.device) -> LossScaler:
        """Return a scaler for ``device``, disabled if the loss is not scaled."""
        return LossScaler(
            device.type,
            enabled=self.loss_scaling,
            init_scale=self.init_scale,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            min_scale=self.min_scale,
            max_scale=self.max_scale,
        )

    @contextmanager
    def session(self, module: nn.Module, device: torch.device) -> Iterator[None]:
        """Create the device's autocast context, select a CPU's kernels and operations, and set up ``fp32_modules``.

        Raises:
            PrecisionError: if a pattern of ``fp32_modules`` matches no module.
        """
        in_full = find_modules(module, self.fp32_modules)
        kernels = self.kernels = float16_kernels(self.cpu_kernels, self.dtype, module, device)
        ops = cuda_autocast_ops() if self.autocast_ops == "cuda" and device.type == "cpu" else nullcontext()
        advice = f"Trainer(precision=MixedPrecision({str(self.dtype).removeprefix('torch.')!r}, autocast_cache=False))"
        cast_cache = self._cast_cache = CastCache(device.type, self.dtype, module, self.autocast_cache, advice)
        try:
            with kernels, ops, in_float32(in_full, device.type), without_backward_autocast():
                yield
        finally:
            cast_cache.close()
            self._cast_cache = None

    def check_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise if the loss is scaled and a trained weight is in float16: its gradients cannot be unscaled.

        Raises:
            PrecisionError: if there is such a weight.
        """
        groups = [group for optimizer in optimizers if self.loss_scaling for group in optimizer.param_groups]
        trained = {id(p) for group in groups for p in group["params"] if p.requires_grad and p.dtype is torch.float16}
        if trained:
            assert self._cast_cache is not None, "called inside session()"
            names = [name for name, p in self._cast_cache.module.named_parameters() if id(p) in trained]
            raise PrecisionError(
                f"Got {len(trained)} trained weights in float16 ({join_first(names, 2)}) with precision={self.name!r},"
                " expected float32: gradients in float16 cannot be unscaled. Convert these weights before the optimizer"
                " is created: `for p in self.parameters(): p.data = p.data.float() if p.requires_grad else p.data`."
                " Frozen weights may stay in float16."
            )

    def watch_weights(self) -> None:
        """Check whether the next training step changes weights that it has used, which autocast's cache would hide."""
        if self._cast_cache is not None:
            self._cast_cache.watch()

    def state_dict(self) -> dict[str, Any]:
        """Return whether the run has enabled autocast's cache, and its float16 kernels on a CPU."""
        states = [choice.state_dict() for choice in (self._cast_cache, self.kernels) if choice is not None]
        return {key: value for state in states for key, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Enable or disable autocast's cache and use kernels as the saved run did, unless these are set."""
        for choice in (self._cast_cache, self.kernels):
            if choice is not None:
                choice.load_state_dict(state)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of one forward. It is reused, because creating ``torch.autocast`` costs a microsecond.

        The weight cache is cleared each time the context exits, so no forward uses the weights of an earlier one. Steps
        without gradients count as evaluation.
        """
        cast_cache = self._cast_cache
        assert cast_cache is not None, "autocast() is used inside session()"
        return cast_cache.training if torch.is_grad_enabled() else cast_cache.evaluation
