"""Prepare the loops for a run before its first batch, and build the path of a batch: the functions that process it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from trainer.callbacks.gradient_clipping import GradientClipping
from trainer.common import traits
from trainer.common.module_tree import parameters_of
from trainer.data.batches import NO_BATCHES, Loaders, TrainingBatches, Transfer, identity
from trainer.data.unpadded import Span
from trainer.errors import ConfigurationError, rank_zero_warn
from trainer.lightning import modules
from trainer.lightning.base_trainer import TrainerBase
from trainer.lightning.defaults import build_clipping
from trainer.lightning.loader_set import move_training_batch
from trainer.lightning.loaders import DrawnLoaderSet, LoaderSet
from trainer.lightning.profiling import Profiling
from trainer.lightning.views import MonitoredMetrics
from trainer.loop.batch_path import NO_PATH, BatchPath, Clip, ModuleCalls, TrainingPath, TrainingWrapper, wrapped
from trainer.loop.closures import ClosureOptimization, needs_closure, takes_closure
from trainer.loop.evaluation import EvalLoop
from trainer.loop.fit import FitLoop, FitPlan
from trainer.loop.gradients import has_own_zero_grad
from trainer.loop.hooks import Hook, Hooks, HookScope
from trainer.loop.manual_optimization import ManualOptimization
from trainer.loop.optimizers import with_closure
from trainer.loop.overrides import overrides
from trainer.loop.own_batches import draw_in_evaluation, draw_in_fit
from trainer.loop.schedule_free import schedule_free
from trainer.loop.schedules import Schedules
from trainer.state.progress import STARTED


class Preparation:
    """Prepares the loops for one run: hooks, batches, schedules, clipping, the path of a batch, a profiler.

    Args:
        trainer: the Trainer, with its strategy and module set up.

    Attributes:
        hooks: the hooks of callbacks and of the module.
    """

    def __init__(self, trainer: TrainerBase) -> None:
        module = trainer.lightning_module
        self._trainer, self._run, self._engine = trainer, trainer.run_state, trainer.engine
        self._loop, self._data, self._progress = trainer.loop, trainer.data, trainer.progress
        self._module = module
        self._profiling = Profiling.of(self._run)
        self._optimization: FitLoop | ManualOptimization | ClosureOptimization | None = None
        order = traits.reads_epoch_metrics, traits.runs_last
        profile = None if self._profiling is None else self._profiling.hook
        scope = HookScope(module)
        self.hooks = Hooks(trainer, module, trainer.callbacks, scope, overrides, *order, profile, trainer.strategy)

    # --- training ---------------------------------------------------------------------------------------------

    def fit(self, *, validate: Callable[[], None], begin: Callable[[], None], resumes: bool) -> None:
        """Prepare the fit loop.

        Args:
            validate: runs one validation.
            begin: called after ``on_train_start``. Restores this process's state from the checkpoint, if any.
            resumes: whether there is such a state.
        """
        trainer, loop, profiling = self._trainer, self._loop, self._profiling
        # `estimated_stepping_batches` may have created the dataloaders before the checkpoint set the epoch
        loaders = self._data.loaders(RunningStage.TRAINING, recreate=self._data.is_due(RunningStage.TRAINING))
        if loaders is not None:
            if not loaders.num_batches() and not loop.limits.ends_fit() and (name := loaders.first_empty()):
                raise ConfigurationError(f"{name} has no batch.{NO_BATCHES}")
            self.schedule_validation(loaders)
            self._warn_of_missing_rows(loaders)
            self._report_short_windows(loaders)
        saved = self._data.resumed_validation  # whether the saved run had validation dataloaders; None for a new run
        if trainer.enable_validation and (loop.limits.epoch_validates() if saved is None else saved):
            self.validation(renew=saved is None)
        epochs = self._progress.epochs_trained
        batches = TrainingBatches(
            loaders,
            self.renewed_loaders,
            None if profiling is None else profiling.training_epoch,
            # as in Lightning, a second fit of the same Trainer opens another pass
            epochs if trainer.ckpt_path is not None or not epochs else -1,
            self._resized,
        )
        if (resumed := self._data.resumed) is not None:
            self._data.resumed = self._data.resumed_validation = None
            batches.load_state_dict(resumed, exact=trainer.exact_resume)
        loop.prepare(
            hooks=self.hooks,
            batches=batches,
            schedules=Schedules(
                self._engine.schedules,
                self.hooks.of_module("lr_scheduler_step"),
                partial(MonitoredMetrics, trainer),
                revocable=self.hooks.override_of("lr_scheduler_step") is None,  # an override may have other effects
                progress=trainer.progress,
                by_module=not self._module.automatic_optimization,
            ),
            plan=FitPlan(
                build_path=partial(
                    self._build_path, self._transfer(move_training_batch), self._engine.step_function("training_step")
                ),
                follow_changes=partial(self._follow_changes, _set_once(self._module)),
                validates=partial(getattr, trainer, "enable_validation"),
                validate=validate,
                begin=begin,
                resumes=resumes,
            ),
        )
        self._check_counts(loaders)

    def _follow_changes(self, before: dict[str, Any]) -> None:
        """Apply changes of the callbacks, and refuse changes of the module's methods."""
        _refuse_changes(self._module, before)
        for optimizer in schedule_free(self._engine.optimizers):
            optimizer.train()  # also groups that a callback has added
        if self.hooks.follow(self._trainer.callbacks):
            self._loop.take_optimizers()
            loop = self._trainer.eval_loops[RunningStage.VALIDATING]
            if loop.loaders is not None:
                loop.use(self._build_evaluation_paths(loop, loop.loaders))

    def _build_path(self, transfer: Transfer, step: Callable[..., Any]) -> TrainingPath:
        """Build the path of a training batch: our functions or their overrides, and the wrappers around them.

        Args:
            transfer: moves a batch to the device. It stays the same if callbacks or optimizers are exchanged.
            step: the ``training_step``. It also stays the same.
        """
        loop, engine, hooks, profiling = self._loop, self._engine, self.hooks, self._profiling
        optimization = self._optimization = self._choose_optimization()
        zero_grad, strategy_backward = hooks.override_of("optimizer_zero_grad"), engine.override_of("backward")
        clip, norm_type = self._clipping()
        zeroes_as_usual = zero_grad is None and hooks.of("on_before_zero_grad").is_empty
        path = TrainingPath(
            transfer=transfer.__call__,  # calling a method takes a fraction of the time of calling an object
            on_batch_start=hooks.on_train_batch_start,
            forward_context=engine.forward_context("training_step"),
            step=step,
            on_batch_end=hooks.on_train_batch_end,
            train_batch=optimization.train_batch,
            close_window=(optimization if isinstance(optimization, ClosureOptimization) else loop).close_window,
            clears_before_forward=zeroes_as_usual and not any(map(has_own_zero_grad, engine.optimizers)),
            zero_grad=zero_grad,
            add_gradients=loop.run_backward if strategy_backward is None else self._backward_by(strategy_backward),
            scale=engine.gradients.scale if any(map(parameters_of, engine.optimizers)) else identity,
            backward=hooks.override_of("backward") or engine.gradients.backward,
            after_backward=self._after_backward(),
            clip=clip,
            norm_type=norm_type,
            update_weights=loop.update_weights,
        )
        wrappers: list[TrainingWrapper] = []
        if isinstance(loop.batches.loaders, DrawnLoaderSet):
            wrappers.append(partial(draw_in_fit, loop, self._module.automatic_optimization))
        if profiling is not None:
            timed = "backward" if strategy_backward is None else "add_gradients"
            wrappers.append(partial(profiling.watch_fit, hooks.of_module("optimizer_zero_grad"), timed))
        return wrapped(path, wrappers)

    def _backward_by(self, backward: Callable[..., Any]) -> Hook:
        """Return a hook that calls the strategy's ``backward``, which calls the module's ``backward``."""
        loop = self._loop
        return Hook("backward", self.hooks.scope, module=lambda loss: backward(loss, loop.optimizers[0]))

    def _after_backward(self) -> Callable[[], Any]:
        """Return the function that runs ``on_after_backward``, and unscales the gradients first if they may be read.

        That is, if the hook or ``optimizer_step`` is overridden, or in a manual training step. An exception is
        automatic optimization with sharded gradients, because a process without a loss does not run the hook, and
        unscaling may take part in collectives.
        """
        trainer, hook = self._trainer, self.hooks.of("on_after_backward")
        is_read = not self._module.automatic_optimization
        if not (is_read or self._engine.gradients.are_parts):
            is_read = not hook.is_empty or self.hooks.override_of("optimizer_step") is not None
        if is_read and trainer.scaler.is_enabled():
            return partial(_after_unscaling, self._loop, hook)
        return self.hooks.on_after_backward

    def _choose_optimization(self) -> FitLoop | ManualOptimization | ClosureOptimization:
        """Choose the object that runs the batches, for the current optimizers.

        Raises:
            ConfigurationError: if the optimizers have been exchanged inside a batch, and the new ones require a
                different object.
        """
        _trainer, loop, engine, current = self._trainer, self._loop, self._engine, self._optimization
        chosen: FitLoop | ManualOptimization | ClosureOptimization = loop
        if not self._module.automatic_optimization:
            chosen = current or ManualOptimization(loop)
        elif self._needs_closure:
            evaluates_again = any(map(needs_closure, engine.optimizers))
            if isinstance(current, ClosureOptimization) and current.evaluates_again == evaluates_again:
                return current
            optimizer_step = with_closure(self.hooks.of_module("optimizer_step"))
            chosen = ClosureOptimization(loop, optimizer_step, lambda: engine.wrapped_optimizers)
        if chosen is current:
            return chosen
        if current is not None and self._progress.position is STARTED:
            names = ", ".join(type(optimizer).__name__ for optimizer in engine.optimizers)
            problem = (
                f"The optimizers were replaced by {names}, and one of the old or new ones evaluates the loss itself"
            )
            raise ConfigurationError(f"{problem}. Replace them in `on_train_epoch_start` or between two epochs.")
        backward: Callable[..., None] | None = None if engine.override_of("backward") is None else loop.run_backward
        step: Callable[..., Any] | None = None if isinstance(chosen, FitLoop) else chosen.step
        if isinstance(chosen, ManualOptimization):
            backward = chosen.backward
            step = chosen.step if self._profiling is None else self._profiling.action("optimizer_step", chosen.step)
        engine.module_calls = ModuleCalls(backward, step, loop.clip_for_module)
        return chosen

    @property
    def _needs_closure(self) -> bool:
        """Whether the module or the optimizer evaluates the loss through a closure.

        An optimizer that accepts a closure but does not need it gets one only if there is no other optimizer, and no
        scaler has to run between the backward pass and the step.
        """
        if self.hooks.override_of("optimizer_step") or self._engine.override_of("optimizer_step"):
            return True
        _trainer, optimizers = self._trainer, self._engine.optimizers
        allows_closure = len(optimizers) == 1 and not self._run.skips_steps
        return any(takes_closure(o) if allows_closure else needs_closure(o) for o in optimizers)

    def _clipping(self) -> tuple[Clip | None, float]:
        """Return the function that clips the gradients, and the order of the norm that it returns.

        The function is the module's own, or that of the callbacks, which ``gradient_clip_val`` stands for if a program
        has replaced the callbacks. None for neither.
        """
        trainer = self._trainer
        callbacks = [callback for callback in trainer.callbacks if isinstance(callback, GradientClipping)]
        callbacks = callbacks or build_clipping(trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        if not self._module.automatic_optimization:
            return None, 2.0  # the module clips the gradients itself
        if (override := self.hooks.override_of("configure_gradient_clipping")) is not None:
            return partial(_clip_by_module, override, trainer), 2.0
        if not callbacks:
            return None, 2.0
        clippers: list[Clip] = [partial(callback.clip, self._engine.gradients) for callback in callbacks]
        clip = clippers[0] if len(clippers) == 1 else partial(_clip_with_all, clippers)
        return clip, callbacks[0].norm_type

    def renewed_loaders(self) -> LoaderSet | None:
        """Return new training dataloaders for the epoch that begins. None if they are not due to be created again."""
        data = self._data
        if not data.is_due(RunningStage.TRAINING):
            return None
        loaders = data.loaders(RunningStage.TRAINING, recreate=True)
        if loaders is not None:
            self.schedule_validation(loaders)
        self._check_counts(loaders)
        return loaders

    def _resized(self) -> None:
        """Follow a new number of training batches."""
        if isinstance(loaders := self._loop.batches.loaders, LoaderSet):
            self.schedule_validation(loaders, may_refuse=False)
            self._check_counts(loaders)

    def _check_counts(self, loaders: LoaderSet | None) -> None:
        """Refuse uneven inputs if a process that has no more batches cannot take part in the steps of the others.

        Raises:
            ConfigurationError: if the inputs are refused. The message contains the numbers of batches.
        """
        if loaders is None or self._engine.world_size == 1:
            return
        span = loaders.plan.spans[0] if loaders.plan.spans else Span(0, 0)
        reason = self._needs_equal_counts(loaders)
        loaders.on_batch = partial(_share_batch, self._loop, reason, self._data.may_be_empty)
        if span.fewest < span.most and reason is not None:
            raise ConfigurationError(
                f"Got {span.fewest:.0f} to {span.most:.0f} training batches per process. {reason} needs the same number"
                f" in each. Set Trainer(limit_train_batches={span.fewest:.0f}), or divide the data evenly."
            )

    def _needs_equal_counts(self, loaders: LoaderSet) -> str | None:
        """Return the part of the run that needs equal numbers of batches in all processes. None if no part does."""
        if isinstance(loaders, DrawnLoaderSet):
            return "A training_step that draws its own batches"
        if isinstance(self._optimization, ManualOptimization):
            return "Manual optimization"
        if isinstance(self._optimization, ClosureOptimization):
            return "An overridden `optimizer_step`, or an optimizer that evaluates the loss itself,"
        return _module_with_collectives(self._module) if self._engine.supports_uneven_inputs else "DeepSpeed"

    def schedule_validation(self, loaders: LoaderSet, may_refuse: bool = True) -> None:
        """Schedule the validations within an epoch of ``loaders``. Optionally refuse an interval above its length."""
        trainer = self._trainer
        draws = isinstance(loaders, DrawnLoaderSet)
        elastic = self._run.elastic_state
        interval, at_end = (elastic and elastic.interval) or (trainer.val_check_interval, False)
        self._loop.limits.validates_at_end = at_end or draws  # as in Lightning: the interval counts steps
        self._loop.limits.schedule_validation(
            interval,
            loaders.num_batches(),
            loaders.plan.has_length and not draws,
            validates=may_refuse and bool(trainer.limit_val_batches),
        )

    def _warn_of_missing_rows(self, loaders: LoaderSet) -> None:
        num_batches, interval = loaders.num_batches(), self._trainer.log_every_n_steps
        if self._trainer.loggers and 0 < num_batches < interval and not self._trainer.fast_dev_run:
            rank_zero_warn(
                f"The number of training batches ({num_batches}) is smaller than the logging interval"
                f" Trainer(log_every_n_steps={interval}). Set a lower value for log_every_n_steps if you want to see"
                " logs for the training epoch.",
                category=PossibleUserWarning,
            )

    def _report_short_windows(self, loaders: LoaderSet) -> None:
        num_batches, window = loaders.num_batches(), self._loop.window
        if 0 < num_batches < window.batches and not window.straddles_epochs and not self._trainer.fast_dev_run:
            rank_zero_info(
                f"accumulate_grad_batches is {window.batches}, but an epoch ends after {num_batches} batches: no"
                f" optimizer step uses more. Use GradientAccumulation({window.batches}, straddles_epochs=True) to"
                " continue accumulation windows in the next epoch."
            )

    # --- evaluation -------------------------------------------------------------------------------------------

    def evaluation(self, stage: RunningStage, *, inference_mode: bool) -> None:
        """Prepare the loop of ``stage``.

        Args:
            stage: validating, testing or predicting.
            inference_mode: run in ``torch.inference_mode`` instead of ``torch.no_grad``.
        """
        module, loop = self._module, self._trainer.eval_loops[stage]
        has_step = stage is RunningStage.PREDICTING or overrides(module, f"{loop.stage}_step")
        loaders = self._data.loaders(stage) if has_step else None
        if loaders is not None:
            modules.verify_dataloader_idx(module, loop.stage, stage, loaders)
        loop.prepare(
            hooks=self.hooks,
            module=module,
            paths=(NO_PATH,) if loaders is None else self._build_evaluation_paths(loop, loaders),
            loaders=loaders,
            inference_mode=inference_mode,
        )

    def _build_evaluation_paths(self, loop: EvalLoop, loaders: Loaders) -> Sequence[BatchPath]:
        """Build the paths of evaluation batches: our functions or their overrides, and the wrappers around them."""
        engine, hooks = self._engine, self.hooks
        path = BatchPath(
            transfer=self._transfer().__call__,
            on_batch_start=getattr(hooks, f"on_{loop.stage}_batch_start"),
            forward_context=engine.forward_context(loop.step_name),
            step=engine.step_function(loop.step_name),
            on_batch_end=getattr(hooks, f"on_{loop.stage}_batch_end"),
        )
        wrappers: list[Callable[[BatchPath], BatchPath]] = []
        if isinstance(loaders, DrawnLoaderSet):
            wrappers.append(partial(draw_in_evaluation, hooks.scope, loaders))
        if self._profiling is not None:
            wrappers.append(partial(self._profiling.watch_evaluation, loop.stage))
        path = wrapped(path, wrappers)
        several = loaders.is_sequential and len(loaders.limits) > 1
        return [path.of_dataloader(index) for index in range(len(loaders.limits))] if several else [path]

    def validation(self, renew: bool = True) -> None:
        """Prepare the validation inside a fit, with new dataloaders if these are due and ``renew`` is True."""
        data, state = self._data, self._trainer.state
        if data.is_due(RunningStage.VALIDATING):
            outer, state.stage = state.stage, RunningStage.VALIDATING
            data.loaders(RunningStage.VALIDATING, recreate=renew)
            state.stage = outer
        self.evaluation(RunningStage.VALIDATING, inference_mode=False)

    def _transfer(self, move: Callable[[Any, torch.device], Any] = move_data_to_device) -> Transfer:
        """Build the function that moves a batch to the device through the user's transfer hooks."""
        engine, scope = self._engine, HookScope(self._module)
        convert = engine.precision.convert_batch if overrides(engine.precision, "convert_batch") else None

        def hook(name: str) -> Hook | None:
            method = self._data.transfer_hook(name)
            if method is not None and self._profiling is not None:
                method = self._profiling.hook(getattr(method, "__self__", self._module), name, method)
            return None if method is None else Hook(name, scope, module=method)

        transfer: Callable[..., Any] | None = hook("transfer_batch_to_device")
        after = hook("on_after_batch_transfer")
        if (override := engine.override_of("batch_to_device")) is not None:  # it calls both hooks itself
            transfer, after = lambda batch, _, index: override(batch, dataloader_idx=index), None
        if (prefetching := self._data.prefetching) is not None:
            move, transfer = prefetching.around(move), None if transfer is None else prefetching.around(transfer)
        return Transfer(engine.device, convert, move, hook("on_before_batch_transfer"), transfer, after)


_LOOKED_UP_METHODS = (
    "training_step", "validation_step", "backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step",
    "configure_gradient_clipping", "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
)  # fmt: skip
"""The attributes that determine the path of a batch and that a program may set on the module."""


def _set_once(module: LightningModule) -> dict[str, Any]:
    overrides = {name: vars(module).get(name) for name in _LOOKED_UP_METHODS}
    return overrides | {"automatic_optimization": module.automatic_optimization}


def _refuse_changes(module: LightningModule, before: dict[str, Any]) -> None:
    changed = [name for name, value in _set_once(module).items() if value != before[name]]
    if changed:
        raise ConfigurationError(
            f"{type(module).__name__}.{changed[0]} was set during the fit, which keeps using the original: expected it"
            " to be set before, in `setup` or `on_fit_start`. To train in phases, choose inside the method (`if"
            " self.current_epoch < 2`), or call `fit` for each phase."
        )


def _share_batch(loop: FitLoop, needs_equal_counts: str | None, may_be_empty: bool, all_have_batch: bool) -> None:
    """Reduce the values of a single batch over the processes only if all of them have a batch.

    Raises:
        ConfigurationError: if some have no batch, and a part of the run needs one in each process.
    """
    batches = loop.progress.batches_this_epoch
    if not all_have_batch and not batches and not may_be_empty:
        reason = "Each process needs at least one, because metrics are reduced over all. Divide the data evenly."
        raise ConfigurationError(f"A process has no training batch in this epoch, and others have some. {reason}")
    if not all_have_batch and needs_equal_counts is not None:
        limit = f"Set Trainer(limit_train_batches={batches}), or divide" if batches else "Divide"
        raise ConfigurationError(
            f"A process has {batches} training batches in this epoch, and others have more. {needs_equal_counts} needs"
            f" the same number in each. {limit} the data evenly."
        )
    if loop.metrics.shares_steps is not all_have_batch:
        loop.metrics.share_steps(all_have_batch)


def _module_with_collectives(module: nn.Module) -> str | None:
    """Return a part of the module that synchronizes the processes in each training batch. None if no part does."""
    for name, submodule in module.named_modules():
        if isinstance(submodule, nn.SyncBatchNorm) and submodule.training:
            return f"{name!r}, which is a SyncBatchNorm,"
        if isinstance(submodule, Metric) and submodule.dist_sync_on_step:
            return f"The metric {name!r}, with dist_sync_on_step=True,"
    return None


def _after_unscaling(loop: FitLoop, hook: Hook) -> None:
    loop.gradients.scaler.forget_unused()  # gradients that were cleared without a step, as a second closure call does
    for optimizer in loop.optimizers:
        if not loop.gradients.are_used(optimizer):  # otherwise, this backward pass has not changed its gradients
            loop.gradients.unscale_(optimizer)
    hook()
    if not loop.window.is_last:  # the next batch adds scaled gradients
        loop.gradients.scale_again()


def _clip_by_module(clip: Hook, trainer: TrainerBase, optimizer: Optimizer) -> None:
    limit, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    clip.of_module(optimizer, gradient_clip_val=limit, gradient_clip_algorithm=algorithm)


def _clip_with_all(clippers: list[Clip], optimizer: Optimizer) -> Tensor | None:
    norms = [clip(optimizer) for clip in clippers]
    return norms[0]  # before any clipping
