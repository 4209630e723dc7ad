"""Log the gradient norm of each layer over time."""

from __future__ import annotations

from functools import reduce
from typing import ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from trainer.common.run_callback import RunCallback, refuse_other_trainers
from trainer.errors import expect, is_count
from trainer.loop.run_state import state_of
from trainer.precision.readback import Readback
from trainer.state.outcome import StepOutcome

LOGGED = "grad_norm/"
"""The prefix of the logged names."""


class LayerNorms(RunCallback):
    """Log the gradient norm of each layer every ``every_n_steps`` optimizer steps, as ``grad_norm/LAYER``.

    A layer is a module that directly owns parameters; its norm is the L2 norm of their gradients. The gradients are
    measured after ``unscale_`` and before clipping. Skipped steps are also logged: their inf and NaN values show which
    layers the overflow has reached. ``python -m trainer report`` draws the norms as a heat map.

    The norms of an optimizer are computed on the device with one call of ``torch._foreach_norm`` for each dtype, in
    float32 or wider. With loss scaling, reading them adds no host-device synchronization; without it, each measurement
    on a GPU is one. Between two measurements a step costs two comparisons of numbers.

    If processes hold shards of the gradients (FSDP2, tensor parallelism), a measurement takes one collective.

    Args:
        every_n_steps: optimizer steps between two measurements, at least 1. Default: 50.

    Attributes:
        norms: the last measurement, by layer name, in the order of the module; "" is the module itself.

    Raises:
        ConfigurationError: if ``every_n_steps`` is below 1.
        UnsupportedError: at the start of a fit, if the Trainer is not a ``trainer.Trainer``.
    """

    unsupported_with: ClassVar = {"deepspeed": "needs the gradients of each layer, which DeepSpeed does not expose."}
    observes_only: ClassVar = True
    reset_in_copies: ClassVar = {"_layers": {}, "_seen": [], "_numbers": [], "_readback": None}

    def __init__(self, every_n_steps: int = 50) -> None:
        expect(is_count(every_n_steps), "a whole number of steps of at least 1", every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self.norms: dict[str, float] = {}
        self._layers: dict[int, str] = {}  # by the ids of the parameters
        self._seen: list[str] = []  # the layer of each measured parameter
        self._numbers: list[Tensor] = []
        self._seen_at = 0
        self._readback: Readback | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Map parameters to layers."""
        refuse_other_trainers(self, trainer)
        self._layers = {id(parameter): name.rpartition(".")[0] for name, parameter in pl_module.named_parameters()}
        self._seen, self._numbers = [], []
        self._readback = Readback(pl_module.device.type)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Measure the gradients of one optimizer."""
        run = state_of(trainer)
        updates = run.progress.updates
        if (updates + 1) % self.every_n_steps:
            return
        if not (norms := run.gradients.norms(optimizer)):
            return
        self._seen_at = updates
        self._seen += [self._layers.get(id(parameter), "?") for parameter, _ in norms]
        self._numbers += [norm for _, norm in norms]
        assert self._readback is not None
        self._readback.start(self._numbers)  # the norms of all optimizers so far

    def on_after_optimizer_step(
        self, trainer: pl.Trainer, pl_module: LightningModule, optimizer: Optimizer, outcome: StepOutcome
    ) -> None:
        """Log the measurement. With loss scaling the norms are on the host, like the outcome; otherwise, wait."""
        if not self._numbers or self._readback is None:
            return
        numbers, seen = self._readback.wait(), self._seen
        wide = reduce(torch.promote_types, (number.dtype for number in self._numbers))
        self._numbers, self._seen = [], []
        parts: dict[str, list[float]] = {name: [] for name in dict.fromkeys(self._layers.values())}
        for layer, number in zip(seen, numbers, strict=True):
            parts.setdefault(layer, []).append(number)
        self.norms = {layer: _total_norm(norms, wide) for layer, norms in parts.items() if norms}
        rows = {f"{LOGGED}{layer or type(pl_module).__name__}": norm for layer, norm in self.norms.items()}
        for logger in trainer.loggers:  # not self.log, which would create an entry for each layer and each epoch
            logger.log_metrics(rows, step=self._seen_at)


def _total_norm(norms: list[float], dtype: torch.dtype) -> float:
    """Return the norm of a vector from the norms of its parts, as ``torch.nn.utils.get_total_norm`` does."""
    return norms[0] if len(norms) == 1 else float(torch.linalg.vector_norm(torch.tensor(norms, dtype=dtype)))
