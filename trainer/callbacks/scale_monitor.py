"""How the loss scale is doing, and the gradients that it is there for."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from trainer.callbacks.run_callback import RunCallback
from trainer.engine.gradients import Gradients, total_norm
from trainer.errors import expect, rank_zero_warn
from trainer.precision.underflow import Underflow, UnderflowProbe
from trainer.state.outcome import StepOutcome

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class ScaleMonitor(RunCallback):
    """Logs the loss scale, skipped steps and underflow; warns where one of them says that something is wrong.

    Logged with each step, where the loss is scaled:

    - ``amp/scale``: the scale that the step was computed with.
    - ``amp/skipped_steps``: so far.
    - ``amp/skip_rate``: over the last ``window`` steps.

    Logged every ``every_n_steps``, of the gradients as they are before ``unscale_``:

    - ``amp/underflow``: of the gradient elements that are not zero, the share that is subnormal in float16: below
      2**-14. Those have lost precision, and smaller ones have become zero. Of the ``worst_layers`` with the most of
      it, also one by one: ``amp/underflow/NAME`` and, beside it, ``amp/zeros/NAME``.
    - ``amp/zeros``: the share of gradient elements that are exactly zero. It is normal for an embedding to have 99% of
      them, so this draws no warning.
    - ``grad_norm``: the norm of all true gradients, of steps that were taken; in every precision, and only where no
      GradientClipping logs it.

    Nothing here makes the host wait for a GPU. A value is logged as it is: a NaN stays a NaN.

    Each warning is given once, with the number, its threshold and what to do.

    Args:
        healthy: scale from and to which nothing is amiss. A scale outside of it for ``patience`` steps in a row
            draws a warning.
        patience: optimizer steps.
        alarm: a scale below this draws a warning at once: overflows are frequent.
        window: optimizer steps that the skip rate looks back on.
        max_skip_rate: a higher skip rate draws a warning; the first ``window`` steps, in which the scale finds its
            place, are not counted. By itself a scale that is regularly tried higher costs 1 step in 2000.
        every_n_steps: weight updates between two looks at the gradients; 0 for none.
        max_underflow: a higher share of subnormal elements draws a warning.
        worst_layers: parameters whose underflow is logged one by one.

    Attributes:
        underflow: what the last look found: all together, then each parameter, the worst first.

    Raises:
        ConfigurationError: bounds out of order, a share outside of 0 to 1, or a number of steps below 1.
    """

    observes_only: ClassVar = True
    reset_in_copies: ClassVar = {"_names": {}, "_probe": None, "_norms": {}}

    def __init__(
        self,
        healthy: tuple[float, float] = (1_000.0, 100_000.0),
        patience: int = 1_000,
        alarm: float = 100.0,
        window: int = 100,
        max_skip_rate: float = 0.05,
        every_n_steps: int = 50,
        max_underflow: float = 0.3,
        worst_layers: int = 3,
    ) -> None:
        low, high = healthy
        order = "0 < alarm <= healthy[0] < healthy[1]"
        expect(0 < alarm <= low < high, order, alarm=alarm, healthy=tuple(healthy))
        expect(patience >= 1 and window >= 1, "numbers of steps, at least 1", patience=patience, window=window)
        are_counts = every_n_steps >= 0 and worst_layers >= 0
        expect(are_counts, "whole numbers, at least 0", every_n_steps=every_n_steps, worst_layers=worst_layers)
        shares = {"max_skip_rate": max_skip_rate, "max_underflow": max_underflow}
        expect(all(0 < share <= 1 for share in shares.values()), "shares above 0 and up to 1", **shares)
        self.healthy = (float(low), float(high))
        self.patience = patience
        self.alarm = alarm
        self.window = window
        self.max_skip_rate = max_skip_rate
        self.every_n_steps = every_n_steps
        self.max_underflow = max_underflow
        self.worst_layers = worst_layers
        self.underflow: list[Underflow] = []
        self._steps = 0
        self._recent: deque[bool] = deque(maxlen=window)
        self._recent_skips = 0
        self._steps_outside = 0
        self._warned: set[str] = set()
        self._names: dict[int, str] = {}
        self._probe: UnderflowProbe | None = None
        self._probed_at = 0
        self._norms: dict[Optimizer, Tensor] = {}
        self._logs_norm = True
        self._goes_on = False

    @property
    def skip_rate(self) -> float:
        """The share of skipped steps among the last ``window``; 0 before the first."""
        return self._recent_skips / len(self._recent) if self._recent else 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ask to see the gradients before they are unscaled."""
        self._logs_norm = not any(getattr(callback, "log_norm", False) for callback in trainer.callbacks)
        self._norms = {}
        if not self._goes_on:
            self._steps = self._recent_skips = self._steps_outside = 0
            self._recent.clear()
            self._warned.clear()
        self._goes_on = False
        if self.every_n_steps and trainer.scaler.is_enabled():
            self._names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
            self._probe = UnderflowProbe(pl_module.device.type)
            trainer.scaler.before_unscale = partial(self._look, trainer)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on counting from."""
        return {
            "steps": self._steps,
            "recent": list(self._recent),
            "steps_outside": self._steps_outside,
            "warned": sorted(self._warned),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self._steps, self._steps_outside = state_dict["steps"], state_dict["steps_outside"]
        self._recent = deque(state_dict["recent"], maxlen=self.window)
        self._recent_skips = sum(self._recent)
        self._warned = set(state_dict["warned"])
        self._goes_on = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at no more gradients."""
        self._clean_up(trainer)

    def _clean_up(self, trainer: Trainer) -> None:
        trainer.scaler.before_unscale = None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Measure the norm of the true gradients, where nobody else does."""
        if self._logs_norm and self._is_due(trainer):
            gradients: Gradients = trainer.engine.gradients
            norm = gradients.norm(optimizer)
            if norm is not None:
                self._norms[optimizer] = norm

    def on_after_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer, outcome: StepOutcome
    ) -> None:
        """Look at one step."""
        if optimizer is not trainer.optimizers[outcome.optimizers[0]]:
            return
        norm = total_norm(self._norms)
        if norm is not None and not outcome.skipped:
            trainer.log_metric("grad_norm", norm, on_step=True, on_epoch=True, batch_size=1, rank_zero_only=True)
        self._norms = {}
        if not trainer.scaler.is_enabled():
            return
        self._steps += 1
        if len(self._recent) == self.window:
            self._recent_skips -= self._recent[0]
        self._recent.append(outcome.skipped)
        self._recent_skips += outcome.skipped
        trainer.log_metric("amp/scale", outcome.scale)
        trainer.log_metric("amp/skipped_steps", float(trainer.skipped_steps))
        trainer.log_metric("amp/skip_rate", self.skip_rate)
        self._judge(outcome.next_scale)
        if self._probe is not None and (found := self._probe.finish()):
            self._report(trainer, found, outcome)

    def _is_due(self, trainer: Trainer) -> bool:
        """Whether this is an update whose gradients are looked at: with the default, one that the loggers get."""
        return bool(self.every_n_steps) and (trainer.progress.updates + 1) % self.every_n_steps == 0

    def _look(self, trainer: Trainer, optimizer: Optimizer) -> None:
        if self._probe is not None and self._is_due(trainer):
            self._probed_at = trainer.progress.updates
            gradients: Gradients = trainer.engine.gradients
            local = gradients.local(optimizer)
            total = partial(gradients.total, of=[p for p, _ in local]) if gradients.are_parts else None
            named = ((self._names.get(id(p), "?"), p.numel() * (1 + p.is_complex()), gradient) for p, gradient in local)
            self._probe.start(named, total)

    def _report(self, trainer: Trainer, found: list[Underflow], outcome: StepOutcome) -> None:
        if outcome.skipped:  # infinities and what they became say nothing about small gradients
            return
        self.underflow = found
        total, *layers = found
        trainer.log_metric("amp/underflow", total.subnormal)
        trainer.log_metric("amp/zeros", total.zeros)
        rows = {f"amp/underflow/{one.name}": one.subnormal for one in layers[: self.worst_layers]}
        rows |= {f"amp/zeros/{one.name}": one.zeros for one in layers[: self.worst_layers]}
        for logger in trainer.loggers:  # not self.log, which would repeat a layer's value when others are worse
            logger.log_metrics(rows, step=self._probed_at)
        if total.subnormal > self.max_underflow:
            worst = ", ".join(f"{one.name} ({one.subnormal:.0%})" for one in layers[: max(self.worst_layers, 1)])
            self._warn(
                "underflow",
                f"Of the gradient elements that are not zero, {total.subnormal:.0%} are subnormal in float16, above"
                f" {self.max_underflow:.0%}, at a loss scale of {outcome.scale:g}: they have lost precision, and"
                f" smaller ones have vanished. Worst: {worst}. If the scale is low, find what keeps it there"
                " (OverflowReport) and name it in precision.fp32_modules; else start from a higher init_scale, or use"
                " precision='bf16-mixed'.",
            )

    def _judge(self, scale: float) -> None:
        low, high = self.healthy
        self._steps_outside = 0 if low <= scale <= high else self._steps_outside + 1
        if scale < self.alarm and self._recent_skips:  # or it began there, and nothing fell
            self._warn(
                "alarm",
                f"The loss scale fell to {scale:g}, below {self.alarm:g}: gradients overflow often"
                f" ({self.skip_rate:.0%} of the last {len(self._recent)} steps were skipped)."
                " Lower the learning rate, clip gradients, or use precision='bf16-mixed'.",
            )
        elif self._steps_outside >= self.patience and scale < low:
            self._warn(
                "low",
                f"The loss scale has been outside [{low:g}, {high:g}] for {self.patience} steps, now {scale:g}: small"
                " gradients may vanish in float16. Lower the learning rate, or use precision='bf16-mixed'.",
            )
        elif self._steps_outside >= self.patience:
            self._warn(
                "high",
                f"The loss scale has been outside [{low:g}, {high:g}] for {self.patience} steps, now {scale:g}:"
                " gradients are very small. Check that the loss is not averaged twice; set max_scale to cap it.",
            )

        if self._steps > 2 * self.window and self.skip_rate > self.max_skip_rate:
            self._warn(
                "skips",
                f"{self.skip_rate:.1%} of the last {self.window} steps were skipped, above {self.max_skip_rate:.1%}:"
                " each is a batch without effect. Lower the learning rate, clip gradients, raise growth_interval, or"
                " use precision='bf16-mixed'.",
            )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            rank_zero_warn(message)
