"""A run inside a hook of a run, as ``lightning.pytorch.tuner`` and its callbacks need it.

The finders save a checkpoint, change callbacks, loggers, limits and schedules, run the loop a few times, and restore
the checkpoint. They do so in a hook of a run (``on_fit_start``, ``on_validation_start``, ``on_train_epoch_start``),
which continues afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from trainer.data.batches import TrainingBatches
from trainer.state.metrics import MetricStore


def rerun(trainer: Any, stage: RunningStage) -> None:
    """Run the loop of ``stage`` from its beginning, with the callbacks, limits and dataloaders of now."""
    with trainer._signal_connector.inner_run(), _set_aside(trainer):
        trainer._runner.repeat(stage)


def set_up_training_data(trainer: Any) -> None:
    """Have the fit loop iterate the current training dataloaders; new ones, if a finder has dropped them."""
    loop, loaders = trainer.loop, _loaders(trainer, RunningStage.TRAINING)
    if loaders is None or loop.batches.loaders is None:
        return
    preparation = trainer._runner.preparation
    preparation.schedule_validation(loaders)  # it is the middle of a run
    loop.batches = TrainingBatches(loaders, preparation.renewed_loaders)
    loop.batches.start_epoch(loop.progress.epochs_trained, skip=loop.progress.batches_this_epoch)
    set_up_evaluation_data(trainer, RunningStage.VALIDATING)


def set_up_evaluation_data(trainer: Any, stage: RunningStage) -> None:
    """Have the loop of ``stage`` iterate its current dataloaders; new ones, if a finder has dropped them."""
    if stage is RunningStage.VALIDATING and trainer.state.fn is TrainerFn.FITTING and not trainer.enable_validation:
        return
    loop, loaders = trainer.eval_loops[stage], _loaders(trainer, stage)
    if loop.loaders is not None:
        loop.loaders = loaders


def _loaders(trainer: Any, stage: RunningStage) -> Any:
    """The dataloaders of ``stage``. If there were none, because of a limit of 0, they are asked for again."""
    loaders = trainer.data.loaders(stage)
    return trainer.data.loaders(stage, anew=True) if loaders is None else loaders


@contextmanager
def _set_aside(trainer: Any) -> Iterator[None]:
    """A context for the inner run: keeps and restores the state of the outer one."""
    engine, state, module = trainer.engine, trainer.state, trainer.lightning_module
    loops = [trainer.loop, *trainer.eval_loops.values()]
    owners = [*loops, trainer.loop.limits, state]
    kept = [(owner, dict(vars(owner))) for owner in owners]
    preparation, calls, scope = trainer._runner.preparation, engine.module_calls, module._current_fx_name
    for loop in loops:
        loop.metrics = MetricStore(training=loop is trainer.loop)
    try:
        yield
    finally:
        for owner, attributes in kept:
            vars(owner).update(attributes)
        trainer._runner.preparation, engine.module_calls = preparation, calls
        module._current_fx_name = scope
        trainer.loop.window.reset()
