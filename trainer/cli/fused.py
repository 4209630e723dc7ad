"""Use the fused implementation of torch's optimizers on CUDA, unless the config chooses another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from trainer.common.module_tree import parameters_of

_FUSED = (Adam, AdamW, SGD)
"""Optimizers of torch with a fused implementation on CUDA."""

_CHOICES = ("fused", "foreach", "differentiable")
"""Arguments of an optimizer that choose its implementation."""


def fusing(trainer_class: type, device: str = "cuda") -> Callable[[partial[Any]], partial[Any]] | None:
    """Return :func:`fused_on_cuda`, or None for Lightning's Trainer, which cannot clip gradients of fused optimizers.

    Args:
        trainer_class: class of the Trainer that runs the config.
        device: as in :func:`fused_on_cuda`.
    """
    from trainer.trainer import Trainer

    return partial(fused_on_cuda, device=device) if issubclass(trainer_class, Trainer) else None


def fused_on_cuda(make: partial[Any], device: str = "cuda") -> partial[Any]:
    """Return ``make``, as a :class:`FusedOnCuda` if it makes an optimizer without choosing an implementation.

    Args:
        make: partial of an optimizer, or of anything else.
        device: type of the device that is treated as CUDA; not ``"cuda"`` if a GPU is simulated.
    """
    if make.func not in _FUSED or set(_CHOICES).intersection(make.keywords):
        return make
    fused = FusedOnCuda(make.func, *make.args, **make.keywords)
    fused.device = device
    return fused


class FusedOnCuda(partial[Optimizer]):
    """Construct an optimizer, with ``fused=True`` if torch has a fused implementation for its parameters on CUDA.

    The fused implementation is the fastest, and in 16-mixed it needs no host-device synchronization.

    Attributes:
        device: type of the device that is treated as CUDA.
    """

    device = "cuda"

    def __call__(self, /, *args: Any, **options: Any) -> Optimizer:
        """Return the optimizer."""
        optimizer = super().__call__(*args, **options)
        if not set(_CHOICES).isdisjoint(options) or not _has_fused_step(optimizer, self.device):
            return optimizer
        groups = [{k: v for k, v in group.items() if k not in ("fused", "foreach")} for group in optimizer.param_groups]
        options.pop("params", None)  # `groups` has them
        return super().__call__(groups, *args[1:], **(options | {"fused": True}))


def _has_fused_step(optimizer: Optimizer, device: str) -> bool:
    """Return whether the parameters are on ``device``, and the fused implementation supports their types."""
    parameters = parameters_of(optimizer)
    fits = all(parameter.device.type == device and parameter.is_floating_point() for parameter in parameters)
    return fits and not (isinstance(optimizer, SGD) and any(isinstance(parameter, DTensor) for parameter in parameters))
