"""Optimizers that a config describes take torch's fused step on CUDA, where nothing else is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import SGD, Adam, AdamW, Optimizer

from trainer.module_tree import parameters_of

_FUSED = (Adam, AdamW, SGD)
"""Those of torch whose fused step runs on CUDA."""

_CHOICES = ("fused", "foreach", "differentiable")
"""Arguments that choose how a step is computed."""


def fusing(trainer_class: type, device: str = "cuda") -> Callable[[partial[Any]], partial[Any]] | None:
    """:func:`fused_on_cuda`, for runs of a Trainer of this class; None for one of Lightning's.

    Lightning's clips no gradients of a fused optimizer.
    """
    from trainer.trainer import Trainer

    return partial(fused_on_cuda, device=device) if issubclass(trainer_class, Trainer) else None


def fused_on_cuda(make: partial[Any], device: str = "cuda") -> partial[Any]:
    """``make``, as :class:`FusedOnCuda` if it makes an optimizer that leaves the choice of its implementation open.

    Args:
        make: makes an optimizer, or anything else.
        device: the type of device that counts as CUDA: another one where tensors only stand for those of a GPU.
    """
    if make.func not in _FUSED or set(_CHOICES).intersection(make.keywords):
        return make
    fused = FusedOnCuda(make.func, *make.args, **make.keywords)
    fused.device = device
    return fused


class FusedOnCuda(partial[Optimizer]):
    """Makes an optimizer, with ``fused=True`` where torch has a fused step for its parameters on CUDA.

    A fused step is the fastest, and in 16-mixed the one that does not make the host wait.

    Attributes:
        device: the type of device that counts as CUDA.
    """

    device = "cuda"

    def __call__(self, /, *args: Any, **options: Any) -> Optimizer:
        """The optimizer of these parameters."""
        optimizer = super().__call__(*args, **options)
        if not set(_CHOICES).isdisjoint(options) or not _has_fused_step(optimizer, self.device):
            return optimizer
        kept = [{k: v for k, v in group.items() if k not in ("fused", "foreach")} for group in optimizer.param_groups]
        options.pop("params", None)  # `kept` has them
        return super().__call__(kept, *args[1:], **(options | {"fused": True}))


def _has_fused_step(optimizer: Optimizer, device: str) -> bool:
    """Whether all of its parameters are on such a device, and of kinds that torch's fused step takes."""
    parameters = parameters_of(optimizer)
    if not all(parameter.device.type == device and parameter.is_floating_point() for parameter in parameters):
        return False
    if not isinstance(optimizer, SGD):
        return True
    from torch.distributed.tensor import DTensor

    return not any(isinstance(parameter, DTensor) for parameter in parameters)
