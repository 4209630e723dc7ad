"""Contents of a checkpoint: one ordered list of entries, each with the functions that save and load it.

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

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, NamedTuple

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
Moment = Literal["set-up", "training"]


class Entry(NamedTuple):
    """An entry of a checkpoint.

    Attributes:
        key: the key of its value, with dots between nested keys. If "", the value is a dict that is merged into the
            checkpoint.
        save: returns the value, from the state of the run and the entries before it. None leaves the entry out.
        load: restores the entry, from the state of the run and the checkpoint. Default: None, nothing is restored.
        moment: when it is loaded: ``"set-up"``, before the strategy wraps the module (afterwards if the strategy shards
            it); or ``"training"``, when the optimizers exist. Default: ``"set-up"``.
        is_for_resuming: whether a checkpoint with weights only leaves it out. Default: True.
    """

    key: str
    save: Callable[[Any, Checkpoint], Any] | None
    load: Callable[[Any, Checkpoint], None] | None = None
    moment: Moment = "set-up"
    is_for_resuming: bool = True


def dump(run: RunState, *, weights_only: bool) -> Checkpoint:
    """Return a checkpoint of the current state.

    Args:
        run: the state of the run.
        weights_only: whether to leave out the entries that only a resumed run needs.
    """
    checkpoint: Checkpoint = {}
    for entry in ENTRIES:
        if entry.save is None or (weights_only and entry.is_for_resuming):
            continue
        if (value := entry.save(run, checkpoint)) is None:
            continue
        *path, key = entry.key.split(".")
        owner = checkpoint
        for name in path:
            owner = owner.setdefault(name, {})
        owner.update(value if not key else {key: value})
    return checkpoint


def load(run: RunState, checkpoint: Checkpoint, moment: Moment) -> None:
    """Restore the entries of one moment, in their order."""
    for entry in ENTRIES:
        if entry.load is not None and entry.moment == moment:
            entry.load(run, checkpoint)


def _trainer_entry(key: str, save: Callable[[Any, Checkpoint], Any], **more: Any) -> Entry:
    return Entry(f"loops.{TRAINER_KEY}.{key}", save, **more)


def _weights_entry(key: str, save: Callable[[Any, Checkpoint], Any], **more: Any) -> Entry:
    return Entry(key, save, is_for_resuming=False, **more)


def _load_weights(run: RunState, checkpoint: Checkpoint) -> None:
    weights = averaging.training_state(run, checkpoint)
    run.engine.checkpoints.load_module_state(weights, strict=run.module.strict_loading)


def _timed(run: RunState, name: str) -> AbstractContextManager[None]:
    return run.profiler.profile(f"[LightningDataModule]{type(run.datamodule).__name__}.{name}")


def _dump_datamodule(run: RunState, _: Checkpoint) -> Checkpoint | None:
    if (datamodule := run.datamodule) is None:
        return None
    with _timed(run, "state_dict"):
        saved = datamodule.state_dict()
    return {type(datamodule).__qualname__: saved} if saved else None


def _load_datamodule(run: RunState, checkpoint: Checkpoint) -> None:
    if (datamodule := run.datamodule) is not None and type(datamodule).__qualname__ in checkpoint:
        with _timed(run, "load_state_dict"):
            datamodule.load_state_dict(checkpoint[type(datamodule).__qualname__])


def _dump_loops(run: RunState, _: Checkpoint) -> Checkpoint:
    loops = loop_state.loops_of(run)
    loops["fit_loop"]["state_dict"].update(run.data.state_dict())
    return loops


def _dump_parameters(run: RunState, checkpoint: Checkpoint) -> list[list[str]]:
    names = {name: name for name in checkpoint["state_dict"]}  # equal strings are written once
    names_by_optimizer = state.parameter_names(run.module, run.optimizers)
    return [[names.setdefault(name, name) for name in known] for known in names_by_optimizer]


def _dump_processes(run: RunState, checkpoint: Checkpoint) -> list[Any]:
    engine, process = run.engine, run.process.dump()
    names = {name: name for name in checkpoint["state_dict"]}
    states = [process] if engine.checkpoints.saves_shards else engine.collectives.gather(process)
    return [packed(process, names) for process in states]


def _dump_callbacks(run: RunState, _: Checkpoint, *, own: bool) -> Checkpoint:
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


def _load_schedules(run: RunState, checkpoint: Checkpoint) -> None:
    averages = any(isinstance(callback, StochasticWeightAveraging) for callback in run.callbacks)
    state.restore_schedules(run, checkpoint, may_be_removed=averages)  # SWA continues with its own schedule


def _call_save_hooks(run: RunState, checkpoint: Checkpoint) -> None:
    is_whole = "optimizer_states" in checkpoint
    module = run.module
    for callback in run.callbacks:
        if is_whole or sees_each_save(callback):  # as in Lightning, others do not see a save of weights only
            callback.on_save_checkpoint(run.trainer, module, checkpoint)
    module.on_save_checkpoint(checkpoint)


def _make_loadable(run: RunState, checkpoint: Checkpoint) -> None:
    hparams.make_loadable(checkpoint, run.module, run.datamodule)


ENTRIES: tuple[Entry, ...] = (
    # may change the entries that are loaded after it
    Entry("", None, lambda run, checkpoint: run.module.on_load_checkpoint(checkpoint)),
    _weights_entry("epoch", lambda run, _: run.epoch),
    _weights_entry("global_step", lambda run, _: run.global_step),
    _weights_entry("state_dict", lambda run, _: run.engine.checkpoints.module_state(), load=_load_weights),
    _weights_entry("", _dump_datamodule, load=_load_datamodule),
    _weights_entry("pytorch-lightning_version", lambda *_: lightning.__version__),
    _weights_entry("loops", _dump_loops),
    _weights_entry(f"loops.{TRAINER_KEY}.format", lambda *_: state.FORMAT),
    _weights_entry(f"loops.{TRAINER_KEY}.progress", lambda run, _: run.progress.state_dict()),
    Entry("", None, partial(state.restore_progress, progress_from=loop_state.progress_from), "training"),
    _trainer_entry("awaited", state.awaited_metrics),
    _trainer_entry("parameters", _dump_parameters),
    _trainer_entry("processes", _dump_processes),  # restored by ProcessState.load, after every `on_train_start`
    _trainer_entry("dtypes", state.parameter_dtypes),
    _trainer_entry("kinds", lambda run, _: run.engine.kinds),
    _trainer_entry("callbacks", partial(_dump_callbacks, own=True)),
    Entry("callbacks", partial(_dump_callbacks, own=False), _load_callbacks),
    Entry("", None, resumed_settings.continue_settings, "training"),
    Entry("optimizer_states", state.optimizer_states, state.restore_optimizers, "training"),
    Entry("lr_schedulers", state.schedule_states, _load_schedules, "training"),
    Entry("", None, resumed_settings.refuse_exceeded, "training"),
    _weights_entry("", lambda run, _: hparams.hyper_parameters_of(run.module, run.datamodule)),
    _weights_entry("", _call_save_hooks),
    _trainer_entry("order", elastic.order_to_save),
    _trainer_entry("savers", model_checkpoints.states_to_save, load=model_checkpoints.restore_states),
    _trainer_entry("rows", resuming.places_to_save),
    _weights_entry("", _make_loadable),  # after the hooks, which may change the hyperparameters
)
"""All entries, in the order in which they are saved and, at each moment, loaded."""
