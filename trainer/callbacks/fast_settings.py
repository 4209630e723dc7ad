"""Settings of torch that make training on a GPU faster and are off by default.

They include TF32, although it rounds the factors of float32 products to 10 bits: the range is that of float32, torch's
convolutions use it by default, and the run reports it. Weights in ``channels_last`` are saved in the default memory
format, because fused optimizers refuse states in another one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from trainer.common.run_callback import RunCallback
from trainer.record.measures import device_of
from trainer.record.memory_usage import ALLOCATOR, expands_segments

_TF32, _BENCHMARK, _LAYOUT, _SEGMENTS = "TF32", "cudnn.benchmark", "channels_last", "expandable segments"
_GAINS = {
    _TF32: "float32 matrix products run on Tensor Cores",
    _BENCHMARK: "cuDNN times its algorithms for a convolution, and uses the fastest",
    _LAYOUT: "convolution weights and images have the memory format of Tensor Cores",
    _SEGMENTS: "memory is less fragmented if sizes vary",
}


class FastSettings(RunCallback):
    """Turns on settings that make a run faster on a GPU, during the run, and records which ones.

    A setting that the user has already changed is left as it is; the others are restored after the run. On a CPU, only
    ``channels_last`` has an effect, and only this setting is changed. No ``precision`` turns these settings on, not
    even ``"auto"``.

    - TF32 (``torch.set_float32_matmul_precision("high")``): the inputs of float32 matrix products are rounded to 10
      bits of mantissa, as in float16, with the range of float32; sums are in float32. torch's convolutions do this by
      default. Not used if ``fp32_modules`` request float32.
    - ``torch.backends.cudnn.benchmark``: for modules with convolutions. Each new batch size is timed again, and the
      fastest kernel may differ in the next run, so runs are not bitwise reproducible. Not used with ``deterministic``.
    - ``channels_last``: the weights of 2-d convolutions are stored as NHWC; images are converted at the first
      convolution. The values do not change; checkpoints have the usual layout. Not used with sharded weights. Layers
      that ``configure_model`` creates are converted only in a fit with one process.
    - Expandable segments: ``PYTORCH_ALLOC_CONF=expandable_segments:True``, from the creation of this callback on,
      unless the variable is set or CUDA has been used already.

    Args:
        tf32, cudnn_benchmark, channels_last, expandable_segments: whether to turn on this setting. Default: True.

    Attributes:
        on: the settings that are on in this run, or were on in the last run: "TF32", "cudnn.benchmark",
            "channels_last", "expandable segments".
    """

    sees_each_save: ClassVar = True
    reset_in_copies: ClassVar = {"_undo": [], "_weights": [], "_allocates": False}

    def __init__(
        self,
        tf32: bool = True,
        cudnn_benchmark: bool = True,
        channels_last: bool = True,
        expandable_segments: bool = True,
    ) -> None:
        requested = {_TF32: tf32, _BENCHMARK: cudnn_benchmark, _LAYOUT: channels_last, _SEGMENTS: expandable_segments}
        self.requested = [name for name, is_on in requested.items() if is_on]
        self.on: list[str] = []
        self._undo: list[Callable[[], None]] = []
        self._weights: list[nn.Parameter] = []
        self._allocates = expandable_segments and _expand_segments()

    def setup(self, trainer: pl.Trainer, pl_module: LightningModule, stage: str) -> None:
        """Turn the settings on."""
        self._clean_up(trainer)
        device, precision = device_of(trainer), getattr(getattr(trainer, "engine", None), "precision", None)
        has_convolutions = bool(_convolutions(pl_module))
        self.on = []
        if device.type == "cuda":
            if _TF32 in self.requested and not getattr(precision, "fp32_modules", ()) and self._use_tf32():
                self.on.append(_TF32)
            if _BENCHMARK in self.requested and has_convolutions and not torch.are_deterministic_algorithms_enabled():
                self._undo.append(partial(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark))
                torch.backends.cudnn.benchmark = True
                self.on.append(_BENCHMARK)
            if self._allocates or expands_segments():
                self.on.append(_SEGMENTS)
        self._convert_weights(trainer, pl_module)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Convert layers that `configure_model` created, unless DDP may have stored the layout of their gradients."""
        if trainer.world_size == 1:
            self._convert_weights(trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Convert optimizer states to the layout of their weights, because a checkpoint has them in the usual one."""
        self._convert_states(trainer, _to_channels_last)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Convert the checkpoint to the usual layout, which a run without this callback requires."""
        if not self._weights:
            return
        for name, value in checkpoint.get("state_dict", {}).items():
            checkpoint["state_dict"][name] = _to_contiguous(value)
        for state in checkpoint.get("optimizer_states", ()):
            state["state"] = tree_map(_to_contiguous, state.get("state", {}))

    def _clean_up(self, trainer: pl.Trainer) -> None:
        """Restore the previous settings and layouts."""
        while self._undo:
            self._undo.pop()()
        self._convert_states(trainer, _to_contiguous)  # the optimizer may be saved or used after the run
        for weight in self._weights:
            weight.data = _to_contiguous(weight.data)
        self._weights = []

    def teardown(self, trainer: pl.Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the previous settings."""
        super().teardown(trainer, pl_module, stage)
        if self._allocates:  # torch reads the variable once, when it initializes CUDA
            os.environ.pop(ALLOCATOR[0], None)

    def run_facts(self) -> dict[str, Any]:
        """Return the entries for the record of the run."""
        return {"fast_settings": self.on}

    def _use_tf32(self) -> bool:
        """Use TF32 for matrix products if their precision is torch's default. Return whether they use it now."""
        try:
            before = torch.get_float32_matmul_precision()
        except RuntimeError:  # the user has set torch.backends.cuda.matmul.fp32_precision
            return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
        if before == "highest":
            torch.set_float32_matmul_precision("high")
            self._undo.append(lambda: torch.set_float32_matmul_precision(before))
        return True

    def _convert_states(self, trainer: pl.Trainer, lay_out: Callable[[Tensor], Tensor]) -> None:
        weight_ids = {id(weight) for weight in self._weights}
        for optimizer in trainer.optimizers if weight_ids else ():
            for parameter, state in optimizer.state.items():
                for name, value in state.items() if id(parameter) in weight_ids else ():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        state[name] = lay_out(value)

    def _convert_weights(self, trainer: pl.Trainer, module: LightningModule) -> None:
        gradients = getattr(getattr(trainer, "engine", None), "gradients", None)
        if _LAYOUT not in self.requested or getattr(gradients, "are_parts", False):
            return
        for convolution in _convolutions(module):
            weight = convolution.weight
            if weight.is_meta or not weight.is_contiguous() or any(weight is known for known in self._weights):
                continue
            laid_out = _to_channels_last(weight.data)
            if laid_out.stride() != weight.stride():
                weight.data = laid_out
                self._weights.append(weight)
        if self._weights and _LAYOUT not in self.on:
            self.on.append(_LAYOUT)


def missing_settings(module: nn.Module, settings: FastSettings | None, *, precision: str) -> dict[str, str]:
    """Return the settings that would make a run faster on a GPU and were not requested, each with its effect.

    Args:
        module: the trained module.
        settings: the callback of the run. None if the run has no such callback.
        precision: the name of the precision: in mixed precision there are no matrix products that TF32 would speed up.
    """
    requested = settings.requested if settings is not None else ()
    helps = {_SEGMENTS: not any("expandable_segments" in os.environ.get(name, "") for name in ALLOCATOR)}
    helps[_TF32] = precision == "32-true"
    helps[_BENCHMARK] = helps[_LAYOUT] = bool(_convolutions(module))
    return {name: gain for name, gain in _GAINS.items() if helps[name] and name not in requested}


def _convolutions(module: nn.Module) -> list[Any]:
    """Return the 2-d convolutions with weights that are parameters (not computed by a parametrization)."""
    return [
        submodule
        for submodule in module.modules()
        if isinstance(submodule, (nn.Conv2d, nn.ConvTranspose2d))
        and (weight := dict(submodule.named_parameters(recurse=False)).get("weight")) is not None
        and not nn.parameter.is_lazy(weight)
    ]


def _to_channels_last(value: Tensor) -> Tensor:
    """Convert to ``channels_last`` like ``nn.Module.to``, which sets the strides of a 1x1 kernel as well.

    ``contiguous`` keeps the strides of such a kernel: the gradients would have other strides, and DDP would warn.
    """
    return value.to(memory_format=torch.channels_last)


def _to_contiguous(value: Any) -> Any:
    """Return a tensor of four dimensions in the usual layout, and any other value unchanged."""
    if not isinstance(value, Tensor) or value.dim() != 4:
        return value
    return value.contiguous().to(memory_format=torch.contiguous_format)


def _expand_segments() -> bool:
    """Set the variable that CUDA's allocator reads when it is initialized. Return whether it was set."""
    is_set = any(name in os.environ for name in ALLOCATOR)
    if is_set or sys.platform != "linux" or not torch.cuda.is_available() or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    os.environ[ALLOCATOR[0]] = "expandable_segments:True"
    return True
