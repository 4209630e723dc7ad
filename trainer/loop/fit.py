"""The training loop: epochs, one batch, one weight update.

Read ``FitLoop.run``, ``train_batch`` and ``update_weights``: they contain all operations from a batch to new weights.

The work that is due after a batch is one method, ``follow_up``, and the progress records its position: a resumed run
calls that method and continues. A checkpoint that listed the outstanding work would make each task a special case. The
state of the process is restored after all ``on_train_start`` hooks, random states last, because set-up, sanity check
and hooks may draw random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainer.data.batches import TrainingBatches, identity
from trainer.loop.accumulation import NOTHING, AccumulationWindow, WeightedMean, loss_in, outputs_of
from trainer.loop.batch_path import NO_PATH, TrainingPath, TrainingWrapper
from trainer.loop.engine_protocol import Engine
from trainer.loop.gradients import total_norm
from trainer.loop.hooks import NO_HOOKS, Hooks
from trainer.loop.schedule_free import use_averages
from trainer.loop.schedules import Schedules
from trainer.metrics.metrics import MetricStore, PublishedMetrics
from trainer.precision.scaler import UpdateOutcome
from trainer.state.outcome import LastUpdate, StepOutcome
from trainer.state.progress import DONE, EPOCH_ENDED, STARTED, TRAINED, VALIDATED, VALIDATING, FitProgress
from trainer.state.stopping import StoppingConditions


@dataclass(frozen=True)
class FitPlan:
    """The functions that the loop gets for one run.

    Args:
        build_path: builds the path of a batch. Called at the start of the run, and again if a callback has replaced
            optimizers or schedules.
        follow_changes: called at the start of each epoch to register changed callbacks and hooks. Default: a no-op.
        validates: returns whether the run has validations, at the start of each epoch. Default: False.
        validate: runs one validation. Default: a no-op.
        begin: called after ``on_train_start``. Restores the state of a checkpoint, if any. Default: a no-op.
        resumes: whether ``begin`` restores a state. Default: False.
    """

    build_path: Callable[[], TrainingPath]
    follow_changes: Callable[[], Any] = identity
    validates: Callable[[], bool] = bool
    validate: Callable[[], None] = identity
    begin: Callable[[], Any] = identity
    resumes: bool = False


class FitLoop:
    """Train a module.

    The arguments live as long as the Trainer. :meth:`prepare` sets the objects of one run.

    Args:
        engine: manages devices and processes, and performs all operations on gradients. Its precision provides the
            autocast context of forward passes.
        window: determines the batches between two optimizer steps.
        progress: counts epochs, batches, optimizer steps and skipped steps.
        published: the metrics that callbacks, progress bars and loggers read.
        limits: the conditions for stopping, validation and logging.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        window: AccumulationWindow,
        progress: FitProgress,
        published: PublishedMetrics,
        limits: StoppingConditions,
    ) -> None:
        self.engine = engine
        self.gradients = engine.gradients
        self.window = window
        self.mean = WeightedMean(window, engine)
        self.progress = progress
        self.published = published
        self.metrics = MetricStore(training=True)
        self.limits = limits
        # the objects of one run
        self.hooks: Hooks = NO_HOOKS
        self.batches = TrainingBatches(None)
        self.optimizers: list[Optimizer] = []  # the engine's own list, without Lightning's wrappers
        self.schedules = Schedules([], identity, dict)
        self.update = LastUpdate()
        self.plan = FitPlan(identity)
        self.path = NO_PATH  # the functions that a batch passes through

    def prepare(self, *, hooks: Hooks, batches: TrainingBatches, schedules: Schedules, plan: FitPlan) -> None:
        """Set the objects of one run.

        Args:
            hooks: the hooks of callbacks and of the module.
            batches: the training data.
            schedules: the learning-rate schedules.
            plan: the functions of the run.
        """
        self.hooks, self.batches, self.schedules, self.plan = hooks, batches, schedules, plan
        self.gradients.scaler.forget_steps()  # an earlier run may have been interrupted in the middle of a step
        self.update, self.path = LastUpdate(), NO_PATH
        self.window.start_run()
        self.mean.start_run()
        self.take_optimizers()

    def restore_outcome(self, outcome: StepOutcome | None, has_updated: bool) -> None:
        """Restore the outcome of the last weight update from a checkpoint.

        Args:
            outcome: the outcome. None before the first update.
            has_updated: whether the last batch made an optimizer step, even a skipped one.
        """
        update, count = self.update, len(self.optimizers)
        update.has_run = has_updated
        if outcome is not None:
            update.outcome = outcome
            update.skipped = tuple(self.optimizers[i] for i in outcome.skipped_optimizers if i < count)

    # --- the path of a batch --------------------------------------------------------------------------------

    def wrap(self, wrapper: TrainingWrapper) -> None:
        """Add a wrapper around the path of a batch, until it is removed or the run ends."""
        self.path = self.path.with_wrappers((*self.path.wrappers, wrapper))

    def unwrap(self, wrapper: TrainingWrapper) -> None:
        """Remove a wrapper. A no-op if it was not added in this run."""
        self.path = self.path.with_wrappers(tuple(other for other in self.path.wrappers if other != wrapper))

    def forward_only(self, path: TrainingPath) -> TrainingPath:
        """Return a path that runs forward passes and their hooks, without training, to update buffers (SWA)."""
        return replace(path, train_batch=self.forward_batch)

    def take_optimizers(self) -> None:
        """Use the engine's current optimizers and schedules, which callbacks may replace during a run."""
        self.resolve_outcome()
        self.optimizers = self.engine.optimizers
        self.schedules.follow(self.engine.schedules, self.optimizers)
        self.path = self.plan.build_path().with_wrappers(self.path.wrappers)

    # --- epochs ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train until the last epoch or the last step, or until ``should_stop`` is set."""
        limits, progress = self.limits, self.progress
        if not self.batches or (limits.fit_is_done() and not self.plan.resumes):
            return
        self.hooks.on_train_start()
        self.plan.begin()
        while progress.batches_this_epoch or not limits.fit_is_done():  # also finishes a resumed epoch
            self.start_epoch()
            for batch, batch_idx, is_last in self.batches:
                self.path.train_batch(batch, batch_idx, is_last)
                del batch  # free its memory for the validation
                if progress.skips_epoch:
                    break
                self.follow_up()
                if limits.epoch_is_done():
                    break
            if self.batches.is_over and not progress.is_last_batch:
                self.end_data_early()
            self.end_epoch()
        self.close_window_early()
        self.count_update()
        use_averages(self.optimizers)  # of schedule-free optimizers
        self.hooks.on_train_end()
        self.resolve_outcome()

    def start_epoch(self) -> None:
        """Start an epoch, or continue one if the run was resumed from a checkpoint inside it."""
        progress = self.progress
        progress.skips_epoch = False
        self.batches.start_epoch(progress.epochs_trained, skip=progress.batches_this_epoch)
        self.plan.follow_changes()
        is_new = progress.batches_this_epoch == 0
        if is_new:
            progress.begin_epoch()
            self.hooks.on_train_epoch_start()
            self.plan.follow_changes()
            self.engine.follow_trained_parameters()
            if self.optimizers is not self.engine.optimizers:
                self.take_optimizers()
            progress.is_last_batch = False
        self.limits.validates_this_epoch = self.plan.validates() and self.limits.epoch_validates()
        self.engine.precision.watch_weights()
        if progress.position is not DONE:
            self.follow_up()
        # before a new epoch, signals have already been handled
        is_done = self.limits.ends_epoch() if is_new else self.limits.epoch_is_done()
        if is_done:
            self.batches.end()

    def end_data_early(self) -> None:
        """Finish the last batch of an epoch if the dataloaders yielded fewer batches than their length.

        The hooks of this batch have already run as if another batch followed.
        """
        progress = self.progress
        progress.is_last_batch, progress.skips_epoch = True, False
        self.resolve_outcome()
        if not self.window.straddles_epochs or self.limits.is_final_epoch():
            self.close_window_early()
        self.schedules.advance("epoch")
        if progress.closing:
            progress.position = TRAINED  # the weights have changed since a validation
            if self.limits.logging_is_due():
                self.published.send(self.metrics.current(on_step=True).logger, progress.updates)
            self.hooks.save_after_batch(None, None, progress.batch_idx)
        self.follow_up()

    def end_epoch(self) -> None:
        """End an epoch: run its hooks, publish its metrics, and step the schedules that monitor them."""
        progress = self.progress
        self.resolve_outcome()
        if not self.window.straddles_epochs:
            self.close_window_early()
        self.count_update()
        if progress.skips_epoch:
            self.schedules.advance("epoch")  # otherwise the last batch did this
        if progress.position is not VALIDATED:  # hooks read a validation metric, not a training metric of its name
            self.published.take(self.metrics.current())
        self.metrics.end_epoch()
        progress.epochs_trained, progress.position = progress.epochs_trained + 1, EPOCH_ENDED
        self.reduce_metrics()  # before hooks that read metrics in one process only, such as those of a progress bar
        self.hooks.on_train_epoch_end()
        self.resolve_outcome()
        self.published.take(self.metrics.current())
        self.published.send(self.metrics.current().logger, progress.updates - 1)
        self.hooks.save_after_epoch()
        if progress.is_last_batch:  # an interrupted epoch does not advance schedules
            self.schedules.advance("epoch", on_plateau=True)
        self.metrics.reset()
        progress.end_epoch()

    def reduce_metrics(self) -> None:
        """Reduce the metrics of the epoch over all processes. Afterwards, reading them runs no collective."""
        if self.engine.world_size > 1:
            self.metrics.align(self.engine.collectives.gather_if_different, self.engine.collectives.reduce)
            self.metrics.current()

    def run_validation(self) -> None:
        """Publish the metrics of training so far, and run a validation."""
        self.resolve_outcome()
        self.published.take(self.metrics.current())
        self.progress.position = VALIDATING
        self.plan.validate()
        self.resolve_outcome()

    # --- one batch ------------------------------------------------------------------------------------------

    def train_batch(self, batch: Any, batch_idx: int, is_last: bool) -> None:
        """Run forward and backward and, if the batch closes a window, the optimizer step."""
        batch = self.start_batch(batch, batch_idx, is_last)
        if self.progress.skips_epoch:
            return
        window, path = self.window, self.path
        if window.is_first and path.clears_before_forward:
            self.free_gradients()
        with self.engine.gradient_sync(window.is_last):
            self.hooks.scope.enter("training_step")
            with path.forward_context():  # forward and loss; never the backward
                output = NOTHING if batch is None else path.step(batch, batch_idx)
            self.hooks.scope.enter(None)
            if window.is_first:
                self.clear_gradients()
            loss = self.share_of(output, may_read_late=True)
            outputs = outputs_of(loss, output)
            del output  # free its memory for the backward pass
            if loss is not None:
                path.add_gradients(loss)
            else:
                self.gradients.backward_without_loss(syncs_gradients=window.is_last)
        if window.is_last and self.mean.close(self.optimizers):
            path.update_weights()
        elif window.is_last and (batch is not None or self.engine.data_parallel_size > 1):
            # no batch of the window has a loss with a weight above 0: count a step, and leave the model unchanged
            self.resolve_outcome()  # hooks of the previous update must see the number of steps before this one
            self.progress.optimizer_steps += len(self.optimizers)
            outputs = outputs and {}  # hooks get no loss
        self.end_batch(outputs, batch, batch_idx)

    def forward_batch(self, batch: Any, batch_idx: int, is_last: bool) -> None:
        """Run the forward pass and its hooks, without training."""
        batch = self.start_batch(batch, batch_idx, is_last)
        if self.progress.skips_epoch:
            return
        loss, _ = loss_in(output := self.run_training_step(batch, batch_idx))
        self.end_batch(outputs_of(loss, output), batch, batch_idx)

    def run_training_step(self, batch: Any, batch_idx: int, nothing: Any = NOTHING) -> Any:
        """Run ``training_step`` under autocast, and return its output, or ``nothing`` if the batch is None.

        May be called inside another hook.
        """
        outer = self.hooks.scope.enter("training_step")  # the outer hook, for example `optimizer_step`
        with self.path.forward_context():
            output = nothing if batch is None else self.path.step(batch, batch_idx)
        self.hooks.scope.enter(outer)
        return output

    def start_batch(self, batch: Any, batch_idx: int, is_last: bool) -> Any:
        """Move the batch to the device, run ``on_train_batch_start``, advance the window, and return the batch."""
        progress, path = self.progress, self.path
        batch = path.transfer(batch)
        progress.batch_idx, progress.is_last_batch, progress.position = batch_idx, is_last, STARTED
        progress.batches_started += 1
        self.update.has_run = False
        self.metrics.begin_batch(batch)
        progress.skips_epoch = batch is not None and path.on_batch_start(batch, batch_idx) == -1
        if progress.skips_epoch:
            progress.is_last_batch = True
        else:
            if self.optimizers is not self.engine.optimizers or self.schedules.configs is not self.engine.schedules:
                self.take_optimizers()
            is_final_epoch = not self.window.straddles_epochs or self.limits.is_final_epoch()
            self.window.advance(self.batches.num_batches - batch_idx, is_last, is_final_epoch)
            self.mean.begin_batch()
        return batch

    def free_gradients(self) -> None:
        """Drop the gradients of the previous window to free their memory for the forward pass."""
        for optimizer in self.optimizers:
            self.gradients.clear(optimizer)

    def clear_gradients(self) -> None:
        """Clear the gradients of the previous window, including those of a skipped step.

        Gradients of a backward pass that ``training_step`` ran itself are also cleared.
        """
        self.progress.zero_grads += 1
        path = self.path
        if path.clears_before_forward:
            self.free_gradients()
            return
        for optimizer in self.optimizers:
            self.hooks.on_before_zero_grad(optimizer)
            if path.zero_grad is not None:
                path.zero_grad(self.progress.epoch, self.progress.batch_idx, optimizer)
            else:
                self.gradients.clear(optimizer)

    def share_of(self, output: Any, *, may_read_late: bool = False) -> Tensor | None:
        """Return the batch's share of the window's mean loss for the backward pass.

        Returns None if the batch has no loss. If ``mean.batch_weight`` is 0, also returns None, or 0 times the loss
        if the engine does not support uneven inputs (DeepSpeed).

        Args:
            output: the return value of ``training_step``.
            may_read_late: whether ``mean.close`` may read the batch's weight after the backward pass if
                ``training_step`` returned it on a device. This avoids a host-device synchronization here. Default:
                False.
        """
        mean = self.mean
        loss, weight = loss_in(output, reads_weight=False)
        if loss is not None and isinstance(weight, Tensor):  # on a device
            if may_read_late and mean.may_read_late():
                return mean.share_late(loss, weight)
            loss, weight = loss_in(output)  # a host-device synchronization
        if mean.batch_weight == 0 and self.engine.supports_uneven_inputs:
            loss = None
        elif mean.batch_weight == 0:  # DeepSpeed needs a backward pass on all ranks; this rank adds zeros
            weight = 0.0
        if loss is None:
            self.gradients.forward_without_loss(has_run=output is not NOTHING)
        return mean.joint_share(loss, weight)

    def run_backward(self, loss: Tensor, run: Callable[[Tensor], None] | None = None) -> None:
        """Scale the loss, and add its gradients to those of the window's earlier batches.

        Args:
            loss: the unscaled loss.
            run: runs the backward pass of the scaled loss. Default: None, for ``self.path.backward``.
        """
        if not self.window.is_first:
            self.gradients.scale_again()  # a no-op unless a hook has unscaled the gradients
        scaled = self.path.scale(loss)
        self.hooks.on_before_backward(scaled)
        (run or self.path.backward)(scaled)
        self.path.after_backward()

    def end_batch(self, outputs: dict[str, Any] | None, batch: Any, batch_idx: int) -> None:
        """Step the schedules, run the hooks after the batch, and log."""
        progress, update, closes_window = self.progress, self.update, self.window.is_last
        progress.batches += 1
        progress.position, progress.closing = TRAINED, closes_window
        if update.unresolved:
            self.resolve_if_due()
        if self.schedules.stepped:
            self.advance_schedules()
        self.path.on_batch_end(outputs, batch, batch_idx)
        if update.stepped:
            self.finish_steps()
            self.resolve_if_due()
        self.metrics.end_batch()
        if closes_window and self.limits.logging_is_due():
            self.published.send(self.metrics.current().logger, progress.updates)
            self.engine.precision.watch_weights()
        self.hooks.save_after_batch(outputs, batch, batch_idx)

    def follow_up(self) -> None:
        """Run a validation if one is due after the batch, then step the schedules that wait for it."""
        progress = self.progress
        if self.limits.validates_this_epoch and self.validation_is_due():
            self.run_validation()
        self.count_update()
        if progress.position is not VALIDATED:
            progress.position = DONE

    def count_update(self) -> None:
        """Count the update of a closed window, and step the plateau schedules. Called after any due validation."""
        if self.progress.closing:
            if self.update.has_run and self.schedules.stepped:
                self.advance_by_step(on_plateau=True)
            self.progress.updates += 1
            self.progress.closing = False

    def validation_is_due(self) -> bool:
        """Return whether a validation follows the current batch. Checkpoints that monitor its metrics wait for it."""
        position = self.progress.position
        if not self.limits.validates_this_epoch or position is VALIDATED:
            return False
        return position is VALIDATING or self.limits.validation_is_due()

    # --- one weight update ----------------------------------------------------------------------------------

    def update_weights(self) -> None:
        """Step every optimizer on the mean gradient of the window."""
        self.resolve_outcome()  # hooks of the previous update must see the weights that it produced
        for optimizer in self.optimizers:
            self.gradients.unscale_(optimizer)  # gradients are unscaled from here on
            self.expose_gradients(optimizer)
            self.gradients.step(optimizer)  # unless the scaler finds a gradient that is not finite
            self.progress.optimizer_steps += 1
        self.finish_update(tuple(range(len(self.optimizers))))

    def expose_gradients(self, optimizer: Optimizer) -> None:
        """Run the hooks on the unscaled, unclipped gradients; then clip them."""
        self.hooks.on_before_optimizer_step(optimizer)
        clip = self.path.clip
        if clip is not None and (norm := clip(optimizer)) is not None:
            self.update.grad_norms[optimizer] = norm

    def clip_for_module(self, optimizer: Optimizer, limit: float, algorithm: str) -> None:
        """Clip gradients for ``LightningModule.clip_gradients``, and unscale them first if necessary."""
        self.begin_step()
        self.gradients.unscale_(optimizer)
        if (norm := self.gradients.clip_(optimizer, limit, algorithm)) is not None:
            self.update.grad_norms[optimizer] = norm

    def finish_update(self, stepped: tuple[int, ...], accumulating: Sequence[Optimizer] = ()) -> None:
        """Update the loss scale once for all optimizers, and take the outcome if it is already on the host.

        Args:
            stepped: the indices of the optimizers that were stepped.
            accumulating: the optimizers with gradients that no step has used yet. Default: none.
        """
        outcome, update = self.gradients.update(accumulating), self.update
        update.unresolved, update.skipped, update.has_run = stepped, (), True
        for index in stepped:
            self.progress.completed_steps[index] += 1
        if outcome is not None:
            self.take_outcome(outcome)

    def begin_step(self) -> None:
        """Resolve the outcome of the last update, unless the module has stepped an optimizer since then."""
        if not self.update.stepped:
            self.resolve_outcome()

    def finish_steps(self) -> None:
        """Update the loss scale once for all optimizer steps of the module since the last update of the scale.

        A no-op if there were none, or while ``update.freezes_scale`` is True.
        """
        update = self.update
        if not update.stepped or update.freezes_scale:
            return
        stepped, update.stepped = update.stepped, []
        ids = {id(optimizer) for optimizer in stepped}
        indices = tuple(i for i, optimizer in enumerate(self.optimizers) if id(optimizer) in ids)
        self.finish_update(indices, [o for o in self.optimizers if not self.gradients.are_used(o)])
        if not indices:  # only optimizers that `configure_optimizers` did not return
            self.resolve_outcome()
            self.progress.has_learned = True
            self.hooks.on_after_optimizer_step(stepped[-1], update.outcome)

    def resolve_if_due(self) -> None:
        """Resolve the outcome at the end of a batch if the epoch's metrics or the loggers need it."""
        if self.update.unresolved and (self.progress.is_last_batch or self.limits.logging_is_due()):
            self.resolve_outcome()

    def resolve_outcome(self) -> None:
        """Read the outcome of the last weight update if it has not been read yet, and call the hooks that need it.

        All code that reads or saves the state of a run calls this method first. This method also finishes optimizer
        steps that the module made in a hook.

        A fused optimizer decides on the device whether to skip the step. Therefore the outcome is read as late as
        possible: before the next update, or when it is needed. By then, the device has usually computed it.
        """
        update = self.update
        if update.stepped:
            self.finish_steps()
        if update.unresolved:
            self.take_outcome(self.gradients.resolve_outcome())

    def take_outcome(self, result: UpdateOutcome) -> None:
        """Count the outcome of the last weight update, confirm or revert schedule steps, and call the hooks."""
        update = self.update
        stepped, update.unresolved = update.unresolved, ()
        skipped, scale, next_scale, nonfinite_loss = result
        update.skipped = skipped
        skipping: tuple[int, ...] = ()
        if skipped:
            skipping = tuple(i for i in stepped if any(self.optimizers[i] is optimizer for optimizer in skipped))
            nonfinite_loss = self.engine.collectives.any_rank(nonfinite_loss)
            self.progress.skipped_steps += 1
            self.progress.nonfinite_losses += nonfinite_loss
            self.progress.completed_steps.subtract(skipping)
        if self.schedules.tentative:
            self.schedules.confirm(except_of=skipped)
        norm = None
        if update.grad_norms:
            norm, update.grad_norms = total_norm(update.grad_norms, self.path.norm_type), {}
        values = bool(skipped), scale, next_scale, norm, stepped, skipping, nonfinite_loss
        outcome = update.outcome = StepOutcome._make(values)
        self.progress.has_learned |= len(skipping) < len(stepped)
        for index in stepped:
            self.hooks.on_after_optimizer_step(self.optimizers[index], outcome)
        self.path.follow_outcome(outcome)

    def advance_schedules(self) -> None:
        """Step the schedules that are due after this batch."""
        if not self.schedules.revocable:
            self.resolve_outcome()
        if self.schedules.by_batch:
            self.schedules.advance("batch")
        if self.update.has_run:
            self.advance_by_step()
        if self.progress.is_last_batch:
            self.schedules.advance("epoch")

    def advance_by_step(self, on_plateau: bool = False) -> None:
        """Step the schedules that follow weight updates. Skipped steps do not advance schedules.

        If the outcome has not been read yet, the schedules step tentatively, so that hooks read the new learning rates.
        :meth:`resolve_outcome` later reverts the schedules of optimizers that skipped the step.
        """
        unknown, skipped = bool(self.update.unresolved), self.update.skipped
        self.schedules.advance("step", on_plateau=on_plateau, except_of=skipped, tentatively=unknown)

    def close_window_early(self) -> None:
        """Update the weights with the batches of an open window, because no other batch follows.

        With several ranks, an engine that does not support uneven inputs (DeepSpeed) discards the window instead.
        """
        window, engine = self.window, self.engine
        if window.is_open and (engine.data_parallel_size == 1 or engine.supports_uneven_inputs):
            window.advance(0, is_last_batch=True)
            self.mean.begin_batch()
            self.update.has_run = False
            self.path.close_window()
            self.resolve_outcome()
            if self.update.has_run:
                self.advance_by_step()
                self.progress.closing = True
        window.reset()

    def close_window(self) -> None:
        """Synchronize the gradients of an open window, and update the weights. All processes must call it together."""
        with self.engine.gradient_sync(True):
            self.share_of(NOTHING)
            self.gradients.backward_without_loss(syncs_gradients=True)
        if self.mean.close(self.optimizers):
            self.path.update_weights()
