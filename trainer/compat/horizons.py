"""Continue a run with another length: schedules that span the run get the new length, and continue at their position.

``configure_optimizers`` builds the schedules for the new length before their states are restored. If the horizon of a
schedule (settings such as ``T_max`` or ``total_steps``) differs from the saved one, it was computed from the length of
the run, or the user has changed it. Then the schedule is advanced from its beginning to the saved position, and its
state and its learning rates are written to the checkpoint, which is restored afterwards. All other schedules are
restored unchanged.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from trainer.compat.tuning import nested_schedules
from trainer.errors import ConfigurationError

if TYPE_CHECKING:
    from trainer.trainer import Trainer

log = logging.getLogger("lightning.pytorch.advice")  # the command line shows it

_HORIZON = re.compile(
    r"T_max|T_0|gamma|step_size|step_ratio|_?milestones|_schedule_phases"
    r"|(?:\w*_)?(?:max|total|training|warm_?up|decay)_(?:steps|iters|iterations|epochs|batches|size)"
)
"""Names of the settings of a schedule that are computed from the length of a run."""
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")


def continue_schedules(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Advance the schedules with a new horizon to their saved position, and write them into the checkpoint.

    Args:
        trainer: the Trainer, with new optimizers and schedules.
        checkpoint: the checkpoint; its ``lr_schedulers`` and ``optimizer_states`` are changed, and restored afterwards.
    """
    schedules = [config.scheduler for config in trainer.engine.schedules]
    owners = [getattr(schedule, "optimizer", None) for schedule in schedules]
    saved_states, optimizers = checkpoint.get("lr_schedulers", []), checkpoint.get("optimizer_states", [])
    if len(saved_states) != len(schedules):
        return
    for number, (schedule, saved) in enumerate(zip(schedules, saved_states, strict=True)):
        is_new = isinstance(schedule, LRScheduler) and _position(schedule.state_dict()) == 0
        index = next((i for i, one in enumerate(trainer.engine.optimizers) if one is owners[number]), len(optimizers))
        is_alone = sum(owner is owners[number] for owner in owners) == 1
        if not (is_new and is_alone and index < len(optimizers)):
            continue
        if not (_horizon_differs(schedule.state_dict(), saved) or _factors_differ(schedule, saved)):
            continue
        groups = optimizers[index].get("param_groups", [])
        before = [group.get("lr") for group in groups]
        _scale(schedule, groups)
        changed = _advance(schedule, _position(saved))
        for group, current in zip(groups, schedule.optimizer.param_groups, strict=False):
            group.update({name: current[name] for name in changed if name in current})
        saved_states[number] = schedule.state_dict()
        if before and trainer.is_global_zero:
            log.info(
                f"{type(schedule).__name__} was built for another length of the run, and continues at step"
                f" {_position(saved)} of the schedule: learning rate {float(before[0]):.4g} before,"
                f" {float(groups[0]['lr']):.4g} now."
            )


def refuse_exceeded(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Refuse a run that takes more steps or epochs than ``OneCycleLR`` has, which would raise in the middle of the run.

    Raises:
        ConfigurationError: if the run takes more. The message contains both numbers.
    """
    configs = trainer.engine.schedules if len(trainer.engine.optimizers) == 1 else []
    for config in configs:
        schedule, unit = config.scheduler, config.interval
        if not isinstance(schedule, OneCycleLR) or unit not in ("step", "epoch") or config.frequency != 1:
            continue
        total = schedule.total_steps
        if unit == "step":  # only here, because it requests the training dataloader
            steps, done = trainer.estimated_stepping_batches, trainer.progress.updates
        else:
            steps, done = trainer.max_epochs or -1, trainer.current_epoch
        if total < min(steps, schedule.last_epoch + steps - done) < float("inf"):
            raise ConfigurationError(
                f"Got a run of {steps} {'optimizer steps' if unit == 'step' else 'epochs'} and"
                f" OneCycleLR(total_steps={total}), which cannot take more."
                " Compute total_steps from self.trainer.estimated_stepping_batches or self.trainer.max_epochs to"
                " continue the run with a longer schedule, or start a new run with its weights: weights=RUN, in Python"
                " fit(weights=...)."
            )


def _horizon_differs(current: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Return whether the horizon of a schedule, or of one that it holds, differs between two of its states.

    A state with other settings is that of another kind of schedule, which a callback may have set during the run.
    """
    horizon, saved_horizon = (
        {name: state[name] for name in filter(_HORIZON.fullmatch, state)} for state in (current, saved)
    )
    if horizon.keys() == saved_horizon.keys() and horizon != saved_horizon:
        return True
    for name in current.keys() & saved.keys():
        value, saved_value = current[name], saved[name]
        if isinstance(value, list) and isinstance(saved_value, list):
            parts = zip(value, saved_value, strict=False)
            if any(isinstance(a, Mapping) and isinstance(b, Mapping) and _horizon_differs(a, b) for a, b in parts):
                return True
    return False


def _factors_differ(schedule: LRScheduler, saved: Mapping[str, Any]) -> bool:
    """Return whether the current functions of a ``LambdaLR`` compute other rates than those of the saved run."""
    if isinstance(schedule, LambdaLR) and _position(saved) > 0:
        factors = [factor(_position(saved)) for factor in schedule.lr_lambdas]
        rates = zip(saved["base_lrs"], factors, saved["_last_lr"], strict=False)
        return not all(math.isclose(base * factor, float(rate), rel_tol=1e-9) for base, factor, rate in rates)
    parts = zip(getattr(schedule, "_schedulers", ()), saved.get("_schedulers", ()), strict=False)
    return any(_factors_differ(part, state) for part, state in parts)


def _position(state: Mapping[str, Any]) -> int:
    """Return the number of steps that a schedule has taken, from its state, or -1 if the state does not hold it."""
    if "last_epoch" in state:
        return int(state["last_epoch"])
    parts: list[Mapping[str, Any]] = state.get("_schedulers", [])  # ChainedScheduler has no position itself
    return _position(parts[0]) if parts else -1


def _scale(schedule: LRScheduler, saved_groups: list[dict[str, Any]]) -> None:
    """Scale the rates of a new schedule to the saved ones, which ``LearningRateFinder`` may have changed."""
    groups = schedule.optimizer.param_groups
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=False)):
        first, saved_lr = float(group.get("initial_lr", 0.0)), float(saved.get("initial_lr", 0.0))
        if first and saved_lr and first != saved_lr:
            for name in group.keys() & _RATES:
                group[name] = group[name] * (saved_lr / first)
            for part in nested_schedules(schedule):
                if hasattr(part, "base_lrs"):
                    part.base_lrs[index] = part.base_lrs[index] * (saved_lr / first)


def _advance(schedule: LRScheduler, position: int) -> set[str]:
    """Step a new schedule up to a position. Return the settings of parameter groups that it sets."""
    groups = schedule.optimizer.param_groups
    former_groups = [dict(group) for group in groups]
    limit = getattr(schedule, "total_steps", position)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer has not stepped yet
        for _ in range(min(position, limit)):
            schedule.step()
    changed = {
        name
        for group, former in zip(groups, former_groups, strict=True)
        for name, value in group.items()
        if name != "params" and not isinstance(value, Tensor) and value != former.get(name)
    }
    return changed | set(_RATES)
