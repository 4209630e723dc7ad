"""A run inside a hook of another run, for ``lightning.pytorch.tuner`` and its callbacks.

The finders save a checkpoint, change callbacks, loggers, limits and schedules, run the loop a few times, and restore
the checkpoint. They do so in a hook of a run (``on_fit_start``, ``on_validation_start``, ``on_train_epoch_start``),
which continues afterwards.

At its end, ``LearningRateFinder`` sets the module's attribute and the current rate of each parameter group. A schedule
that computes rates from the configured one (``base_lrs``, ``initial_lr``, ``max_lr``) would return to the configured
rate at its next step. Here the fit continues as if the optimizer had been configured with the rate found: see
:func:`attach_finders`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.seed import isolate_rng
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from trainer.callbacks.gradient_clipping import GradientClipping
from trainer.common.lightning_private import found_rate
from trainer.common.session import Session
from trainer.data.batches import TrainingBatches
from trainer.diagnosis.replay_state import ObjectState
from trainer.distributed.signals import Signals
from trainer.errors import rank_zero_warn
from trainer.loop.evaluation import EvalLoop
from trainer.loop.fit import FitLoop
from trainer.loop.optimizers import nested_schedules
from trainer.loop.run_state import RunData, RunState, state_of
from trainer.metrics.metrics import MetricStore


def attach_finders(run: RunState, session: Session) -> None:
    """Make the fit use the rate that a ``LearningRateFinder`` finds as the configured rate.

    Before the first batch, ``configure_optimizers`` is called again, with the module's attribute set. Later, or if the
    module does not take its rate from the attribute, the rate replaces the configured one in the parameter groups, and
    in the schedules that read it from there.

    Args:
        run: the state of the run, before ``on_fit_start``.
        session: detaches the finders when it closes.
    """
    for callback in run.callbacks:
        if isinstance(callback, LearningRateFinder):
            find, begun = callback.lr_find, run.progress.batches_started
            session.replace(callback, "lr_find", partial(_find_rate, callback, find, begun))


def rerun(trainer: Any, stage: RunningStage) -> None:
    """Run the loop of ``stage`` from its beginning, with the current callbacks, limits and dataloaders.

    A finder has replaced the callbacks. Those that clip gradients are kept, because the result depends on them.
    """
    run, runner = state_of(trainer), trainer._runner
    limits, steps, callbacks = run.limits, run.global_step, run.callbacks
    kept = [c for c in runner.preparation.hooks.callbacks if isinstance(c, GradientClipping) and c not in callbacks]
    run.callbacks = [*callbacks, *kept]  # the finder restores its own list
    with cast(Signals, trainer._signal_connector).inner_run(), _preserve_outer_run(run, runner):
        if 0 < limits.max_steps <= steps:  # set by ``scale_batch_size``, for the steps of this run only
            limits.max_steps += steps
        runner.repeat(stage)


def set_up_training_data(trainer: Any) -> None:
    """Make the fit loop iterate the current training dataloaders; new ones, if a finder has dropped them."""
    run, preparation = state_of(trainer), trainer._runner.preparation
    loop, loaders = run.loop, _loaders(run.data, RunningStage.TRAINING)
    if loaders is None or loop.batches.loaders is None:
        return
    preparation.schedule_validation(loaders)  # again, because the dataloaders may be new
    loop.batches = TrainingBatches(loaders, preparation.renewed_loaders)
    loop.batches.start_epoch(loop.progress.epochs_trained, skip=loop.progress.batches_this_epoch)
    set_up_evaluation_data(trainer, RunningStage.VALIDATING)


def set_up_evaluation_data(trainer: pl.Trainer, stage: RunningStage) -> None:
    """Make the loop of ``stage`` iterate its current dataloaders; new ones, if a finder has dropped them."""
    run = state_of(trainer)
    if stage is RunningStage.VALIDATING and run.fits and not trainer.enable_validation:
        return
    loop, loaders = run.eval_loops[stage], _loaders(run.data, stage)
    if loop.loaders is not None:
        loop.loaders = loaders


def _loaders(data: RunData, stage: RunningStage) -> Any:
    """Return the dataloaders of ``stage``; request them again if a limit of 0 prevented that before."""
    loaders = data.loaders(stage)
    return data.loaders(stage, recreate=True) if loaders is None else loaders


def _find_rate(
    callback: LearningRateFinder, find: Callable[..., None], begun: int, trainer: pl.Trainer, pl_module: LightningModule
) -> None:
    """Run ``LearningRateFinder.lr_find``; ``begun`` is the number of batches that were started before this fit."""
    run = state_of(trainer)
    begins, before = run.progress.batches_started == begun, _rates_of(run)
    find(trainer, pl_module)
    if (rate := found_rate(callback)) is None:
        return
    if begins and not run.engine.keeps_optimizers:
        with isolate_rng():
            trainer.strategy.setup_optimizers(trainer)
        if _rates_of(run) != before:
            return
    _configure(run, rate, before if begins else None)


def _rates_of(run: RunState) -> list[tuple[Any, ...]]:
    """Return the current rate of each parameter group, and those that it and its schedules were configured with."""
    groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
    return [(group["lr"], group.get("initial_lr"), group.get("max_lr")) for group in groups]


def _configure(run: RunState, rate: float, before: list[tuple[Any, ...]] | None) -> None:
    """Replace the rate that the optimizer was configured with.

    Args:
        run: the state of the run, with one optimizer.
        rate: the new rate, of all parameter groups.
        before: the result of :func:`_rates_of` before the first batch, if none has been trained. If the schedules have
            changed the configured rate, as a warm-up does, the new rate is changed by the same factor. None to set the
            current rate to ``rate``.
    """
    schedules = [schedule for config in run.schedules for schedule in nested_schedules(config.scheduler)]
    for schedule in schedules:
        if isinstance(schedule, (OneCycleLR, CyclicLR)):
            rank_zero_warn(
                f"LearningRateFinder found {rate:g}, but {type(schedule).__name__} sets the rates that it was given,"
                " whatever the optimizer's rate is. Have configure_optimizers compute them from the module's attribute,"
                " and search before the first batch."
            )
            return
    groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
    for group, (current, configured, _) in zip(groups, before or [(rate, None, None)] * len(groups), strict=True):
        group["lr"] = rate * (current / configured) if configured else rate
        if "initial_lr" in group:
            group["initial_lr"] = rate
    for schedule in schedules:
        if hasattr(schedule, "base_lrs"):
            schedule.base_lrs = [rate] * len(schedule.base_lrs)


@contextmanager
def _preserve_outer_run(run: RunState, runner: Any) -> Iterator[None]:
    """Return a context for the inner run that keeps and restores the state of the outer one."""
    engine, loop, module = run.engine, run.loop, run.module
    loops: list[FitLoop | EvalLoop] = [loop, *run.eval_loops.values()]
    owners = [*loops, loop.limits, run.status]
    saved = [(owner, dict(vars(owner))) for owner in owners]
    preparation, calls = runner.preparation, engine.module_calls
    attributes_before = ObjectState([module], without=run.optimizers)  # Lightning's finders restore only its state dict
    for inner_loop in loops:
        inner_loop.metrics = MetricStore(training=inner_loop is loop)
    try:
        yield
    finally:
        for owner, attributes in saved:
            vars(owner).update(attributes)
        runner.preparation, engine.module_calls = preparation, calls
        attributes_before.restore()
        loop.window.reset()
