"""The phases of a run (set up, train or evaluate, tear down), and the handling of errors.

``Trainer.fit``, ``validate``, ``test`` and ``predict`` work the same way. They open the context ``Run.started``. In it,
``Run.attach`` stores the module, the data and the checkpoint of the run, and then the engine calls ``Run.__call__`` in
each process.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng

from trainer import arguments
from trainer.callbacks.gradient_accumulation import find_callback
from trainer.checkpoint import hparams, model_checkpoints
from trainer.common import redaction
from trainer.common.lightning_private import TunerExit
from trainer.data.prefetching import Prefetching
from trainer.diagnosis import explanation as diagnosis
from trainer.distributed.signals import Signals
from trainer.distributed.stalls import StallWatch
from trainer.errors import ConfigurationError, rank_zero_warn
from trainer.lightning import callback_order, defaults, modules, tuning
from trainer.lightning.averaging import attach_averaging, defer_copies, hide_averages, resume_averaging, shard_averages
from trainer.lightning.base_trainer import TrainerBase, refuse_own_parts
from trainer.lightning.checkpoint_connector import CheckpointConnector
from trainer.loop.closures import refuse_bare_steps
from trainer.loop.hooks import CURRENT_HOOK
from trainer.loop.manual_optimization import count_bare_steps
from trainer.loop.optimizers import returned_none
from trainer.loop.schedule_free import averaged, use_averages
from trainer.metrics.logging import attach_log
from trainer.metrics.metric_objects import add_tracked, update_counts
from trainer.metrics.metrics import to_scalars
from trainer.preparation import Preparation
from trainer.record.measures import folder_of_reports, reason_without_updates

advice = logging.getLogger("lightning.pytorch.advice")  # the command line prints the messages of this logger

STAGES = {
    TrainerFn.FITTING: RunningStage.TRAINING,
    TrainerFn.VALIDATING: RunningStage.VALIDATING,
    TrainerFn.TESTING: RunningStage.TESTING,
    TrainerFn.PREDICTING: RunningStage.PREDICTING,
}
"""The initial stage of each kind of run."""

START = "start.ckpt"
"""The checkpoint that an elastic job, whose number of processes may change, writes before it trains."""


def _hook_of_fit(trainer: pl.Trainer) -> str | None:
    """Return the hook that a fit of ``trainer`` is running. None outside of a fit, and in its last hooks."""
    state = trainer.state
    if state.fn is not TrainerFn.FITTING or state.status is not TrainerStatus.RUNNING:
        return None
    hook = vars(trainer.lightning_module).get(CURRENT_HOOK) or "a method"
    return None if hook in ("on_train_end", "on_fit_end", "teardown") else hook


def _report_no_step(trainer: pl.Trainer, steps: int) -> None:
    """Report that a fit has trained nothing, because the counters are at the end of the training."""
    longer = (
        " To train longer, pass a larger max_epochs (or max_steps) to a new Trainer, and a checkpoint of this run to"
        " its fit(ckpt_path=...), so that optimizers and schedules continue."
    )
    if trainer.ckpt_path is None:
        rank_zero_warn(
            f"Nothing to do: this fit trained no step, because the Trainer has already trained {steps} optimizer steps"
            " in an earlier fit, and its counters continue. To train another module, or the same one from the start,"
            f" use a new Trainer.{longer}"
        )
    elif trainer.is_global_zero:
        advice.info(f"Nothing to do: the run has already trained {steps} optimizer steps and is complete.{longer}")


class Run:
    """Execute the runs of a Trainer, one at a time.

    Args:
        trainer: the Trainer.
        signals: ends a run when a signal arrives.
        connector: selects and restores checkpoints.

    Attributes:
        session: releases locks and restores replaced methods at the end of a run.
        preparation: the prepared loops of the current or the last run. None before the first run.
        process_state: the state of this process from the checkpoint, until it is restored. None without a checkpoint.
        stalls: detects processes that wait for another one. None in a run of a single process.
    """

    def __init__(self, trainer: TrainerBase, signals: Signals, connector: CheckpointConnector) -> None:
        self._trainer, self._run, self._engine = trainer, trainer.run_state, trainer.engine
        self._loop, self._eval_loops, self._published = trainer.loop, trainer.eval_loops, trainer.published
        self._data, self._process, self._progress = trainer.data, trainer.process, trainer.progress
        self._signals = signals
        self._connector = connector
        self.session = self._run.session
        self.preparation: Preparation | None = None
        self.process_state: dict[str, Any] | None = None
        self.stalls: StallWatch | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the resources of the current run out of copies of the Trainer."""
        return vars(self) | {"stalls": None}

    # --- in the process that calls fit, validate, test or predict ---------------------------------------------

    @contextmanager
    def started(self, fn: TrainerFn) -> Iterator[None]:
        """Set the Trainer's state during a run, and call ``on_exception`` if the run raises. A context manager.

        Ctrl-C ends the program. In a notebook or at a Python prompt, ``fit`` returns instead, and the other methods
        raise ``KeyboardInterrupt``.

        Raises:
            ConfigurationError: if a fit is in progress, because two runs cannot share the Trainer. The fit's last
                hooks (``on_train_end``, ``on_fit_end``, ``teardown``) may start a run.
        """
        if hook := _hook_of_fit(self._trainer):
            raise ConfigurationError(
                f"`trainer.{fn.value}` was called in {hook} while `trainer.fit` was running. This would end the fit."
                " Call it after the fit, or in on_fit_end. To evaluate during the fit, pass `val_dataloaders`, and set"
                " `val_check_interval` or `check_val_every_n_epoch`."
            )
        state = self._run.status
        state.fn, state.stage, state.status = fn, STAGES[fn], TrainerStatus.RUNNING
        try:
            yield
        except TunerExit:  # BatchSizeFinder and LearningRateFinder end the run once they have a result
            modules.call_teardown_hooks(self._trainer)
            self._release()
        except KeyboardInterrupt as error:
            is_interactive = hasattr(sys, "ps1")  # do not end the notebook or the prompt
            if not is_interactive:
                rank_zero_info("\nDetected KeyboardInterrupt, attempting graceful shutdown ...")
            with self._signals.ending(error):
                self._fail(error)
                self._engine.kill()
            if not is_interactive:
                sys.exit(1)
            if fn is not TrainerFn.FITTING:
                raise
            return
        except BaseException as error:
            stall = None if self.stalls is None else self.stalls.last_report
            explained = None
            with suppress(Exception):  # raise `error`, even if it cannot be explained
                explained = diagnosis.explain(error, self._run, self._folder, stall)
            with self._signals.ending(error):
                self._fail(explained or error)
            if explained is not None:
                raise explained from error
            raise
        state = self._run.status  # a launcher that spawns processes replaces it
        state.status, state.stage = TrainerStatus.FINISHED, None
        self._signals.end_after_run()

    def attach(
        self,
        model: LightningModule | None,
        dataloaders: dict[RunningStage, Any],
        datamodule: LightningDataModule | None,
        ckpt_path: str | Path | None,
        weights: str | Path | None = None,
    ) -> LightningModule:
        """Store the module and the data of a run, select its checkpoint, and return the module.

        Args:
            model: the module. None for the module of an earlier run.
            dataloaders: dataloaders by stage. The first value may be a datamodule.
            datamodule: the datamodule, or None. Cannot be combined with dataloaders.
            ckpt_path: the argument ``ckpt_path`` of ``fit``, ``validate``, ``test`` or ``predict``.
            weights: the argument ``weights`` of ``fit``. Default: None.

        Raises:
            ConfigurationError: if both dataloaders and a datamodule are given, the checkpoint cannot be selected, the
                fit of another Trainer is training the module, or a private method or connector of the Trainer was
                replaced by one that would not run.
        """
        trainer, first = self._trainer, next(iter(dataloaders.values()))
        refuse_own_parts(trainer)
        self._refuse_module_in_training(getattr(model, "_orig_mod", model))
        module = modules.attach(trainer, model)
        arguments.refuse_other_package("datamodule", datamodule)
        arguments.refuse_other_package("dataloaders", *dataloaders.values())
        given = [stage.value for stage, loaders in dataloaders.items() if loaders is not None]
        if isinstance(first, LightningDataModule) and datamodule is None:  # fit(model, datamodule)
            datamodule, given = first, given[1:]
        if datamodule is not None and given:
            fn = self._run.fn
            assert fn is not None
            got = f"Got {type(datamodule).__name__} and dataloaders for {' and '.join(given)}."
            raise ConfigurationError(
                f"You cannot pass both dataloaders and a datamodule to `Trainer.{fn.value}`. {got}"
            )
        self._data.attach(module, dataloaders, datamodule)
        if self._run.fits:
            self._eval_loops[RunningStage.VALIDATING].loaders = None  # drop those of an earlier `validate`
        self._connector.select(ckpt_path, model_given=model is not None, weights=weights)
        self._published.begin_run()
        return module

    def _refuse_module_in_training(self, module: Any) -> None:
        """Raise an error if the fit of another Trainer is training the module."""
        other: Any = None
        with suppress(AttributeError, RuntimeError):  # a module without a Trainer raises
            other = module.trainer
        is_other = isinstance(other, pl.Trainer) and other is not self._trainer and other.lightning_module is module
        if is_other and (hook := _hook_of_fit(other)):
            fn = self._run.fn
            assert fn is not None
            called = f"`Trainer.{fn.value}` was called in {hook} with the module that another Trainer was training"
            raise ConfigurationError(f"{called}. Pass a copy of the module: `copy.deepcopy(module)`.")

    # --- in each process of the run ---------------------------------------------------------------------------

    def __call__(self, module: LightningModule, weights_only: bool | None) -> Any:
        """Execute the run in this process. Return the logged metrics of an evaluation, one dict for each dataloader.

        The module must be an argument: a launcher that spawns processes copies the weights for each process only if the
        module is among the arguments.
        """
        trainer = self._trainer
        # set the references again, because a module and a datamodule are pickled without their trainer
        module.trainer = trainer
        if (datamodule := trainer.datamodule) is not None:
            datamodule.trainer = trainer
        fitting, result = self._run.fits, None  # a run that begins in on_train_end changes the Trainer's state
        preparation = self._set_up(module, weights_only)
        if fitting:
            self._check_sanity(preparation)
            self._prepare_fit(preparation)
            steps = trainer.global_step
            with self._signals.saving():
                self._loop.run()
            _ = trainer.fit_loop.done  # logs the reason for the end of the fit
            if 0 < steps == trainer.global_step:
                _report_no_step(trainer, steps)
            if problem := reason_without_updates(trainer):
                rank_zero_info(problem)  # not a warning, because a short trial run may end this way
        else:
            stage, fn = self._run.stage, self._run.fn
            assert stage is not None
            assert fn is not None
            loop, view = self._eval_loops[stage], getattr(trainer, f"{fn.value}_loop")
            distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
            is_gloo = distributed and torch.distributed.get_backend() == "gloo"  # gloo cannot send inference tensors
            preparation.evaluation(stage, inference_mode=view.inference_mode and not is_gloo)
            result = [to_scalars(metrics) for metrics in loop.run()]
        self._release()
        if fitting:
            preparation.hooks.on_fit_end()
            self._loop.resolve_outcome()
        modules.call_teardown_hooks(trainer)
        return result

    # --- before the first batch ------------------------------------------------------------------------------

    def _set_up(self, module: LightningModule, weights_only: bool | None) -> Preparation:
        """Do everything before the first batch, in five phases."""
        self._connect(module)
        self._configure_module(module)
        self._set_up_engine(module, weights_only)
        preparation = self._start_hooks(module)
        self._restore(module, weights_only)
        return preparation

    def _connect(self, module: LightningModule) -> None:
        """Connect the module, its callbacks and the processes to the run."""
        trainer, run, engine = self._trainer, self._run, self._engine
        if run.fits:
            self._loop.limits.fill_in(self._default_max_epochs())
        if trainer.barebones:
            rank_zero_info(
                "`Trainer(barebones=True)` started running. The progress bar is disabled so you might want to manually"
                " print the progress in your model."
            )
        hparams.drop_unpicklable(module)
        engine.connect(module)
        callback_order.attach_model_callbacks(run)
        modules.verify(trainer, module)
        if run.fits:
            modules.reset_results(run, self.session)
        run.log_metric = attach_log(module, run, self.session, barebones=trainer.barebones)
        engine.setup_environment()
        self.stalls = self._watch_for_stalls()

    def _configure_module(self, module: LightningModule) -> None:
        """Download the data, open the loggers, and run ``setup`` and ``configure_model``."""
        trainer = self._trainer
        if self._run.fits and trainer.resume and not trainer.fast_dev_run:
            self._connector.find_newest(self.session)  # before a logger chooses its folder
        modules.set_up_profiler(self._run)
        self._data.connector.prepare_data()
        hide_averages(self._run, self.session)
        defer_copies(self._run, self.session)
        self._connector.keep_rows()
        for logger in defaults.in_opening_order(trainer.loggers):
            _ = getattr(logger, "experiment", None)
        model_checkpoints.claim_folders(self._run, self.session)
        with model_checkpoints.without_needless_warnings(self._run):
            modules.call_setup_hooks(trainer)
        modules.configure_model(trainer)
        self._engine.convert_module()

    def _set_up_engine(self, module: LightningModule, weights_only: bool | None) -> None:
        """Restore the module, wrap it for its devices, create the optimizers, and enter the precision."""
        trainer, run, engine = self._trainer, self._run, self._engine
        if not engine.restores_after_setup:
            self._connector.restore_module_and_callbacks(weights_only)
        if run.fits:
            self._connector.prepare_order()
        for metrics in (self._loop.metrics, *(loop.metrics for loop in self._eval_loops.values())):
            metrics.clear()  # remove the values of an interrupted run or of another module
        tuning.attach_finders(run, self.session)
        attach_averaging(run, self.session)
        engine.setup(fitting=run.fits)
        shard_averages(run, self.session)
        # after the setup, which may replace modules (sync_batchnorm)
        self.session.enter_context(engine.precision.session(module, engine.device))
        if engine.world_size > 1 and engine.device.type == "cpu" and engine.precision.dtype is torch.float16:
            # each rank has measured which float16 kernels are faster
            engine.precision.load_state_dict(engine.collectives.broadcast(engine.precision.state_dict()))
        if run.fits:
            engine.precision.check_optimizers(engine.optimizers)
        if trainer.prefetch_batches and engine.device.type == "cuda":  # other devices have no streams for copies
            self._data.prefetching = Prefetching(engine.device)

    def _start_hooks(self, module: LightningModule) -> Preparation:
        """Look up the hooks of the run, run ``on_fit_start``, and log the hyperparameters."""
        trainer = self._trainer
        if self._run.fits:
            model_checkpoints.attach_savers(trainer, self.session)
        preparation = self.preparation = Preparation(trainer)
        if self._run.fits:
            preparation.hooks.on_fit_start()
            model_checkpoints.attach_savers(trainer, self.session)  # of callbacks that were added
            modules.withdraw_early_stops(self._run, self.session)
            preparation.hooks.follow(trainer.callbacks)
        if trainer.enable_autolog_hparams:
            hparams.log_hyper_parameters(self._run)
        if self._run.fits and trainer.is_global_zero and model_checkpoints.are_written(self._run):
            hparams.announce(module, trainer.datamodule)
        return preparation

    def _restore(self, module: LightningModule, weights_only: bool | None) -> None:
        """Restore the rest of the checkpoint. :meth:`_begin_training` restores the state of this process later."""
        engine = self._trainer.engine
        if engine.restores_after_setup:
            self._connector.restore_module_and_callbacks(weights_only)
        if self._run.fits:
            self.process_state = self._connector.restore_fit()
        self._connector.forget()
        self._signals.register_signal_handlers()
        engine.collectives.barrier("run-stage")
        module.zero_grad()

    def _watch_for_stalls(self) -> StallWatch | None:
        _trainer, run, engine = self._trainer, self._run, self._engine
        if engine.world_size == 1 or not torch.distributed.is_initialized():
            return None
        evaluations = [loop.progress for loop in set(self._eval_loops.values())]
        watch = StallWatch(
            (engine.global_rank, engine.world_size),
            engine.collectives.timeout,
            lambda: (self._progress.batches_started, self._progress.batches, *(e.batches for e in evaluations)),
            lambda frames: diagnosis.whereabouts(frames, run),
            self._folder,
        )
        return self.session.enter_context(watch)

    def _default_max_epochs(self) -> int:
        limits = self._loop.limits
        if limits.max_steps != -1 or find_callback(self._trainer.callbacks, Timer) is not None:
            return -1
        if limits.max_epochs is None:
            advice = "To train without an epoch limit, set `max_epochs=-1`."
            message = f"`max_epochs` was not set. Setting it to 1000 epochs. {advice}"
            rank_zero_warn(message, category=PossibleUserWarning)
        return 1000

    def _check_sanity(self, preparation: Preparation) -> None:
        """Run a few validation batches before training, to find errors in the validation code early."""
        trainer = self._trainer
        state, loop = trainer.state, self._eval_loops[RunningStage.SANITY_CHECKING]
        # as in Lightning, a resumed run skips the check if it resumes inside an epoch or if max_steps is set
        resumes = trainer.ckpt_path is not None and (self._progress.batches_this_epoch or trainer.max_steps != -1)
        if not trainer.enable_validation or not trainer.num_sanity_val_steps or resumes:
            return
        with isolate_rng():  # creating the dataloaders may also draw random numbers
            state.stage, loop.sanity_checking = RunningStage.SANITY_CHECKING, True
            preparation.hooks.on_sanity_check_start()
            preparation.evaluation(RunningStage.VALIDATING, inference_mode=False)
            with averaged(self._run.optimizers):
                loop.run(limit=trainer.num_sanity_val_steps)
            preparation.hooks.on_sanity_check_end()
            state.stage, loop.sanity_checking = RunningStage.TRAINING, False
        self._published.clear()

    def _prepare_fit(self, preparation: Preparation) -> None:
        trainer, scales_loss = self._trainer, self._run.scaler.is_enabled()
        torch.set_grad_enabled(True)
        if not self._loop.limits.ends_fit():
            modules.warn_of_eval_mode(trainer)
            modules.warn_of_gradient_hooks(self._run)
        self._process.begin_fit()
        if trainer.detect_anomaly and not scales_loss:  # with loss scaling, AnomalyDetection does this
            self.session.enter_context(torch.autograd.set_detect_anomaly(True))
        resumes = self.process_state is not None
        preparation.fit(validate=self._validate, begin=self._begin_training, resumes=resumes)
        is_manual = not self._run.is_automatic
        if is_manual:
            count_bare_steps(self._loop, self.session, counts_kept=returned_none(self._loop.optimizers))
        if scales_loss and (is_manual or preparation.hooks.override_of("optimizer_step") is not None):
            refuse_bare_steps(self._loop, self.session)

    def _validate(self) -> None:
        """Run the validation inside a fit."""
        trainer, preparation = self._trainer, self.preparation
        assert preparation is not None
        if not trainer.limit_val_batches:  # a hook has set it to 0
            return
        self._process.begin_validation()
        self._run.stage = RunningStage.VALIDATING
        if self._data.prefetching is not None:
            self._data.prefetching.release_batch()  # free the memory of the last training batch
        if not self._loop.window.is_open and not self._keeps_manual_gradients(preparation):
            preparation.hooks.of_module("on_validation_model_zero_grad")()  # free the memory of the gradients
        loop = self._eval_loops[RunningStage.VALIDATING]
        if self._data.is_due(RunningStage.VALIDATING) or loop.loaders is None:
            preparation.validation()
        loop.progress.begin_epoch(self._progress.epoch)
        training = self._loop.metrics
        updates_before = update_counts(entry.metric for entry in training.entries.values())
        with averaged(self._run.optimizers):
            loop.run()
        self._process.end_validation()
        training.refuse_shared_metrics(updates_before)
        self._loop.limits.restart_validation_clock()
        self._run.stage = RunningStage.TRAINING

    def _keeps_manual_gradients(self, preparation: Preparation) -> bool:
        """Return whether a validation must keep the gradients for a later step of manual optimization.

        Returns False if the module overrides ``on_validation_model_zero_grad``.
        """
        module, loop = self._trainer.lightning_module, self._trainer.loop
        if module.automatic_optimization or preparation.hooks.override_of("on_validation_model_zero_grad") is not None:
            return False
        return not all(map(loop.gradients.are_used, loop.optimizers))

    def _begin_training(self) -> None:
        """Restore the state of this process from the checkpoint. An elastic job without a checkpoint writes one.

        Called after ``on_train_start``. No code may draw random numbers between this call and the next batch.
        """
        trainer, state = self._trainer, self.process_state
        self.process_state = None
        if state is not None:
            add_tracked(trainer.lightning_module, state["tracked"])
        self._run.program = modules.snapshot_of(self._run)
        is_elastic = trainer.resume == "auto" and self._engine.may_change_world_size
        if trainer.ckpt_path is not None:
            resume_averaging(self._run)
            if state is None and self._progress.batches_this_epoch:
                callback_order.resume_accumulation(self._run)
        if state is not None:
            self._process.load(state, stops=trainer.resume == "auto")
            if trainer.resume == "auto" and state["should_stop"] and self._loop.limits.may_stop():
                rank_zero_info(
                    "resume='auto': the run had stopped early (should_stop), so it does not continue. To continue, pass"
                    " its checkpoint to a Trainer without resume='auto':"
                    f" fit(ckpt_path={redaction.text(str(trainer.ckpt_path))!r})."
                )
        elif is_elastic and trainer.ckpt_path is None and (folder := model_checkpoints.first_folder(self._run)):
            # stores the number of samples per optimizer step, for a restart with another number of processes
            trainer.save_checkpoint(f"{folder}/{START}")

    def repeat(self, stage: RunningStage) -> None:
        """Run the loop of ``stage`` from inside a hook, with the current callbacks, limits and dataloaders."""
        preparation = self.preparation = Preparation(self._trainer)
        if stage is RunningStage.TRAINING:
            self._prepare_fit(preparation)
            self._loop.run()
        else:
            loop = self._eval_loops[stage]
            preparation.evaluation(stage, inference_mode=loop.inference_mode)
            loop.run()

    # --- the end ----------------------------------------------------------------------------------------------

    def _release(self) -> None:
        """Release the resources of a run: the device, the module's wrapper, contexts. Safe to call twice."""
        trainer = self._trainer
        if self._run.fn is TrainerFn.PREDICTING:
            loop = self._eval_loops[RunningStage.PREDICTING]
            loop.predictions = move_data_to_device(loop.predictions, torch.device("cpu"))
        if (metrics := trainer.active_metrics) is not None:  # the run was interrupted
            with suppress(ConfigurationError):  # the metrics may be the cause of the error
                self._published.take(metrics.current(on_step=True))
            metrics.end_batch()  # frees the batch
        if self._data.prefetching is not None:
            self._data.prefetching.close()
        self._published.take_to_cpu()
        try:
            self._engine.teardown()  # raises if an asynchronous save has failed
        finally:
            self.session.close()
            self._data.release()
            self._signals.teardown()

    def _folder(self) -> Path | None:
        return folder_of_reports(self._trainer)

    def _fail(self, error: BaseException) -> None:
        """Handle ``error``: notify callbacks, datamodule, strategy and loggers, then release all resources."""
        trainer = self._trainer
        self._run.status.status = TrainerStatus.INTERRUPTED
        try:
            with suppress(Exception):  # report `error`, even if the outcome cannot be read
                self._loop.resolve_outcome()
                use_averages(self._run.optimizers)
            for callback in trainer.callbacks if trainer.lightning_module is not None else ():
                callback.on_exception(trainer, trainer.lightning_module, error)
            if (datamodule := trainer.datamodule) is not None:
                datamodule.on_exception(error)
            trainer.strategy.on_exception(error)
            for logger in trainer.loggers:
                logger.finalize("failed")
        finally:
            if trainer.lightning_module is not None:
                self._release()
            self._eval_loops[RunningStage.SANITY_CHECKING].sanity_checking = False
            self._run.stage = None
