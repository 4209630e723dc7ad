"""Contents of a checkpoint: save all entries, and load them at two moments of a run.

The keys are Lightning's; ``loops.amp_trainer`` holds the entries that Lightning's format lacks.

=============================  =========================================================================================
``epoch``, ``global_step``     For readers and file names. Not restored.
``state_dict``                 The module.
``DataModule``                 The datamodule, under the name of its class.
``pytorch-lightning_version``  The installed version of Lightning. Not restored.
``loops``                      The counters in Lightning's format, and the states of dataloaders that have one.
``loops.amp_trainer``:
``format``                     The version of the entries under ``amp_trainer``.
``progress``                   The counters (``trainer.state.progress``).
``awaited``                    Metrics that schedules monitor.
``parameters``, ``dtypes``     Names and dtypes of each optimizer's parameters.
``kinds``                      The classes of the optimizers and schedules that ``configure_optimizers`` returned.
``processes``                  The state of each process (``trainer.checkpoint.process``).
``callbacks``                  States of callbacks of this package.
``order``                      The order of the training samples, to resume on another number of processes.
``savers``                     When each ModelCheckpoint last saved.
``rows``                       The position of each logger in its files.
``callbacks``                  States of other callbacks: Lightning reads every callback's state here.
``optimizer_states``           One for each optimizer.
``lr_schedulers``              One for each schedule.
``MixedPrecision``             The loss scaler, from the ScalerCheckpoint callback (``on_save_checkpoint``).
``hyper_parameters`` ...       From ``save_hyperparameters``; may be objects.
=============================  =========================================================================================
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import lightning
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.utilities import rank_zero_info

from trainer.checkpoint import hparams, model_checkpoints, resuming
from trainer.checkpoint import loading as state
from trainer.checkpoint.compact import packed
from trainer.checkpoint.manifest import TRAINER_KEY
from trainer.common.traits import sees_each_save
from trainer.lightning import averaging, loop_state, resumed_settings
from trainer.lightning import elastic_resume as elastic
from trainer.loop.run_state import RunState

Checkpoint = dict[str, Any]


def dump(run: RunState, *, weights_only: bool) -> Checkpoint:
    """Return a checkpoint of the current state.

    Args:
        run: the state of the run.
        weights_only: whether to leave out the entries that only a resumed run needs.
    """
    checkpoint: Checkpoint = {
        "epoch": run.epoch,
        "global_step": run.global_step,
        "state_dict": run.engine.checkpoints.module_state(),
        **_datamodule_state(run),
        "pytorch-lightning_version": lightning.__version__,
        "loops": loop_state.loops_of(run),
    }
    loops = checkpoint["loops"]
    loops["fit_loop"]["state_dict"].update(run.data.state_dict())
    loops[TRAINER_KEY] = {"format": state.FORMAT, "progress": run.progress.state_dict()}
    if not weights_only:
        names = {name: name for name in checkpoint["state_dict"]}  # equal strings are written once
        loops[TRAINER_KEY] |= {
            "awaited": state.awaited_metrics(run),
            "parameters": [
                [names.setdefault(name, name) for name in known]
                for known in state.parameter_names(run.module, run.optimizers)
            ],
            "processes": [packed(process, names) for process in _processes(run)],
            "dtypes": state.parameter_dtypes(run),
            "kinds": run.engine.kinds,
            "callbacks": _callback_states(run, own=True),
        }
        checkpoint |= {
            "callbacks": _callback_states(run, own=False),
            "optimizer_states": state.optimizer_states(run),
            "lr_schedulers": [config.scheduler.state_dict() for config in run.schedules],
        }
    checkpoint |= hparams.hyper_parameters_of(run.module, run.datamodule)
    for callback in run.callbacks:
        if not weights_only or sees_each_save(callback):  # as in Lightning, others do not see a save of weights only
            callback.on_save_checkpoint(run.trainer, run.module, checkpoint)
    run.module.on_save_checkpoint(checkpoint)
    if not weights_only:
        after_hooks = {
            "order": elastic.order_to_save(run),
            "savers": model_checkpoints.states_to_save(run),
            "rows": resuming.places_to_save(run),
        }
        loops[TRAINER_KEY] |= {key: value for key, value in after_hooks.items() if value is not None}
    hparams.make_loadable(checkpoint, run.module, run.datamodule)  # hooks may have changed the hyperparameters
    return checkpoint


def load_before_setup(run: RunState, checkpoint: Checkpoint) -> None:
    """Restore the entries that do not need optimizers.

    Called before the strategy wraps the module, or afterwards if it shards the module.
    """
    averaging.call_load_hook(run, checkpoint)  # may change the entries
    weights = averaging.training_state(run, checkpoint)
    run.engine.checkpoints.load_module_state(weights, strict=run.module.strict_loading)
    if (datamodule := run.datamodule) is not None and type(datamodule).__qualname__ in checkpoint:
        with _timed(run, "load_state_dict"):
            datamodule.load_state_dict(checkpoint[type(datamodule).__qualname__])
    _load_callbacks(run, checkpoint)
    model_checkpoints.restore_states(run, checkpoint)


def load_training(run: RunState, checkpoint: Checkpoint) -> None:
    """Restore counters, optimizers and schedules, which exist now.

    The states of the processes are restored by ``ProcessState.load``, after every ``on_train_start``.
    """
    state.restore_progress(run, checkpoint, loop_state.progress_from)
    resumed_settings.continue_settings(run, checkpoint)
    state.restore_optimizers(run, checkpoint)
    averages = any(isinstance(callback, StochasticWeightAveraging) for callback in run.callbacks)
    state.restore_schedules(run, checkpoint, may_be_removed=averages)  # SWA continues with its own schedule
    resumed_settings.refuse_exceeded(run, checkpoint)


def _timed(run: RunState, name: str) -> AbstractContextManager[None]:
    return run.profiler.profile(f"[LightningDataModule]{type(run.datamodule).__name__}.{name}")


def _datamodule_state(run: RunState) -> Checkpoint:
    if (datamodule := run.datamodule) is None:
        return {}
    with _timed(run, "state_dict"):
        saved = datamodule.state_dict()
    return {type(datamodule).__qualname__: saved} if saved else {}


def _processes(run: RunState) -> list[Any]:
    """Return the states of all processes; with shards, that of this process, which writes it itself."""
    engine, process = run.engine, run.process.dump()
    return [process] if engine.checkpoints.saves_shards else engine.collectives.gather(process)


def _callback_states(run: RunState, *, own: bool) -> Checkpoint:
    callbacks = [callback for callback in run.callbacks if state.is_own_callback(callback) is own]
    after = run.savers_after()
    states = ((callback.state_key, after.get(callback, callback).state_dict()) for callback in callbacks)
    return {key: saved for key, saved in states if saved}


def _load_callbacks(run: RunState, checkpoint: Checkpoint) -> None:
    """Restore the states of the callbacks.

    ``EarlyStopping`` keeps the patience that the code sets. In an evaluation after a fit, ``ModelCheckpoint`` and
    ``EarlyStopping`` keep the results of that fit.
    """
    keeps_results = not run.fits and run.global_step > 0
    kept = (ModelCheckpoint, EarlyStopping) if keeps_results else ()
    callbacks = [callback for callback in run.callbacks if not isinstance(callback, kept)]
    patience = {callback: callback.patience for callback in callbacks if isinstance(callback, EarlyStopping)}
    state.restore_callbacks(run, checkpoint, callbacks)
    for callback, given in patience.items():
        if callback.patience != given:
            rank_zero_info(f"EarlyStopping continues with patience={given}; the checkpoint has {callback.patience}.")
            callback.patience = given
