"""Settings of torch that make training on a GPU faster, and that are off unless somebody thinks of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from trainer.callbacks.run_callback import RunCallback
from trainer.engine.memory_usage import ALLOCATOR, expands_segments

_TF32, _BENCHMARK, _LAYOUT, _SEGMENTS = "TF32", "cudnn.benchmark", "channels_last", "expandable segments"
_GAINS = {
    _TF32: "float32 matrix products run on Tensor Cores",
    _BENCHMARK: "cuDNN times its convolutions, and takes the fastest",
    _LAYOUT: "the convolutions' weights and images lie as Tensor Cores want them",
    _SEGMENTS: "memory is less fragmented where sizes vary",
}


class FastSettings(RunCallback):
    """Turns on, while a run lasts, settings that make it faster on a GPU; says which.

    What a user has set stays as it is, and afterwards all is as before. A setting that would have no effect is not
    touched: on a CPU there is ``channels_last`` alone. Nothing of this is turned on by any ``precision``, ``"auto"``
    included.

    - TF32 (``torch.set_float32_matmul_precision("high")``): matrix products of float32 numbers round these to 10 bits
      of mantissa, float16's, and keep their range; sums are in float32. torch's convolutions do so by default. Not
      where ``fp32_modules`` ask for float32.
    - ``torch.backends.cudnn.benchmark``: for modules with convolutions. A new size of batch is timed anew, and
      the fastest kernel may be another one in the next run: not to the bit the same. Not with ``deterministic``.
    - ``channels_last``: the weights of 2-d convolutions are laid out as NHWC; images follow at the first
      convolution. The values stay the same; checkpoints have the usual layout. Not with sharded weights, and on several
      processes not for layers that ``configure_model`` makes.
    - Expandable segments: ``PYTORCH_ALLOC_CONF=expandable_segments:True``, from when this callback is made, unless the
      variable is set or CUDA has been used already.

    Args:
        tf32, cudnn_benchmark, channels_last, expandable_segments: whether to turn it on.

    Attributes:
        on: what is on in the run, or was in the last one: "TF32", "cudnn.benchmark", "channels_last", "expandable
            segments".
    """

    of_no_run: ClassVar = {"_undo": [], "_weights": [], "_allocates": False}

    def __init__(
        self,
        tf32: bool = True,
        cudnn_benchmark: bool = True,
        channels_last: bool = True,
        expandable_segments: bool = True,
    ) -> None:
        wanted = {_TF32: tf32, _BENCHMARK: cudnn_benchmark, _LAYOUT: channels_last, _SEGMENTS: expandable_segments}
        self.wanted = [name for name, wants in wanted.items() if wants]
        self.on: list[str] = []
        self._undo: list[Callable[[], None]] = []
        self._weights: list[nn.Parameter] = []
        self._allocates = expandable_segments and _expand_segments()

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Turn them on."""
        self._let_go(trainer)
        device, precision = trainer.strategy.root_device, getattr(getattr(trainer, "engine", None), "precision", None)
        has_convolutions = bool(_convolutions(pl_module))
        self.on = []
        if device.type == "cuda":
            if _TF32 in self.wanted and not getattr(precision, "fp32_modules", ()) and self._use_tf32():
                self.on.append(_TF32)
            if _BENCHMARK in self.wanted and has_convolutions and not torch.are_deterministic_algorithms_enabled():
                self._undo.append(partial(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark))
                torch.backends.cudnn.benchmark = True
                self.on.append(_BENCHMARK)
            if self._allocates or expands_segments():
                self.on.append(_SEGMENTS)
        self._lay_out(trainer, pl_module)

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Lay out what `configure_model` has made; DDP knows the layout of its gradients already."""
        if trainer.world_size == 1:
            self._lay_out(trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Lay out the optimizers' states like their weights: those of a checkpoint are not."""
        self._lay_out_states(trainer, _laid_out)

    def on_save_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Let the checkpoint be that of any run: a fused optimizer wants its states to be laid out like its weights."""
        if not self._weights:
            return
        for name, value in checkpoint.get("state_dict", {}).items():
            checkpoint["state_dict"][name] = _usual(value)
        for state in checkpoint.get("optimizer_states", ()):
            of_parameters = state.get("state", {})
            state["state"] = {key: {n: _usual(v) for n, v in one.items()} for key, one in of_parameters.items()}

    def _let_go(self, trainer: Any) -> None:
        """Put back what there was."""
        while self._undo:
            self._undo.pop()()
        self._lay_out_states(trainer, _usual)  # the optimizer may be saved, or used on
        for weight in self._weights:
            weight.data = _usual(weight.data)
        self._weights = []

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Put back what there was."""
        super().teardown(trainer, pl_module, stage)
        if self._allocates:  # torch has read it, if it ever will
            os.environ.pop(ALLOCATOR[0], None)

    def run_facts(self) -> dict[str, Any]:
        """What the record of the run says."""
        return {"fast_settings": self.on}

    def _use_tf32(self) -> bool:
        """Whether matrix products use TF32 now."""
        try:
            before = torch.get_float32_matmul_precision()
        except RuntimeError:  # set by torch.backends.cuda.matmul.fp32_precision: the user's affair
            return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
        if before == "highest":
            torch.set_float32_matmul_precision("high")
            self._undo.append(lambda: torch.set_float32_matmul_precision(before))
        return True

    def _lay_out_states(self, trainer: Any, lay_out: Callable[[Tensor], Tensor]) -> None:
        mine = {id(weight) for weight in self._weights}
        for optimizer in trainer.optimizers if mine else ():
            for parameter, state in optimizer.state.items():
                for name, value in state.items() if id(parameter) in mine else ():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        state[name] = lay_out(value)

    def _lay_out(self, trainer: Any, module: LightningModule) -> None:
        gradients = getattr(getattr(trainer, "engine", None), "gradients", None)
        if _LAYOUT not in self.wanted or getattr(gradients, "are_parts", False):
            return
        for convolution in _convolutions(module):
            weight = convolution.weight
            if weight.is_meta or not weight.is_contiguous() or any(weight is one for one in self._weights):
                continue
            laid_out = _laid_out(weight.data)
            if laid_out.stride() != weight.stride():
                weight.data = laid_out
                self._weights.append(weight)
        if self._weights and _LAYOUT not in self.on:
            self.on.append(_LAYOUT)


def missed(module: nn.Module, settings: FastSettings | None, *, precision: str) -> dict[str, str]:
    """What a run would leave on the table on a GPU: the setting, and what it is good for.

    Args:
        module: whose training.
        settings: those of the run; None for none.
        precision: its name: in mixed precision no matrix products are left that TF32 would help.
    """
    wanted = settings.wanted if settings is not None else ()
    helps = {_SEGMENTS: not any("expandable_segments" in os.environ.get(name, "") for name in ALLOCATOR)}
    helps[_TF32] = precision == "32-true"
    helps[_BENCHMARK] = helps[_LAYOUT] = bool(_convolutions(module))
    return {name: gain for name, gain in _GAINS.items() if helps[name] and name not in wanted}


def _convolutions(module: nn.Module) -> list[Any]:
    """Those with weights of four dimensions that are parameters (no parametrization computes them)."""
    return [
        part
        for part in module.modules()
        if isinstance(part, (nn.Conv2d, nn.ConvTranspose2d))
        and (weight := dict(part.named_parameters(recurse=False)).get("weight")) is not None
        and not nn.parameter.is_lazy(weight)
    ]


def _laid_out(value: Tensor) -> Tensor:
    """In ``channels_last``, as ``nn.Module.to`` does it, which sets the strides of a 1x1 kernel as well.

    ``contiguous`` leaves those: the gradients would have other strides than the kernel, of which DDP warns.
    """
    return value.to(memory_format=torch.channels_last)


def _usual(value: Any) -> Any:
    """Laid out as usual, if it is a tensor of four dimensions."""
    if not isinstance(value, Tensor) or value.dim() != 4:
        return value
    return value.contiguous().to(memory_format=torch.contiguous_format)


def _expand_segments() -> bool:
    """Whether the allocator was told to. It reads the variable once, when CUDA is initialised."""
    said = any(name in os.environ for name in ALLOCATOR)
    if said or sys.platform != "linux" or not torch.cuda.is_available() or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    os.environ[ALLOCATOR[0]] = "expandable_segments:True"
    return True
