"""What ``lightning.pytorch.tuner`` and its callbacks do to a Trainer: run its loop inside a hook, and put all back.

The finders save a checkpoint, change callbacks, loggers, limits and schedules, run the loop a few times, and restore
the checkpoint. All of that happens in a hook of the run they belong to (``on_fit_start``, ``on_validation_start``,
``on_train_epoch_start``), which then goes on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.trainer.call import _call_callbacks_load_state_dict
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from trainer.checkpoint import state as checkpoints
from trainer.compat import loop_state
from trainer.data.batches import TrainingBatches
from trainer.state.metrics import MetricStore


def rerun(trainer: Any, stage: RunningStage) -> None:
    """Run the loop of ``stage`` from its beginning, with the callbacks, limits and dataloaders of now."""
    with trainer._signal_connector.inner_run(), _set_aside(trainer):
        hooks = trainer._hooks = trainer._build_hooks()
        if stage is RunningStage.TRAINING:
            trainer._prepare_fit()
            trainer.loop.run()
        else:
            trainer._prepare_evaluation(hooks, stage, trainer.eval_loops[stage].inference_mode)
            trainer.eval_loops[stage].run()


def set_up_training_data(trainer: Any) -> None:
    """Have the loop iterate the training dataloaders of now: new ones, if they have been forgotten."""
    loop, loaders = trainer.loop, _loaders(trainer, RunningStage.TRAINING)
    if loaders is None or loop.batches.loaders is None:
        return
    trainer._schedule_validation(loaders)  # it is the middle of a run
    loop.batches = TrainingBatches(loaders, trainer._renewed_loaders)
    loop.batches.start_epoch(loop.progress.epochs_trained, skip=loop.progress.batches_this_epoch)
    set_up_evaluation_data(trainer, RunningStage.VALIDATING)


def set_up_evaluation_data(trainer: Any, stage: RunningStage) -> None:
    """Have the loop of ``stage`` iterate its dataloaders of now: new ones, if they have been forgotten."""
    if stage is RunningStage.VALIDATING and trainer.state.fn is TrainerFn.FITTING and not trainer.enable_validation:
        return
    loop, loaders = trainer.eval_loops[stage], _loaders(trainer, stage)
    if loop.loaders is not None:
        loop.loaders = loaders


def _loaders(trainer: Any, stage: RunningStage) -> Any:
    """The dataloaders of ``stage``. Where there were none, because of a limit of 0, they are asked for again."""
    loaders = trainer.data.loaders(stage)
    return trainer.data.loaders(stage, anew=True) if loaders is None else loaders


class CheckpointConnectorView(_CheckpointConnector):
    """``trainer._checkpoint_connector``: Lightning's, for the finders, SLURM's requeueing, and the curious.

    What it has are the Trainer's path and checkpoint; what it writes, reads and puts back is ours.
    """

    trainer: Any

    def __init__(self, trainer: Any) -> None:  # all that Lightning's constructor assigns is the Trainer's
        self.trainer = trainer

    @property
    def _ckpt_path(self) -> str | Path | None:
        path: str | Path | None = self.trainer._ckpt_path
        return path

    @_ckpt_path.setter
    def _ckpt_path(self, path: str | Path | None) -> None:
        self.trainer._ckpt_path = path

    @property
    def _user_managed(self) -> bool:
        return bool(self.trainer.ckpt_path_is_assigned)

    @_user_managed.setter
    def _user_managed(self, is_assigned: bool) -> None:
        self.trainer.ckpt_path_is_assigned = is_assigned

    @property
    def _loaded_checkpoint(self) -> dict[str, Any]:
        checkpoint: dict[str, Any] = self.trainer._checkpoint
        return checkpoint

    @_loaded_checkpoint.setter
    def _loaded_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.trainer._checkpoint = checkpoint

    def _get_loops_state_dict(self) -> dict[str, Any]:
        return loop_state.loops_of(self.trainer)

    def restore_callbacks(self) -> None:
        """Put back the callbacks' states."""
        super().restore_callbacks()
        _call_callbacks_load_state_dict(self.trainer, self._ours)

    def restore_loops(self) -> None:
        """Put back the counters."""
        super().restore_loops()
        if self.trainer.state.fn is TrainerFn.FITTING and "progress" in self._ours:
            self.trainer.progress.load_state_dict(self._ours["progress"])

    @property
    def _ours(self) -> dict[str, Any]:
        """What the checkpoint that is read has beside Lightning's parts."""
        ours: dict[str, Any] = self._loaded_checkpoint.get("loops", {}).get(checkpoints.OUR_KEY, {})
        return ours

    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        """A checkpoint of this moment."""
        checkpoint: dict[str, Any] = self.trainer._dump(bool(weights_only))
        return checkpoint

    def resume_start(self, checkpoint_path: str | Path | None = None, weights_only: bool | None = None) -> None:
        """Read a checkpoint, for the methods that put back parts of it."""
        self._ckpt_path = checkpoint_path
        if checkpoint_path:
            self._loaded_checkpoint = checkpoints.read(self.trainer.engine, checkpoint_path, weights_only)

    def restore(self, checkpoint_path: str | Path | None = None, weights_only: bool | None = None) -> None:
        """Put back everything that a checkpoint of this run holds."""
        if not checkpoint_path:
            return
        trainer = self.trainer
        checkpoint = checkpoints.read(trainer.engine, checkpoint_path, weights_only)
        checkpoints.restore_module_and_callbacks(trainer, checkpoint)
        if trainer.state.fn is not TrainerFn.FITTING:
            return
        if "lr_schedulers" in checkpoint and len(checkpoint["lr_schedulers"]) != len(trainer.engine.schedules):
            checkpoint["lr_schedulers"] = []  # a finder that failed has left a schedule of its own; that error counts
            trainer.engine.schedules.clear()
        checkpoints.restore_training(trainer, checkpoint, loop_state.progress_from)


@contextmanager
def _set_aside(trainer: Any) -> Iterator[None]:
    """Keep what the run, one of whose hooks runs another, will need to go on."""
    engine, state, module = trainer.engine, trainer.state, trainer.lightning_module
    loops = [trainer.loop, *trainer.eval_loops.values()]
    owners = [*loops, trainer.loop.limits, state]
    kept = [(owner, dict(vars(owner))) for owner in owners]
    hooks, calls, scope = trainer._hooks, engine.module_calls, module._current_fx_name
    for loop in loops:
        loop.metrics = MetricStore(training=loop is trainer.loop)
    try:
        yield
    finally:
        for owner, attributes in kept:
            vars(owner).update(attributes)
        trainer._hooks, engine.module_calls = hooks, calls
        module._current_fx_name = scope
        trainer.loop.window.reset()
