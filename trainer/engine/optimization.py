"""Weight updates: their outcome, the schedules that follow them, and what is done to gradients."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.errors import ConfigurationError
from trainer.state.progress import FitProgress


class StepOutcome(NamedTuple):
    """What became of one weight update.

    Attributes:
        skipped: whether the weights were left alone because a gradient was not finite. With several optimizers:
            whether any of them was.
        scale: the loss scale that the gradients were computed with; 1 without a scaler.
        next_scale: the loss scale from the next batch on.
        grad_norm: total norm of the gradients before clipping, unscaled, over all optimizers whose gradients were
            measured; a 0-dim tensor on the gradients' device, inf or nan when skipped; None where nothing measured it.
        optimizers: the indices (in ``trainer.optimizers``) of those that were to step.
        skipped_optimizers: the indices of those among them that skipped a step.
    """

    skipped: bool
    scale: float
    next_scale: float
    grad_norm: Tensor | None
    optimizers: tuple[int, ...]
    skipped_optimizers: tuple[int, ...] = ()


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
        revocable: whether a step of a schedule changes nothing but the schedule and its optimizer's groups, so that
            it can be taken back.
        progress: whose ``schedule_steps`` counts the steps.
        by_module: whether the module steps them itself: manual optimization.

    Attributes:
        configs: the schedules.
        by_batch: whether one of the schedules follows batches, not weight updates.
    """

    def __init__(
        self,
        configs: list[ScheduleConfig],
        step: Callable[[Any, Any], None],
        metrics: Callable[[], Mapping[str, Any]],
        revocable: bool = True,
        progress: FitProgress | None = None,
        by_module: bool = False,
    ) -> None:
        self.revocable = revocable
        self._progress = FitProgress() if progress is None else progress
        self._by_module = by_module
        self._step = step
        self._metrics = metrics
        self._tentative: list[_Step] = []
        self.follow(configs)

    def __bool__(self) -> bool:
        return bool(self._stepped)

    def follow(self, configs: list[ScheduleConfig]) -> None:
        """Step these from here on."""
        self.configs = configs
        self._stepped = [] if self._by_module else configs
        self.by_batch = any(config.interval == "batch" for config in configs)

    def advance(
        self,
        interval: str,
        number: int,
        *,
        on_plateau: bool = False,
        except_of: Collection[Optimizer] = (),
        tentatively: bool = False,
    ) -> None:
        """Step the schedules whose turn it is.

        Args:
            interval: ``"batch"``, ``"step"`` or ``"epoch"``.
            number: one-based number of the batch (within its epoch) or of the epoch; a schedule with frequency f
                steps where f divides it.
            on_plateau: step those that watch a metric, or those that do not. The former come later, when
                validation has logged it.
            except_of: optimizers that skipped; their schedules stay.
            tentatively: nobody knows yet which optimizers skipped: :meth:`confirm` will say.

        Raises:
            ConfigurationError: a plateau schedule's metric has not been logged.
        """
        for config in self._stepped:
            if config.reduce_on_plateau is not on_plateau or config.interval != interval:
                continue
            if number % config.frequency or (except_of and _belongs(config, except_of)):
                continue
            metric = self._monitored(config) if on_plateau else None
            if on_plateau and metric is None:
                continue
            if tentatively:
                step = _Step(config)
                self._step(config.scheduler, metric)
                step.end()
                self._tentative.append(step)
            else:
                self._step(config.scheduler, metric)
            self._progress.schedule_steps += 1

    def confirm(self, except_of: Collection[Optimizer] = ()) -> None:
        """Take back the tentative steps of the schedules of these optimizers; let the others stand."""
        for step in reversed(self._tentative):
            if except_of and _belongs(step.config, except_of):
                step.take_back()
                self._progress.schedule_steps -= 1
        self._tentative.clear()

    def _monitored(self, config: ScheduleConfig) -> Any:
        metrics = self._metrics()
        metric = metrics.get(str(config.monitor))
        if metric is None and config.strict:
            raise ConfigurationError(
                f"ReduceLROnPlateau conditioned on metric {config.monitor} which is not available."
                f" Available metrics are: {list(metrics)}. Log it with self.log({config.monitor!r}, ...), set the"
                " 'monitor' key of the scheduler's dict, or set 'strict': False to go on without."
            )
        if metric is None:
            warnings.warn(
                f"ReduceLROnPlateau conditioned on metric {config.monitor} which is not available but strict is set to"
                " `False`. Skipping learning rate update.",
                RuntimeWarning,
                stacklevel=2,
            )
        return metric


def _belongs(config: ScheduleConfig, optimizers: Collection[Optimizer]) -> bool:
    """Whether a schedule is that of one of these optimizers; one that does not say whose it is follows any of them."""
    own = getattr(config.scheduler, "optimizer", None)
    return own is None or any(own is optimizer for optimizer in optimizers)


class _Step:
    """One step of a schedule that may be taken back: made before it, ended after it.

    Args:
        config: of the schedule.
    """

    def __init__(self, config: ScheduleConfig) -> None:
        self.config = config
        self._state = deepcopy(config.scheduler.state_dict())
        self._groups: list[dict[str, Any]] = getattr(getattr(config.scheduler, "optimizer", None), "param_groups", [])
        self._before = [_values_of(group) for group in self._groups]
        self._changes: list[tuple[dict[str, Any], str, Any, Any]] = []

    def end(self) -> None:
        """See what the step has changed in the parameter groups: learning rate, momentum, ..."""
        for group, before in zip(self._groups, self._before, strict=True):
            for key, after in _values_of(group).items():
                if key not in before or not _same(before[key], after):
                    self._changes.append((group, key, before.get(key), after))

    def take_back(self) -> None:
        """Put the schedule back, and what it changed, where nobody has set it to something else since."""
        self.config.scheduler.load_state_dict(self._state)
        for group, key, before, after in self._changes:
            if isinstance(before, Tensor):
                group[key].copy_(before)  # in place: a compiled optimizer holds on to the tensor
            elif group[key] == after:
                group[key] = before


def _values_of(group: dict[str, Any]) -> dict[str, Any]:
    items = ((key, value) for key, value in group.items() if key != "params")
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in items}


def _same(one: Any, other: Any) -> bool:
    """Whether two values of a group are the same. Tensors are not read, they may be on a GPU: they count as changed."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    return bool(one == other)


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


def takes_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer is to be given a closure that trains: its ``step`` takes one, and is not torch's own.

    What another's does with it, nobody can know: evaluate the loss twice (SAM), pass it on (Lookahead), insist on it.
    """
    step = type(optimizer).step
    parameters = inspect.signature(step).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    is_known = step.__module__.startswith(
        ("torch.", "lightning.")
    )  # of an inherited one, too, it is where it was written
    return needs_closure(optimizer) or (not is_known and ("closure" in parameters or takes_any))


def total_norm(norms: Mapping[Optimizer, Tensor]) -> Tensor | None:
    """The L2 norm of all gradients together, from that of each optimizer's (of its last step); None without any."""
    each = list(norms.values())
    if len(each) < 2:
        return each[0] if each else None
    total: Tensor = torch.linalg.vector_norm(torch.stack(each))
    return total


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
        total = torch.nn.utils.clip_grad_norm_(parameters, limit, norm_type)
        return total if isinstance(total, Tensor) else None  # users' tests put a mock in its place
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters], norm_type) if measure else None
    torch.nn.utils.clip_grad_value_(parameters, limit)
    return norm
