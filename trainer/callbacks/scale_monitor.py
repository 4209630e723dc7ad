"""Log the loss scale, skipped steps and the underflow of gradients."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from trainer.common.run_callback import RunCallback, refuse_other_trainers
from trainer.errors import expect
from trainer.loop.gradients import total_norm
from trainer.loop.run_state import RunState, state_of
from trainer.precision.underflow import Underflow, UnderflowProbe
from trainer.state.outcome import StepOutcome
from trainer.state.progress import FitProgress


class ScaleMonitor(RunCallback):
    """Log the loss scale, skipped steps and underflow. `OverflowReport` explains the cause of problems.

    Logged with each step if the loss is scaled:

    - ``amp/scale``: the loss scale of the step.
    - ``amp/skipped_steps``: the number of skipped steps so far.
    - ``amp/skip_rate``: the share of skipped steps among the last ``window`` steps.
    - ``amp/nonfinite_losses``: the number of skipped steps so far with a loss that was not finite, which is not an
      overflow of gradients. Logged from the first one on.

    Logged every ``every_n_steps``; underflow and zeros are measured before ``unscale_``:

    - ``amp/underflow``: of the gradient elements that are not zero, the share that is subnormal in float16 (below
      2**-14). These have lost precision, and smaller ones have become zero. For the ``worst_layers`` parameters with
      the largest shares, ``amp/underflow/NAME`` and ``amp/zeros/NAME`` are logged, too.
    - ``amp/zeros``: the share of gradient elements that are exactly zero. For an embedding, a share of 99% is normal.
    - ``grad_norm``: the total norm of the unscaled gradients of steps that were not skipped; in every precision, unless
      GradientClipping logs it.

    Adds no host-device synchronization. Values that are not finite are logged unchanged.

    Args:
        window: number of optimizer steps that the skip rate is computed over. Default: 100.
        every_n_steps: number of weight updates between two measurements of the gradients; 0 for none. Default: 50.
        worst_layers: number of parameters to log separately, those with the largest underflow. Default: 3.

    Attributes:
        underflow: the last measurement: all parameters together, then each one, the largest share first.

    Raises:
        ConfigurationError: if a number is out of range.
    """

    observes_only: ClassVar = True
    reset_in_copies: ClassVar = {"_names": {}, "_probe": None, "_norms": {}, "_before_unscale": None}

    def __init__(self, window: int = 100, every_n_steps: int = 50, worst_layers: int = 3) -> None:
        expect(window >= 1, "a number of steps, at least 1", window=window)
        are_counts = every_n_steps >= 0 and worst_layers >= 0
        expect(are_counts, "whole numbers, at least 0", every_n_steps=every_n_steps, worst_layers=worst_layers)
        self.window = window
        self.every_n_steps = every_n_steps
        self.worst_layers = worst_layers
        self.underflow: list[Underflow] = []
        self._recent: deque[bool] = deque(maxlen=window)
        self._recent_skips = 0
        self._names: dict[int, str] = {}
        self._probe: UnderflowProbe | None = None
        self._probed_at = 0
        self._norms: dict[Optimizer, Tensor] = {}
        self._logs_norm = True
        self._is_resumed = False
        self._before_unscale: Any = None  # `_start_probe`, while a fit runs

    @property
    def skip_rate(self) -> float:
        """The share of skipped steps among the last ``window``; 0 before the first."""
        return self._recent_skips / len(self._recent) if self._recent else 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Reset the skip rate, and register the measurement of gradients before ``unscale_``."""
        refuse_other_trainers(self, trainer)
        run = state_of(trainer)
        self._logs_norm = not any(getattr(callback, "log_norm", False) for callback in run.callbacks)
        self._norms = {}
        if not self._is_resumed:
            self._recent_skips = 0
            self._recent.clear()
        self._is_resumed = False
        scaler = run.scaler
        if self.every_n_steps and scaler.is_enabled():
            self._names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
            self._probe = UnderflowProbe(pl_module.device.type)
            self._before_unscale = partial(self._start_probe, run)
            scaler.before_unscale.append(self._before_unscale)

    def state_dict(self) -> dict[str, Any]:
        """Return the outcomes of the last ``window`` steps."""
        return {"recent": list(self._recent)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the result of ``state_dict``."""
        self._recent = deque(state_dict["recent"], maxlen=self.window)
        self._recent_skips = sum(self._recent)
        self._is_resumed = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
        """Stop the measurement of gradients."""
        self._clean_up(trainer)

    def _clean_up(self, trainer: pl.Trainer) -> None:
        if self._before_unscale is not None:
            measurements = state_of(trainer).scaler.before_unscale
            if self._before_unscale in measurements:
                measurements.remove(self._before_unscale)
        self._before_unscale = None

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Measure the norm of the unscaled gradients, unless GradientClipping does."""
        run = state_of(trainer)
        if self._logs_norm and self._is_due(run.progress):
            norm = run.gradients.norm(optimizer)
            if norm is not None:
                self._norms[optimizer] = norm

    def on_after_optimizer_step(
        self, trainer: pl.Trainer, pl_module: LightningModule, optimizer: Optimizer, outcome: StepOutcome
    ) -> None:
        """Log the outcome of a step."""
        run = state_of(trainer)
        if optimizer is not run.optimizers[outcome.optimizers[0]]:
            return
        norm = total_norm(self._norms)
        if norm is not None and not outcome.skipped:
            run.log_metric("grad_norm", norm, on_step=True, on_epoch=True, batch_size=1, rank_zero_only=True)
        self._norms = {}
        if not run.scaler.is_enabled():
            return
        if len(self._recent) == self.window:
            self._recent_skips -= self._recent[0]
        self._recent.append(outcome.skipped)
        self._recent_skips += outcome.skipped
        progress = run.progress
        run.log_metric("amp/scale", outcome.scale)
        run.log_metric("amp/skipped_steps", float(progress.skipped_steps))
        run.log_metric("amp/skip_rate", self.skip_rate)
        if number := progress.nonfinite_losses:
            run.log_metric("amp/nonfinite_losses", float(number))
        if self._probe is not None and (underflow := self._probe.finish()):
            self._report(run, underflow, outcome)

    def _is_due(self, progress: FitProgress) -> bool:
        """Return whether the gradients of this update are measured.

        With the default of ``every_n_steps``, these are the updates with rows in the loggers
        (``log_every_n_steps=50``).
        """
        return bool(self.every_n_steps) and (progress.updates + 1) % self.every_n_steps == 0

    def _start_probe(self, run: RunState, optimizer: Optimizer) -> None:
        progress, gradients = run.progress, run.gradients
        if self._probe is not None and self._is_due(progress):
            self._probed_at = progress.updates
            local = gradients.local(optimizer)
            total = partial(gradients.total, of=[p for p, _ in local]) if gradients.are_parts else None
            named = ((self._names.get(id(p), "?"), p.numel() * (1 + p.is_complex()), gradient) for p, gradient in local)
            self._probe.start(named, total)

    def _report(self, run: RunState, underflow: list[Underflow], outcome: StepOutcome) -> None:
        if outcome.skipped:  # infinite gradients contain no information about small gradients
            return
        self.underflow = underflow
        total, *layers = underflow
        run.log_metric("amp/underflow", total.subnormal)
        run.log_metric("amp/zeros", total.zeros)
        rows = {f"amp/underflow/{layer.name}": layer.subnormal for layer in layers[: self.worst_layers]}
        rows |= {f"amp/zeros/{layer.name}": layer.zeros for layer in layers[: self.worst_layers]}
        for logger in run.loggers:  # not self.log, which would repeat a layer's value when others are worse
            logger.log_metrics(rows, step=self._probed_at)
