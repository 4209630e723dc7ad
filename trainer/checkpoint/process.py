"""Per-process state that a resumed run needs to continue bit-exactly as if it had not been interrupted.

It consists of the random states, the position in the data, the gradients of an open accumulation window, the values
logged in an unfinished epoch, and metric objects. Lightning's format does not contain any of this state. A checkpoint
stores it under ``loops["amp_trainer"]["processes"]``, one dict for each process, in plain containers and tensors, in
the compact form of :mod:`trainer.checkpoint.compact`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from lightning.pytorch.callbacks import EarlyStopping, Timer
from torch import Tensor, nn

from trainer.checkpoint.host_copy import on_host
from trainer.common.module_tree import parameters_of
from trainer.errors import join_first, rank_zero_warn, refuse_inexact, warn
from trainer.loop.closures import needs_closure
from trainer.loop.evaluation import EvalLoop
from trainer.loop.gradients import Gradients, has_own_zero_grad
from trainer.loop.run_state import RunState
from trainer.metrics.metric_objects import MetricObjects, tracked_in
from trainer.metrics.metrics import MetricStore, moved, shared_among
from trainer.state import random_states
from trainer.state.outcome import StepOutcome
from trainer.state.progress import EPOCH_ENDED, STARTED, VALIDATING
from trainer.state.random_states import State
from trainer.state.snapshot import Lost, Snapshot, lost_in, selected
from trainer.state.stopping import EarlyStop

_LOST_AT_SAVE = (
    "The checkpoint lacks values that the run has changed and that cannot be saved: {names}. If the training depends on"
    " them, save and load them in `on_save_checkpoint` and `on_load_checkpoint`; register large tensors as buffers."
)
_REFUSED = {
    "iterator": "The position of an iterator cannot be saved: pass a second dataloader to `fit` in a `CombinedLoader`.",
    "generator": "Create the random generator on the CPU before the training begins.",
    "hook": "The state of a communication hook of DDP is not saved. Use a hook without a state.",
    "weights": "Under DDP, embeddings with max_norm get other weights in each process; the checkpoint has those of the"
    " first. Normalize the rows in the forward pass instead.",
    "buffer": "Create the modules of these buffers before the training begins, such as in configure_model.",
}
"""Reasons why a resume is refused, and their remedies."""


class ProcessState:
    """Save and restore the state of a process.

    Args:
        run: the state of the run.

    Attributes:
        set_by_hooks: the values of these objects that hooks have set in :meth:`restored_for_hooks`, by path and name.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._engine, self._loop, self._progress = run.engine, run.loop, run.progress
        # during a validation: the part of the state from before it
        self._before_validation: State = {}
        self._training_modes: dict[nn.Module, bool] = {}
        self.set_by_hooks: set[tuple[str, str]] = set()
        self._reported: set[Lost] = set()

    def begin_fit(self) -> None:
        """Forget the objects of an earlier fit."""
        self.end_validation()  # an earlier fit may have been interrupted in one
        self._run.program, self._reported = Snapshot(), set()

    @contextmanager
    def restored_for_hooks(self, program: Snapshot, state: State) -> Iterator[None]:
        """Return a context in which the user's objects are restored, for the hooks that load a checkpoint.

        The values that a hook sets are not restored again by :meth:`load`. All others are reset at the exit, because
        the set-up continues with the initial values.

        Args:
            program: the user's objects.
            state: the checkpoint's state of this process.
        """
        # the values that `configure_optimizers` and the strategy read are restored after them
        with program.as_in(program.for_hooks(state.get("program", {})), rewinds=False) as changed:
            yield
        self.set_by_hooks = changed

    def begin_validation(self) -> None:
        """Copy the state before a validation inside a fit, without weights. A run that resumes inside it repeats it."""
        module = self._run.module
        self._before_validation = self._repeated_state()
        self._training_modes = {submodule: submodule.training for submodule in module.modules()}

    def end_validation(self) -> None:
        """Drop the state from before the validation."""
        self._before_validation, self._training_modes = {}, {}

    def _repeated_state(self) -> State:
        """Return the part of the state that a run needs from before a validation, to repeat it."""
        return {
            "rng": random_states.capture(self._engine.device),
            "data": self._loop.batches.state_dict(),
            "seen_batches": {loop.stage: dict(loop.progress.seen_batches) for loop in self._eval_loops},
            "evaluation": self._run.data.evaluation_state(),
            "program": self._program(),
        }

    def dump(self) -> State:
        """Return the state of this process, as it is between two batches."""
        run, engine, loop = self._run, self._engine, self._loop
        before = self._before_validation if self._progress.position is VALIDATING else {}
        repeated = before or self._repeated_state()
        self._report_lost(repeated["program"])
        window = loop.mean.state_dict(is_open=loop.window.is_open and not self._is_in_batch)
        gradients = self._gradients(is_open="size" in window)
        outcome = loop.update.outcome
        state = {
            **repeated,
            "tracked": tracked_in(run.module),
            "metrics": self._logged(),
            "published": self._published(),
            "outcome": [None if outcome is None else list(outcome), loop.update.has_run],
            # a resumed run may have more time
            "should_stop": False if _is_out_of_time(run.callbacks) else self._stop(),
            "window": window,
            "precision": engine.precision.state_dict(),
            "early_stopping": self._early_stopping(),
            "next_forward": engine.next_forward_syncs_buffers,
            "gradients": gradients,
            "used_gradients": self._used_gradients(but=gradients),
            "losses": list(run.scaler.losses) if gradients else [],
        }
        # so that another process can read it
        return state if engine.world_size == 1 else cast(State, on_host(state))

    def load(self, state: dict[str, Any], *, stops: bool) -> None:
        """Restore the state that :meth:`dump` returned, after setup and after all ``on_train_start`` hooks.

        The position in the data is not restored here, because the training batches were moved to it when the run began.

        Args:
            state: the state of this process.
            stops: whether to restore a decision to stop if ``min_epochs`` and ``min_steps`` are met. A decision that
                waits for them is always restored.
        """
        run, engine, loop = self._run, self._engine, self._loop
        limits = loop.limits
        loop.metrics.load_state_dict(
            state["metrics"], self._metrics.by_name.get, engine.collectives.reduce, engine.device
        )
        for name, values in state["published"].items():
            published = {k: moved(v, engine.device) if isinstance(v, Tensor) else v for k, v in values.items()}
            getattr(run.published, name).update(published)
        for evaluation in self._eval_loops:
            evaluation.progress.seen_batches.update(state["seen_batches"].get(evaluation.stage, {}))
        run.data.load_evaluation_state(state["evaluation"])
        outcome, has_updated = state["outcome"]
        loop.restore_outcome(None if outcome is None else StepOutcome(*outcome), has_updated)
        self._restore_window(state["window"])
        engine.precision.load_state_dict(state["precision"])
        self._restore_program(state["program"])
        for callback in self._early_stopping_callbacks:
            if (saved := state["early_stopping"].get(callback.state_key)) is not None:
                callback.load_state_dict({**saved, "patience": callback.patience})
        if not state["next_forward"]:
            engine.skip_next_buffer_sync()
        loop.gradients.load_zeros(self._named_parameters(), state["used_gradients"], loop.optimizers)
        self._restore_gradients(state["gradients"])
        run.scaler.losses = [loss.to(engine.device) for loss in state["losses"]]
        # a stop that waits for `min_epochs` or `min_steps` stays pending
        stop = state["should_stop"]
        if stop and not limits.should_stop and (stops or not limits.may_stop()):
            limits.should_stop = stop if stop is True else EarlyStop.of(stop)
        random_states.restore(state["rng"], engine.device)  # last: the other states may draw

    def convert_states(self, states: list[dict[str, Any]]) -> tuple[dict[str, Any], set[str]]:
        """Convert the states of a run with another number of processes to the state of this process.

        Values that are equal on all processes are taken from the first. Accumulated values are divided among the
        processes. Random generators continue from the saved states; additional processes get derived states.
        The position in the data is not converted here.

        Args:
            states: the states from :meth:`dump` of all saved processes, at the end of an accumulation window.

        Returns:
            The state for :meth:`load`, and the names of metric objects that lose a part of their state.
        """
        engine, first = self._engine, states[0]
        rank, number = engine.global_rank, engine.world_size
        program, lost = self._metrics.shared([state["program"] for state in states], rank, number)
        window = {key: value for key, value in first["window"].items() if key != "shared_unit"}
        if engine.data_parallel_size > 1:
            unit = first["window"].get("shared_unit")
            window["shared_unit"] = window.get("unit", 1.0) if unit is None else unit
        rng = states[rank]["rng"] if rank < len(states) else random_states.derived(first["rng"], rank)
        return {
            **first,
            "rng": rng,
            "metrics": shared_among(number, [state["metrics"] for state in states]),
            "program": program,
            "should_stop": next((stop for state in states if (stop := state["should_stop"])), False),
            "window": window,
        }, lost

    # --- the user's objects -----------------------------------------------------------------------------------

    def _program(self) -> State:
        metrics = self._metrics
        state = self._run.program.read(modes=self._training_modes or None)
        if self._is_in_batch and not self._run.is_automatic:
            for _, values in state.values():
                values.pop(":requires_grad", None)  # `toggle_optimizer` has changed it only for this batch
        stores = [loop.metrics for loop in self._eval_loops] + [self._loop.metrics] * self._ends_epoch
        logged = [metrics.name_of(entry.metric) for store in stores for entry in store.entries.values()]
        reset = metrics.without_updates(but=filter(None, logged))  # these are reset with the other logged values
        names = metrics.states_in_snapshot(reset)
        return selected(state, lambda path, name: name not in names.get(path, ()))

    def _report_lost(self, program: State) -> None:
        """Warn of values that a checkpoint lacks, once for each."""
        unsaved = (*lost_in(program), *self._engine.lost_by_ddp)
        if lost := [value for value in unsaved if value not in self._reported]:
            self._reported.update(lost)
            rank_zero_warn(_LOST_AT_SAVE.format(names=join_first(dict.fromkeys(value.name for value in lost), 5)))

    def _restore_program(self, state: State) -> None:
        """Restore the user's objects, except the values that hooks have set.

        Raises:
            ResumeError: if one of these values would change the run (see ``_REFUSED``), and the resume must be exact.
        """
        lost = [*self._run.program.write(state, skip=self.set_by_hooks), *self._engine.lost_by_ddp]
        self.set_by_hooks = set()
        self._engine.follow_trained_parameters()
        self._metrics.clear_results()
        others = [value for value in lost if value.reason not in _REFUSED]
        if others:
            names = join_first(dict.fromkeys(value.name for value in others), 5)
            warn(
                f"These values of the program are not restored: {names}. All others are. The checkpoint does not have"
                " them, or the program has other objects now. If the training depends on them, save and load them in"
                " `on_save_checkpoint` and `on_load_checkpoint`; register large tensors as buffers."
            )
        for reason, remedy in _REFUSED.items():
            if names := join_first(dict.fromkeys(value.name for value in lost if value.reason == reason), 5):
                problem = f"The run would not continue exactly: {names} cannot be restored."
                refuse_inexact(problem, remedy, exact=self._run.exact_resume)

    # --- metrics, counters, the accumulation window -----------------------------------------------------------

    @property
    def _metrics(self) -> MetricObjects:
        return MetricObjects(self._run.module)

    @property
    def _ends_epoch(self) -> bool:
        """Whether the values logged in the epoch are about to be reset."""
        return self._progress.position is EPOCH_ENDED

    def _logged(self) -> State:
        store = MetricStore(training=True) if self._ends_epoch else self._loop.metrics
        return store.state_dict(self._metrics.name_of)

    def _published(self) -> State:
        return {
            name: {k: v for k, v in getattr(self._run.published, name).items() if isinstance(v, (Tensor, int, float))}
            for name in ("callback", "logged", "progress_bar")
        }

    @property
    def _is_in_batch(self) -> bool:
        """Whether a resumed run repeats the current batch, without the earlier batches of its window."""
        return self._progress.position is STARTED

    def _restore_window(self, state: State) -> None:
        """Restore the window.

        Raises:
            ResumeError: if an optimizer evaluates its earlier batches again (LBFGS), and the resume must be exact.
        """
        loop = self._loop
        if "size" in state and any(map(needs_closure, loop.optimizers)):
            refuse_inexact(
                "The checkpoint was written inside an accumulation window, and the optimizer evaluates the earlier"
                " batches of the window again. They are not saved.",
                "Resume from a checkpoint that was written between two windows.",
                exact=self._run.exact_resume,
            )
        loop.mean.load_state_dict(state)
        self._engine.check_accumulation(loop.window.batches)

    def _stop(self) -> bool | list[str]:
        """Return ``should_stop``, or the keys of the callbacks that may withdraw their requests."""
        stop = self._loop.limits.should_stop
        return sorted(stop.callbacks) if isinstance(stop, EarlyStop) else bool(stop)

    @property
    def _early_stopping_callbacks(self) -> list[EarlyStopping]:
        return [callback for callback in self._run.callbacks if isinstance(callback, EarlyStopping)]

    def _early_stopping(self) -> State:
        """Return the states of the callbacks, because a training metric may differ between processes."""
        callbacks = self._early_stopping_callbacks if self._engine.world_size > 1 else []
        return {callback.state_key: callback.state_dict() for callback in callbacks}

    @property
    def _eval_loops(self) -> set[EvalLoop]:
        return set(self._run.eval_loops.values())

    # --- parameters and gradients -----------------------------------------------------------------------------

    def _named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all parameters that may have gradients, with the names of their gradients in a checkpoint.

        Optimizers may train parameters that are not the module's, such as those of modules in a plain list.
        """
        engine, named = self._engine, dict(self._run.module.named_parameters())
        yield from named.items()
        known, number = set(map(id, named.values())), 0
        for optimizer in engine.optimizers if engine.exposes_gradients else ():  # others may hold flat copies
            for parameter in parameters_of(optimizer):
                if id(parameter) not in known:
                    yield f"outside parameter {number}", parameter
                    number += 1

    def _gradients(self, *, is_open: bool) -> dict[str, Tensor]:
        """Return the gradients that no optimizer step has used yet; {} inside a batch, which will be repeated.

        In automatic optimization these are the gradients of an open window, and all gradients if the module overrides
        ``optimizer_zero_grad``, which may keep them. A module that steps its optimizers itself may accumulate gradients
        over any number of batches; those that a step has used are left out.
        """
        loop, waiting = self._loop, []
        keeps = loop.path.zero_grad is not None and self._engine.exposes_gradients
        if self._is_in_batch:
            pass  # the batch is repeated
        elif not self._run.is_automatic:
            waiting = [optimizer for optimizer in loop.optimizers if not loop.gradients.are_used(optimizer)]
        elif loop.gradients.are_parts:
            waiting = loop.optimizers if is_open else []  # may also be from batches of the other processes
        elif keeps or (is_open and loop.mean.backwards):
            waiting = loop.optimizers
        gradients: Gradients = loop.gradients
        return gradients.state_dict(self._named_parameters(), waiting)

    def _used_gradients(self, but: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the other gradients that exist, if ``zero_grad`` may set them to 0 instead of None.

        Optimizers leave a parameter without a gradient unchanged, but apply momentum and weight decay with one of 0.
        """
        loop, module = self._loop, self._run.module
        keeps = not module.automatic_optimization or any(map(has_own_zero_grad, loop.optimizers))
        is_whole = self._engine.exposes_gradients and not loop.gradients.are_parts
        if not (keeps and is_whole) or self._is_in_batch:
            return []
        return loop.gradients.names(p for p in self._named_parameters() if p[0] not in but)

    def _restore_gradients(self, state: dict[str, Tensor]) -> None:
        gradients = self._loop.gradients
        parameters = list(self._named_parameters())
        if self._engine.collectives.any_rank(not gradients.can_load(parameters, state)):
            problem = (
                "The checkpoint has gradients that no optimizer step has used, and another strategy saved them: this"
                " one holds other parts of the parameters."
            )
            refuse_inexact(problem, "Resume with the strategy of the saved run.", exact=self._run.exact_resume)
            state = {}
        gradients.load_state_dict(parameters, state)


def _is_out_of_time(callbacks: Iterable[Any]) -> bool:
    """Return whether ``max_time`` has passed: a fit then stops because of the time, not because of its results."""
    timer = next((callback for callback in callbacks if isinstance(callback, Timer)), None)
    left = None if timer is None else timer.time_remaining()
    return left is not None and left <= 0
