"""Functions that handle the calls that a module makes itself during a fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer


class ModuleCalls(NamedTuple):
    """Functions that handle the calls that a module makes itself during a fit.

    If a function is None, ``trainer.distributed.precision_plugin.PrecisionAdapter`` handles the call.

    Attributes:
        backward: handles ``LightningModule.manual_backward``. Gets (loss, function that runs the module's ``backward``
            on the scaled loss).
        step: handles ``optimizer.step`` of the optimizers from ``self.optimizers()``. Gets (optimizer, closure, other
            arguments by name).
        clip: handles ``LightningModule.clip_gradients``. Gets (optimizer, limit, ``"norm"`` or ``"value"``).
    """

    backward: Callable[[Tensor, Callable[[Tensor], None]], None] | None = None
    step: Callable[..., Any] | None = None
    clip: Callable[[Optimizer, float, str], None] | None = None
