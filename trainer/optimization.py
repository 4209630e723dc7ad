"""Weight updates: their outcome, the windows of batches they average over, and the schedules that follow them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.errors import ConfigurationError


class StepOutcome(NamedTuple):
    """What became of one weight update.

    Attributes:
        skipped: whether the weights were left alone because a gradient was not finite. With several optimizers:
            whether any of them was.
        scale: the loss scale that the gradients were computed with; 1 without a scaler.
        next_scale: the loss scale from the next batch on.
        grad_norm: total norm of the gradients before clipping, unscaled; a 0-dim tensor on the gradients'
            device, inf or nan when skipped; None where nothing measured it.
        optimizers: the indices (in ``trainer.optimizers``) of those that were stepped.
    """

    skipped: bool
    scale: float
    next_scale: float
    grad_norm: Tensor | None
    optimizers: tuple[int, ...]


class AccumulationWindow:
    """The batches that make one weight update.

    A window has ``batches`` batches, or as many as the epoch still has: a short last window is averaged over
    what it holds. Windows do not straddle epochs.

    Attributes:
        batches: ``accumulate_grad_batches``, the number of batches in a full window. May be changed at any
            time; the next window follows it.
        size: batches in the current window, as far as its start could tell.
        backwards: backward passes in the current window so far; fewer than its batches where
            ``training_step`` returned None.
        is_first, is_last: whether the current batch opens, and closes, the window.
    """

    def __init__(self, batches: int = 1) -> None:
        if not isinstance(batches, int) or isinstance(batches, bool) or batches < 1:
            raise ConfigurationError(
                f"Got accumulate_grad_batches={batches!r}, expected a whole number of batches, at least 1."
            )
        self.batches = batches
        self.size = batches
        self.backwards = 0
        self.is_first = True
        self.is_last = True
        self._position = -1

    @property
    def is_open(self) -> bool:
        """Whether batches have been accumulated that no weight update has used yet."""
        return not self.is_last

    def reset(self) -> None:
        """Forget the current window; the next batch opens a new one."""
        self._position = -1
        self.is_last = True

    def advance(self, batches_left: float, is_last_batch: bool) -> None:
        """Take in one more batch.

        Args:
            batches_left: batches of the epoch from this one on, itself included; inf where nobody knows.
            is_last_batch: whether this is the epoch's last batch.
        """
        if self.is_last:
            self._position = 0
            self.size = int(min(self.batches, batches_left))
            self.backwards = 0
            self.is_first = True
        else:
            self._position += 1
            self.is_first = False
        self.is_last = is_last_batch or self._position + 1 >= self.size

    def normalize(self, loss: Tensor) -> Tensor:
        """This batch's share of the window's mean loss."""
        return loss if self.size == 1 else loss / self.size

    @property
    def is_short(self) -> bool:
        """Whether the window had fewer backward passes than its losses were divided by."""
        return self.backwards != self.size

    def correct_gradients(self, optimizer: Optimizer) -> None:
        """Make the accumulated gradients the mean over the backward passes there were.

        They were divided by ``size``; the window had fewer where ``training_step`` returned None, or where a
        loader of unknown length ended early. Expects unscaled gradients.
        """
        if not self.is_short or self.backwards == 0:
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_mul_(gradients, self.size / self.backwards)


class ScheduleConfig(Protocol):
    """One schedule as ``configure_optimizers`` gave it (the shape of Lightning's ``LRSchedulerConfig``)."""

    scheduler: Any
    interval: str
    frequency: int
    reduce_on_plateau: bool
    monitor: str | None
    strict: bool


class Schedules:
    """Learning-rate schedules, and when each one steps.

    Args:
        configs: the schedules; a live list (stock callbacks exchange its items).
        step: how one is stepped: ``LightningModule.lr_scheduler_step(scheduler, metric)``.
        metrics: where a plateau schedule's monitor is looked up.
    """

    def __init__(
        self,
        configs: list[ScheduleConfig],
        step: Callable[[Any, Any], None],
        metrics: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._configs = configs
        self._step = step
        self._metrics = metrics

    def __bool__(self) -> bool:
        return bool(self._configs)

    def advance(self, interval: str, number: int, *, on_plateau: bool = False) -> None:
        """Step the schedules whose turn it is.

        Args:
            interval: ``"step"`` or ``"epoch"``.
            number: one-based number of the batch (within its epoch) or of the epoch; a schedule with frequency f
                steps where f divides it.
            on_plateau: step those that watch a metric, or those that do not. The former come later, when
                validation has logged it.

        Raises:
            ConfigurationError: a plateau schedule's metric has not been logged.
        """
        for config in self._configs:
            if config.reduce_on_plateau is not on_plateau or config.interval != interval:
                continue
            if number % config.frequency:
                continue
            if not on_plateau:
                self._step(config.scheduler, None)
            elif (metric := self._monitored(config)) is not None:
                self._step(config.scheduler, metric)

    def _monitored(self, config: ScheduleConfig) -> Any:
        metrics = self._metrics()
        metric = metrics.get(str(config.monitor))
        if metric is None and config.strict:
            raise ConfigurationError(
                f"ReduceLROnPlateau conditioned on metric {config.monitor} which is not available."
                f" Available metrics are: {list(metrics)}. Log it with self.log({config.monitor!r}, ...), set the"
                " 'monitor' key of the scheduler's dict, or set 'strict': False to go on without."
            )
        return metric


def clear_gradients(optimizer: Optimizer) -> None:
    """What ``optimizer.zero_grad()`` does, without torch's profiling scope around it (4 microseconds a call)."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def zero_grad_of(optimizers: Iterable[Optimizer]) -> Callable[[Optimizer], None]:
    """What clears the gradients of these: ``clear_gradients``, unless one has a ``zero_grad`` of its own."""
    default = all(type(o).zero_grad is Optimizer.zero_grad and "zero_grad" not in vars(o) for o in optimizers)
    return clear_gradients if default else _zero_grad


def _zero_grad(optimizer: Optimizer) -> None:
    optimizer.zero_grad()


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer evaluates the loss itself (LBFGS, SAM): its ``step`` has a closure without default."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def zero_loss(parameters: Iterable[Tensor]) -> Tensor:
    """A loss that is 0 and has a gradient of exact zeros for every trainable parameter.

    A rank whose ``training_step`` returned None runs its backward over this one, so that the other ranks'
    gradient synchronisation finds a partner. An empty slice, not ``parameter * 0``: 0 times inf is nan.
    """
    trainable = [p for p in parameters if p.requires_grad]
    return torch.stack([p.reshape(-1)[:0].sum() for p in trainable]).sum()


def clip_gradients(
    optimizer: Optimizer, limit: float, algorithm: str, norm_type: float = 2.0, *, measure: bool = True
) -> Tensor | None:
    """Clip the gradients of one optimizer, in place.

    Args:
        optimizer: whose gradients.
        limit: the largest norm, or the largest absolute value.
        algorithm: ``"norm"`` or ``"value"``.
        norm_type: which norm.
        measure: whether to return the norm where clipping itself does not need it.

    Returns:
        The total norm before clipping, a 0-dim tensor on the gradients' device; or None.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not parameters:
        return None
    if algorithm == "norm":
        return torch.nn.utils.clip_grad_norm_(parameters, limit, norm_type)
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters], norm_type) if measure else None
    torch.nn.utils.clip_grad_value_(parameters, limit)
    return norm
