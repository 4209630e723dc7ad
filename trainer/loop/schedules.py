"""Learning-rate schedules: when each one steps, and how its step is reverted if the weight update was skipped.

A schedule steps before the outcome of a late weight update is known, and is restored if the update was skipped. If it
stepped later instead, every logged learning rate would be one step old.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from types import NoneType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from trainer.errors import ConfigurationError, warn
from trainer.state.progress import FitProgress

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import LRSchedulerConfig


class Schedules:
    """Learning-rate schedules, and when each one steps.

    Args:
        configs: the schedules; a live list (Lightning's callbacks may replace its items).
        step: steps one schedule: ``LightningModule.lr_scheduler_step(scheduler, metric)``.
        metrics: returns the metrics that plateau schedules monitor.
        revocable: whether a step of a schedule changes only the schedule and the optimizer's parameter groups, so that
            it can be reverted. Default: True.
        progress: the counters that frequencies refer to; its ``schedule_steps`` counts the steps of schedules. Default:
            new counters.
        by_module: whether the module steps the schedules (manual optimization). Default: False.

    Attributes:
        configs: the schedules.
        stepped: the schedules that are stepped here: all of them, or none.
        tentative: the steps whose outcome is not known yet; see :meth:`confirm`.
        by_batch: whether a schedule counts batches instead of weight updates.
    """

    def __init__(
        self,
        configs: list[LRSchedulerConfig],
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
        self.tentative: list[_Step] = []
        self._optimizers: Sequence[Optimizer] = ()
        self.follow(configs, ())

    def follow(self, configs: list[LRSchedulerConfig], optimizers: Sequence[Optimizer]) -> None:
        """Step these schedules, of these optimizers, from here on."""
        self.configs, self._optimizers = configs, optimizers
        self.stepped = [] if self._by_module else configs
        self.by_batch = any(config.interval == "batch" for config in configs)

    def advance(
        self,
        interval: str,
        *,
        on_plateau: bool = False,
        except_of: Collection[Optimizer] = (),
        tentatively: bool = False,
    ) -> None:
        """Step the schedules that are due after a batch, a weight update or an epoch.

        A schedule with frequency n is due after every n batches, completed steps of its optimizer, or epochs. Completed
        steps are counted from the beginning of the fit, batches and epochs over all fits of the Trainer.

        Args:
            interval: the schedules' interval: ``"batch"``, ``"step"`` (a weight update) or ``"epoch"``.
            on_plateau: step the plateau schedules instead of the others. Plateau schedules step later, when validation
                has logged their metric. Default: False.
            except_of: the optimizers that skipped the step; their schedules do not step.
            tentatively: whether the outcome is not known yet; :meth:`confirm` is called when it is. Default: False.

        Raises:
            ConfigurationError: if the metric of a plateau schedule with ``strict`` has not been logged.
        """
        for config in self.stepped:
            if config.reduce_on_plateau is not on_plateau or config.interval != interval:
                continue
            if except_of and _belongs(config, except_of):
                continue
            if config.frequency != 1 and self._count(config) % config.frequency:
                continue
            metric = self._monitored(config) if on_plateau else None
            if on_plateau and metric is None:
                continue
            if tentatively:
                step = _Step(config)
                self._step(config.scheduler, metric)
                step.end()
                self.tentative.append(step)
            else:
                self._step(config.scheduler, metric)
            self._progress.schedule_steps += 1

    def confirm(self, except_of: Collection[Optimizer] = ()) -> None:
        """Revert the tentative steps of the schedules of these optimizers, and keep the others."""
        for step in reversed(self.tentative):
            if except_of and _belongs(step.config, except_of):
                step.take_back()
                self._progress.schedule_steps -= 1
        self.tentative.clear()

    def _count(self, config: LRSchedulerConfig) -> int:
        """Return the number of batches, completed steps of the schedule's optimizer, or epochs so far."""
        if config.interval == "batch":
            return self._progress.batches
        if config.interval == "epoch":
            return self._progress.epoch + 1  # an epoch is counted after its hooks
        owner = getattr(config.scheduler, "optimizer", None)
        index = next((i for i, optimizer in enumerate(self._optimizers) if optimizer is owner), 0)
        return self._progress.completed_steps[index]

    def _monitored(self, config: LRSchedulerConfig) -> Any:
        metrics = self._metrics()
        metric = metrics.get(str(config.monitor))
        if metric is None and config.strict:
            raise ConfigurationError(
                f"ReduceLROnPlateau conditioned on metric {config.monitor} which is not available. Available metrics"
                f" are: {list(metrics)}. Log it with self.log({config.monitor!r}, ...), set the 'monitor' key of the"
                " scheduler's dict, or set 'strict': False to skip it."
            )
        if metric is None:
            warn(
                f"ReduceLROnPlateau conditioned on metric {config.monitor} which is not available but strict is set to"
                " `False`. Skipping learning rate update.",
                RuntimeWarning,
            )
        return metric


def _belongs(config: LRSchedulerConfig, optimizers: Collection[Optimizer]) -> bool:
    """Return whether a schedule belongs to one of these optimizers, or to an unknown one."""
    owner = getattr(config.scheduler, "optimizer", None)
    return owner is None or any(owner is optimizer for optimizer in optimizers)


class _Step:
    """One step of a schedule that can be reverted: created before the step, and ended after it.

    Args:
        config: the schedule.
    """

    def __init__(self, config: LRSchedulerConfig) -> None:
        self.config = config
        self._state = _copied(config.scheduler.state_dict())
        self._groups: list[dict[str, Any]] = getattr(getattr(config.scheduler, "optimizer", None), "param_groups", [])
        self._before = [{k: v.clone() if isinstance(v, Tensor) else v for k, v in g.items()} for g in self._groups]
        self._changes: list[tuple[dict[str, Any], str, Any, Any]] = []

    def end(self) -> None:
        """Record the changes of the step in the parameter groups: learning rate, momentum, ..."""
        for group, before in zip(self._groups, self._before, strict=True):
            for key, after in group.items():
                if after is before.get(key, before):
                    continue
                # tensors count as changed without being read, because they may be on a GPU
                if isinstance(after, Tensor) or key not in before or before[key] != after:
                    self._changes.append((group, key, before.get(key), after))

    def take_back(self) -> None:
        """Restore the schedule and the values that it changed, except for numbers that were changed again since."""
        self.config.scheduler.load_state_dict(self._state)
        for group, key, before, after in self._changes:
            if isinstance(before, Tensor):
                group[key].copy_(before)  # in place, because a compiled optimizer keeps a reference to the tensor
            elif group[key] == after:
                group[key] = before


def _copied(state: Any) -> Any:
    """Copy like ``deepcopy``, but faster: ``deepcopy`` takes 10 to 20 microseconds for the numbers of a schedule."""
    if isinstance(state, (float, int, str, NoneType)):
        return state
    if type(state) is dict:
        return {key: _copied(value) for key, value in state.items()}
    if type(state) is list:
        return [_copied(value) for value in state]
    return deepcopy(state)
