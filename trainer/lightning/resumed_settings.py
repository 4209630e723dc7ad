"""Settings of schedules and optimizers that the code changes before a resume: which of the two values is used.

=====================================================  =================================================================
class of an optimizer or a schedule                    must be the same: compared with the file, which records it
rates (``lr``, ``max_lr``, ...), and all settings of   of the checkpoint; a difference is logged
an optimizer (``momentum``, ``weight_decay``, ...)
settings of a schedule (``_SETTINGS``), functions of   of the code; a difference is logged. They may follow the length
``LambdaLR``                                           of the run, which ``configure_optimizers`` knows
=====================================================  =================================================================

A schedule with another setting is advanced from its beginning to the saved position, and its state and its rates are
written to the checkpoint, which is restored afterwards. All other schedules are restored unchanged.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
import warnings
from collections.abc import Mapping
from reprlib import repr as shortened
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from trainer.checkpoint.manifest import TRAINER_KEY
from trainer.errors import ConfigurationError, refuse_inexact
from trainer.loop.optimizers import nested_schedules
from trainer.loop.run_state import RunState

log = logging.getLogger("lightning.pytorch.advice")  # the command line shows it

_SETTINGS = re.compile(
    r"T_max|T_0|T_mult|gamma|step_size|step_ratio|_?milestones|_schedule_phases|eta_min|power|(?:start_|end_)?factor"
    r"|mode|scale_mode|_?anneal_\w+|patience|cooldown|threshold|threshold_mode|min_lrs|cycle_momentum"
    r"|(?:\w*_)?(?:max|total|training|warm_?up|decay)_(?:steps|iters|iterations|epochs|batches|size)"
)
"""Names of the settings of a schedule: those of torch, and others that are computed from the length of a run."""
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
_CHOICES = ("params", "fused", "foreach", "capturable")
"""Keys of a parameter group that are not compared: a resumed run uses its own."""


def continue_settings(run: RunState, checkpoint: dict[str, Any]) -> None:
    """Compare new optimizers and schedules with the checkpoint, and change its states to the settings of the code.

    Args:
        run: the state of the run, with new optimizers and schedules.
        checkpoint: the checkpoint; its ``lr_schedulers`` and ``optimizer_states`` are changed, and restored afterwards.

    Raises:
        ResumeError: if a class differs from that of the saved run, and the resume must be exact.
    """
    engine, states = run.engine, checkpoint.get("optimizer_states", [])
    for index in _of_other_classes(run, checkpoint, "optimizer", states):
        states[index] = engine.checkpoints.optimizer_state(engine.optimizers[index])
    schedules = [config.scheduler for config in engine.schedules]
    owners = [getattr(schedule, "optimizer", None) for schedule in schedules]
    saved_states = checkpoint.get("lr_schedulers", [])
    others = _of_other_classes(run, checkpoint, "schedule", saved_states)
    if len(saved_states) != len(schedules):
        return
    for number, (schedule, saved) in enumerate(zip(schedules, saved_states, strict=True)):
        current = schedule.state_dict()
        index = next((i for i, optimizer in enumerate(engine.optimizers) if optimizer is owners[number]), len(states))
        groups = states[index].get("param_groups", []) if index < len(states) else []
        if number in others:
            saved_states[number] = current
            for group, given in zip(groups, engine.optimizers[index].param_groups if groups else (), strict=True):
                group.update({name: value for name, value in given.items() if name not in _CHOICES})
            continue
        if not isinstance(schedule, LRScheduler) or _position(current) != 0:
            continue
        changed = _differences(current, saved)
        if not changed and not _factors_differ(schedule, saved):
            continue
        new, former = _described(changed)
        name, before = type(schedule).__name__, [group.get("lr") for group in groups]
        if isinstance(schedule, ReduceLROnPlateau):
            saved.update({key: current[key] for key in changed})
            message = f"{name} continues with {new} of the code; the checkpoint has {former}."
        elif not before or owners.count(owners[number]) > 1:
            message = (
                f"{name} continues with {former} from the checkpoint; the code has {new}, which has no effect, because"
                " another schedule changes the same optimizer."
            )
        else:
            _advance_to(saved, schedule, groups)
            saved_states[number] = schedule.state_dict()
            message = (
                f"{name} continues with {new} of the code at step {_position(saved)} of the schedule; the checkpoint"
                f" has {former}: learning rate {float(before[0]):.4g} before, {float(groups[0]['lr']):.4g} now."
            )
        if run.is_global_zero:
            log.info(message)


def announce_restored(run: RunState, checkpoint: dict[str, Any], advice: str) -> None:
    """Log the settings that differ in the code and are restored, because a change of them has no effect.

    Args:
        run: the state of the run, with new optimizers and schedules.
        checkpoint: the checkpoint.
        advice: how to train with the settings of the code.
    """
    engine = run.engine
    holders: list[tuple[Any, Any, Any]] = [
        (optimizer, group, saved)
        for optimizer, state in zip(engine.optimizers, checkpoint.get("optimizer_states", ()), strict=False)
        for group, saved in zip(optimizer.param_groups, state.get("param_groups", ()), strict=False)
    ]
    schedules = [config.scheduler for config in engine.schedules]
    for schedule, state in zip(schedules, checkpoint.get("lr_schedulers", ()), strict=False):
        current = schedule.state_dict()
        if "max_lrs" in current and "max_lrs" in state:
            holders.append((schedule, {"max_lrs": current["max_lrs"]}, {"max_lrs": state["max_lrs"]}))
    reported = set()
    for holder, current, saved in holders:
        set_by_schedule = (("initial_lr", "lr"), ("max_momentum", "momentum"), ("max_momentum", "betas"))
        without = {*_CHOICES, *(name for key, name in set_by_schedule if key in current.keys() & saved.keys())}
        names = [name for name in current if name in saved and name not in without | _counters(holder)]
        changed = {name: (current[name], saved[name]) for name in names if _plain(current[name]) != _plain(saved[name])}
        if changed and holder not in reported:
            reported.add(holder)
            new, former = _described(changed)
            log.info(
                f"{type(holder).__name__} continues with {former} from the checkpoint; the code has {new}, which has no"
                f" effect. To train with {new}, {advice}."
            )


def _counters(holder: Any) -> set[str]:
    """Return the values in an optimizer's groups that its steps set: its class does not take them as arguments."""
    arguments = inspect.signature(type(holder)).parameters.values()
    takes_any = any(argument.kind is argument.VAR_KEYWORD for argument in arguments)
    return set() if takes_any else set(getattr(holder, "defaults", ())) - {argument.name for argument in arguments}


def _of_other_classes(run: RunState, checkpoint: dict[str, Any], role: str, states: list[dict[str, Any]]) -> list[int]:
    """Return the indices of the optimizers or schedules of another class; [] if the file does not record classes.

    Raises:
        ResumeError: if there are any, and the resume must be exact.
    """
    saved = checkpoint.get("loops", {}).get(TRAINER_KEY, {}).get("kinds", {}).get(role, [])
    pairs = zip(saved, run.engine.kinds.get(role, []), range(len(states)))  # noqa: B905  # numbers are checked later
    changed = [(index, before, now) for before, now, index in pairs if before != now]
    for _, before, now in changed:
        refuse_inexact(
            f"configure_optimizers returned the {role} {now}, but the checkpoint is of a run with {before}. The {role}"
            " would start with a new state.",
            f"Return the {role} of the saved run, or start a new run with its weights: fit(weights=...), on the command"
            " line weights=RUN.",
            exact=run.exact_resume,
        )
    return [index for index, _, _ in changed]


def _described(changed: Mapping[str, tuple[Any, Any]]) -> tuple[str, str]:
    """Return the settings of the code and those of the checkpoint as text."""
    if not changed:  # functions cannot be printed
        return "the functions", "others"
    given, saved = ([(name, _plain(values[side])) for name, values in changed.items()] for side in (0, 1))
    return _text_of(given), _text_of(saved)


def _text_of(settings: list[tuple[str, Any]]) -> str:
    return ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={shortened(value)}"
        for name, value in settings
        if name != "_schedule_phases"  # follow from other settings
    )


def _plain(value: Any) -> Any:
    """Return a setting as a value that can be compared with the saved one."""
    if isinstance(value, Tensor):  # a host-device synchronization
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def refuse_exceeded(run: RunState, checkpoint: dict[str, Any]) -> None:
    """Refuse a run that takes more steps or epochs than ``OneCycleLR`` has, which would raise in the middle of the run.

    Raises:
        ConfigurationError: if the run takes more. The message contains both numbers.
    """
    trainer, configs = run.trainer, run.schedules if len(run.optimizers) == 1 else []
    for config in configs:
        schedule, unit = config.scheduler, config.interval
        if not isinstance(schedule, OneCycleLR) or unit not in ("step", "epoch") or config.frequency != 1:
            continue
        total = schedule.total_steps
        if unit == "step":  # only here, because it requests the training dataloader
            steps, done = trainer.estimated_stepping_batches, run.progress.updates
        else:
            steps, done = trainer.max_epochs or -1, run.epoch
        if total < min(steps, schedule.last_epoch + steps - done) < float("inf"):
            raise ConfigurationError(
                f"Got a run of {steps} {'optimizer steps' if unit == 'step' else 'epochs'} and"
                f" OneCycleLR(total_steps={total}), which cannot take more."
                " Compute total_steps from self.trainer.estimated_stepping_batches or self.trainer.max_epochs to"
                " continue the run with a longer schedule, or start a new run with its weights: weights=RUN, in Python"
                " fit(weights=...)."
            )


def _differences(current: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings of a schedule, and of those inside it, that differ between two of its states.

    A state with other settings is that of another kind of schedule, which a callback may have set during the run.
    """
    names = list(filter(_SETTINGS.fullmatch, current))
    changed: dict[str, tuple[Any, Any]] = {}
    if set(names) == set(filter(_SETTINGS.fullmatch, saved)):
        changed = {name: (current[name], saved[name]) for name in names if _plain(current[name]) != _plain(saved[name])}
    for name in current.keys() & saved.keys():
        value, saved_value = current[name], saved[name]
        if isinstance(value, list) and isinstance(saved_value, list):
            for inner, other in zip(value, saved_value, strict=False):
                if isinstance(inner, Mapping) and isinstance(other, Mapping):
                    changed |= _differences(inner, other)
    return changed


def _factors_differ(schedule: LRScheduler, saved: Mapping[str, Any]) -> bool:
    """Return whether the current functions of a ``LambdaLR`` compute other rates than those of the saved run."""
    if isinstance(schedule, LambdaLR) and _position(saved) > 0:
        factors = [factor(_position(saved)) for factor in schedule.lr_lambdas]
        rates = zip(saved["base_lrs"], factors, saved["_last_lr"], strict=False)
        return not all(math.isclose(base * factor, float(rate), rel_tol=1e-9) for base, factor, rate in rates)
    inner_schedules = zip(getattr(schedule, "_schedulers", ()), saved.get("_schedulers", ()), strict=False)
    return any(_factors_differ(inner, state) for inner, state in inner_schedules)


def _position(state: Mapping[str, Any]) -> int:
    """Return the number of steps that a schedule has taken, from its state, or -1 if the state does not hold it."""
    if "last_epoch" in state:
        return int(state["last_epoch"])
    parts: list[Mapping[str, Any]] = state.get("_schedulers", [])  # ChainedScheduler has no position itself
    return _position(parts[0]) if parts else -1


def _advance_to(saved: Mapping[str, Any], schedule: LRScheduler, saved_groups: list[dict[str, Any]]) -> None:
    """Step a new schedule to the position of a saved one, with its rates, and write the result to the saved groups."""
    groups = schedule.optimizer.param_groups
    for index, (group, saved_group) in enumerate(zip(groups, saved_groups, strict=False)):
        # a finder may have changed the rates of the saved run
        first, saved_lr = float(group.get("initial_lr", 0.0)), float(saved_group.get("initial_lr", 0.0))
        if first and saved_lr and first != saved_lr:
            group["lr"] = group["lr"] * (saved_lr / first)
            for inner in nested_schedules(schedule):
                if hasattr(inner, "base_lrs"):
                    inner.base_lrs[index] = inner.base_lrs[index] * (saved_lr / first)
        group.update({name: saved_group[name] for name in _RATES[1:] if name in group and name in saved_group})
    if "max_lrs" in saved:
        vars(schedule)["max_lrs"] = list(saved["max_lrs"])  # of CyclicLR
    former_groups = [dict(group) for group in groups]
    position = _position(saved)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer has not stepped yet
        for _ in range(min(position, getattr(schedule, "total_steps", position))):
            schedule.step()
    for group, former, saved_group in zip(groups, former_groups, saved_groups, strict=True):
        changed = {name for name, value in group.items() if name not in _CHOICES and _plain(value) != former.get(name)}
        saved_group.update({name: group[name] for name in changed.union(_RATES) if name in group})
