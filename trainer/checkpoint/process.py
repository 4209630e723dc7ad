"""Per-process state that a resumed run needs to continue bit-exactly as if it had not been interrupted.

It consists of the random states, the position in the data, the gradients of an open accumulation window, the values
logged in an unfinished epoch, and metric objects. Lightning's format does not contain any of this state. A checkpoint
stores it under ``loops["amp_trainer"]["processes"]``, one entry for each process, in plain containers and tensors, in
the compact form of :mod:`trainer.checkpoint.compact`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from trainer.checkpoint import buffers, modes
from trainer.checkpoint.plain import plain_numbers
from trainer.checkpoint.snapshot import on_host
from trainer.engine import communication
from trainer.engine.gradients import Gradients
from trainer.engine.optimizer_calls import has_own_zero_grad
from trainer.engine.optimizer_states import keep_dtypes
from trainer.errors import ResumeError, join_first, refuse_inexact, warn
from trainer.loops.closures import ClosureOptimization
from trainer.module_tree import parameters_of
from trainer.state import random_states
from trainer.state.metric_objects import MetricObjects
from trainer.state.metrics import MetricStore, shared_among
from trainer.state.outcome import StepOutcome
from trainer.state.program import ProgramState
from trainer.state.random_states import State

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class ProcessState:
    """Save and restore the state of a process.

    Args:
        trainer: the Trainer.

    Attributes:
        program: the attributes of modules and callbacks, since ``on_train_start``, which a resumed run calls, too.
        kept_batches: stores the batches of an open window for an optimizer that evaluates them again; otherwise None.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.kept_batches: ClosureOptimization | None = None
        # parts of the state, and the counts of updates of the metric objects; {} before the first validation
        self._before_validation: State = {}
        self._first_modes: modes.Modes = {}
        self._first_dtypes: buffers.Dtypes = {}  # dtypes of buffers
        self._first_numbers: list[communication.State] = []
        self.program = ProgramState()
        self._training_modes: modes.Modes = {}

    def begin_fit(self) -> None:
        """Record the modes and dtypes at the beginning of the run, because a checkpoint contains only changes."""
        self.program = ProgramState()  # without the attributes of an earlier fit
        self._first_modes = modes.modes_of(self._trainer.lightning_module)
        self._first_dtypes = buffers.dtypes_of(self._trainer.lightning_module)
        communicates = self._trainer.engine.communication
        self._first_numbers = [] if communicates is None else communication.numbers_of(communicates.holders)

    def begin_validation(self) -> None:
        """Record the state before a validation inside a fit. A run that resumes inside the validation repeats it."""
        trainer = self._trainer
        self._training_modes = modes.modes_of(trainer.lightning_module)
        metrics = MetricObjects(trainer.lightning_module)
        self._before_validation = {
            "counts": metrics.counts(),
            "rng": random_states.capture(trainer.engine.device),
            "data": trainer.loop.batches.state_dict(),  # the datasets may share generators
            "metric_objects": metrics.state_dict(copies=True),
            "seen_batches": self._seen_batches(),
            "evaluation": trainer.data.evaluation_state(),
            "program": self.program.read(),
            "module_numbers": self.program.module_numbers.read(),
        }

    def dump(self) -> dict[str, Any]:
        """Return the state of this process, as it is between two batches."""
        trainer, loop = self._trainer, self._trainer.loop
        engine = trainer.engine
        progress, window = loop.progress, loop.window
        metrics = MetricObjects(trainer.lightning_module)
        is_over = progress.epochs_trained > progress.epoch  # the values logged in the epoch are about to be reset
        loops = [one for _, one in self._eval_loops()] + [loop] * is_over
        logged = [metrics.name_of(entry.metric) for one in loops for entry in one.metrics.entries.values()]
        unfinished = {name for name in logged if name is not None}  # reset together with the other logged values
        before = dict(self._before_validation) if progress.owes_validation else {}
        updates = before.pop("counts", metrics.counts())
        changed = {name for name, count in metrics.counts().items() if count != updates.get(name)}
        objects = metrics.state_dict(without=unfinished | changed)
        objects |= {name: own for name, own in before.get("metric_objects", {}).items() if name in changed - unfinished}
        outcome = loop.outcome
        state: dict[str, Any] = {
            "rng": random_states.capture(engine.device),
            "data": loop.batches.state_dict(),
            "metrics": (MetricStore(training=True) if is_over else loop.metrics).state_dict(metrics.name_of),
            "published": {
                name: {k: v for k, v in getattr(trainer.published, name).items() if isinstance(v, (Tensor, int, float))}
                for name in ("callback", "logged", "progress_bar")
            },
            "seen_batches": self._seen_batches(),
            "evaluation": trainer.data.evaluation_state(),
            "has_updated": loop.has_updated,
            "outcome": None if outcome is None else list(outcome),
            "should_stop": loop.limits.should_stop and not trainer.is_out_of_time,  # a resumed run may have more time
            "window": window.state_dict(before_batch=window.in_batch and not loop.has_updated),
            "modes": self._modes(),
            "precision": engine.precision.state_dict(),
            "program": self.program.read(),
            "module_numbers": self.program.module_numbers.read(),
            "outside_modules": self.program.outside_modules.read(copies=engine.world_size == 1),
            "outside_parameters": [parameter.detach() for parameter in self._outside_parameters()],
            "stateful": self._own_states(),
            **self._buffers(),
            **self._communication(),
            **before,
            "metric_objects": objects,
        }
        is_open = "size" in state["window"]
        state["gradients"] = self._gradients(is_open)
        state["used_gradients"] = self._used_gradients(state["gradients"])
        losses = loop.gradients.scaler.losses if state["gradients"] else []
        state["losses"] = losses[: state["window"]["backwards"]] if is_open else list(losses)
        if is_open and self.kept_batches is not None:
            state["kept_batches"] = self.kept_batches.state_dict()
        if engine.world_size == 1:
            return state
        state["next_forward_exchanges"] = engine.next_forward_syncs_buffers
        # a training metric may differ between processes, and the checkpoint otherwise has the callbacks of rank 0
        state["early_stopping"] = {one.state_key: one.state_dict() for one in trainer.early_stopping_callbacks}
        copied: dict[str, Any] = on_host(state)  # so that another process can read it
        return copied

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
        engine, first = self._trainer.engine, states[0]
        if any("weights" in state.get("communication", {}) for state in states):
            raise ResumeError("each process had its own weights: save after they are averaged")
        rank, number = engine.global_rank, engine.world_size
        objects, lost = MetricObjects(self._trainer.lightning_module).shared(
            [state["metric_objects"] for state in states], rank, number
        )
        window = {key: value for key, value in first["window"].items() if key != "shared_unit"}
        if engine.data_parallel_size > 1:
            unit = first["window"].get("shared_unit")
            window["shared_unit"] = window.get("unit", 1.0) if unit is None else unit
        own = states[rank]["rng"] if rank < len(states) else random_states.derived(first["rng"], rank)
        return {
            **first,
            "rng": own,
            "metrics": shared_among(number, [state["metrics"] for state in states]),
            "metric_objects": objects,
            "communication": {**first.get("communication", {}), "keeps_buckets": False},
            "should_stop": any(state["should_stop"] for state in states),
            "window": window,
        }, lost

    def load(self, state: dict[str, Any], *, stops: bool) -> None:
        """Restore the state that :meth:`dump` returned, after setup and after all ``on_train_start`` hooks.

        The position in the data is not restored here, because the training batches were moved to it when the run began.

        Args:
            state: the state of this process.
            stops: whether to restore a decision to stop if ``min_epochs`` and ``min_steps`` are met. A decision that
                waits for them is always restored.
        """
        trainer, loop = self._trainer, self._trainer.loop
        engine = trainer.engine
        device, metrics = engine.device, MetricObjects(trainer.lightning_module)
        metrics.load_state_dict(state["metric_objects"], device)
        loop.metrics.load_state_dict(state["metrics"], metrics.by_name.get, engine.reduce, device)
        for name, values in state["published"].items():
            published = getattr(trainer.published, name)
            published.update({k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()})
        for name, one in self._eval_loops():
            one.progress.seen_batches.update(state["seen_batches"].get(name, {}))
        trainer.data.load_evaluation_state(state.get("evaluation", {}))
        outcome = state["outcome"]
        loop.restore_outcome(None if outcome is None else StepOutcome(*outcome), state["has_updated"])
        # a stop that waits for `min_epochs` or `min_steps` stays pending
        loop.limits.should_stop |= state["should_stop"] and (stops or not loop.limits.may_stop())
        loop.window.load_state_dict(state["window"], device)
        engine.check_accumulation(loop.window.batches)
        engine.precision.load_state_dict(state.get("precision", {}))
        modes.restore(trainer.lightning_module, state.get("modes", {}))
        engine.follow_trained_parameters()
        self._restore_buffers(state)
        self._restore_outside_parameters(state.get("outside_parameters", []))
        self._restore_own_states(state.get("stateful", []))
        # older checkpoints do not have these
        problems = self.program.write(state.get("program", []))
        problems.append(self.program.module_numbers.write(state.get("module_numbers", {})))
        problems.append(self.program.outside_modules.write(state.get("outside_modules", {})))
        for problem in problems:
            if problem:
                warn(problem)
        self._restore_communication(state.get("communication", {}))
        for callback in trainer.early_stopping_callbacks:
            if (own := state.get("early_stopping", {}).get(callback.state_key)) is not None:
                callback.load_state_dict({**own, "patience": callback.patience})
        if not state.get("next_forward_exchanges", True):
            engine.skip_next_buffer_sync()
        loop.gradients.load_zeros(self._named_parameters(), state.get("used_gradients", ()), loop.optimizers)
        self._restore_gradients(state["gradients"])
        loop.gradients.scaler.losses = [loss.to(device) for loss in state.get("losses", ())]
        if self.kept_batches is not None and (saved_batches := state.get("kept_batches")) is not None:
            self.kept_batches.load_state_dict(saved_batches, device, exact=trainer.exact_resume)
        random_states.restore(state["rng"], device)

    def _modes(self) -> modes.Modes:
        """Return the changes of the module's modes, as they are between two batches."""
        module, progress = self._trainer.lightning_module, self._trainer.loop.progress
        if not self._first_modes:
            return {}
        validates = not progress.is_followed_up and (progress.owes_validation or progress.has_validated)
        changed = modes.changes(self._training_modes if validates else modes.modes_of(module), self._first_modes)
        if not progress.is_trained and not module.automatic_optimization:
            changed["requires_grad"] = {}  # `toggle_optimizer` has changed it only for this batch
        return changed

    def _buffers(self) -> dict[str, Any]:
        """Return the buffers of this process that are not elsewhere in the checkpoint.

        The state dict in the checkpoint is that of rank 0, without non-persistent buffers. The state dicts of weight
        averages do not have them either.
        """
        trainer = self._trainer
        own = buffers.buffers_of(trainer.lightning_module, persistent=trainer.engine.global_rank > 0)
        averages = {place: buffers.buffers_of(average, persistent=False) for place, average in self._averages()}
        return {
            "buffers": own,
            "buffer_dtypes": buffers.changed_dtypes(own, self._first_dtypes),
            "average_buffers": {place: values for place, values in averages.items() if values},
        }

    def _restore_buffers(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`_buffers`. Checkpoints of older versions have only a part of it, or nothing.

        Raises:
            ResumeError: if the module that owns a buffer does not exist, and the resume must be exact.
        """
        trainer = self._trainer
        module, device = trainer.lightning_module, trainer.engine.device
        if "buffers" not in state:
            return
        missing = buffers.restore(module, state["buffers"], state.get("buffer_dtypes", {}), self._first_dtypes, device)
        averages = state.get("average_buffers", {})
        for place, average in self._averages():
            if place in averages:
                buffers.restore(average, averages[place], {}, buffers.dtypes_of(average), device)
        if not missing:
            return
        problem = (
            f"The checkpoint has the non-persistent buffers {join_first(missing, 5)}, but {type(module).__name__} does"
            " not have the modules that own them: the run would not continue exactly."
        )
        advice = "Create these modules before training begins, such as in configure_model."
        refuse_inexact(problem, advice, exact=trainer.exact_resume)

    def _named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all parameters that may have gradients, with the names of their gradients in a checkpoint."""
        yield from self._trainer.lightning_module.named_parameters()
        for number, parameter in enumerate(self._outside_parameters()):
            yield f"outside parameter {number}", parameter

    def _outside_parameters(self) -> list[Tensor]:
        """Return the optimizers' parameters that are not the module's, such as those of modules in a plain list.

        The state dict of the module does not have them.
        """
        engine, module = self._trainer.engine, self._trainer.lightning_module
        if not engine.exposes_gradients:  # the optimizer may hold flat copies of the module's parameters
            return []
        own = set(map(id, module.parameters()))
        held = (parameter for optimizer in engine.optimizers for parameter in parameters_of(optimizer))
        return [parameter for parameter in held if id(parameter) not in own]

    def _restore_outside_parameters(self, saved: list[Tensor]) -> None:
        """Restore the result of :meth:`_outside_parameters`. Checkpoints of older versions do not have it.

        Raises:
            ResumeError: if the shapes of these parameters have changed, and the resume must be exact.
        """
        current = self._outside_parameters()
        if [one.shape for one in current] == [one.shape for one in saved]:
            with torch.no_grad():
                for parameter, value in zip(current, saved, strict=True):
                    parameter.copy_(value)
        elif saved:
            shapes = [[tuple(one.shape) for one in tensors] for tensors in (saved, current)]
            problem = (
                "The optimizers update parameters that are not the module's. The checkpoint has such parameters with"
                f" the shapes {shapes[0]}, but they have the shapes {shapes[1]} now."
            )
            refuse_inexact(f"{problem} They are not restored.", exact=self._trainer.exact_resume)

    def _own_states(self) -> list[list[Any]]:
        """Return the class and the state of each optimizer, schedule and loss scaler that the user's objects step.

        A state is None if it cannot be loaded safely, or if this process has only a part of it.
        """
        engine = self._trainer.engine
        own: list[list[Any]] = []
        if not engine.exposes_gradients:  # the engine wraps the optimizers in attributes
            return own
        for one in self.program.stateful:
            offences: list[tuple[str, Any]] = []
            state = plain_numbers(one.state_dict(), "", offences)
            own.append([type(one).__name__, None if offences or engine.gradients.are_parts else state])
        return own

    def _restore_own_states(self, saved: list[list[Any]]) -> None:
        """Restore the result of :meth:`_own_states`. Checkpoints of older versions do not have it."""
        objects, lost = self.program.stateful, []
        are_same = [name for name, _ in saved] == [type(one).__name__ for one in objects]
        for number, (name, state) in enumerate(saved):
            if state is None or not are_same:
                lost.append(name)
                continue
            with keep_dtypes([objects[number]], [state], {}):
                objects[number].load_state_dict(state)
        if lost:
            warn(
                f"The states of these objects in attributes are not restored: {join_first(lost, 5)}. If the training"
                " depends on them, return them from `configure_optimizers`, or save and load them in"
                " `on_save_checkpoint` and `on_load_checkpoint`."
            )

    def _communication(self) -> dict[str, Any]:
        """Return the state of communication hooks and averagers, and weights that differ from those of rank 0.

        With post-local SGD, the weights of processes differ between two averaging steps.
        """
        trainer, engine = self._trainer, self._trainer.engine
        communicates = engine.communication
        if communicates is None:
            return {}
        state: dict[str, Any] = {
            "states": communication.state_of(communicates.holders, self._first_numbers),
            "keeps_buckets": communicates.keeps_buckets,
        }
        if communicates.may_diverge and engine.world_size > 1:
            own = {
                "weights": dict(trainer.lightning_module.named_parameters()),
                "optimizers": [optimizer.state_dict() for optimizer in engine.optimizers],
                "averages": {place: average.state_dict() for place, average in self._averages()},
            }
            differ = len(engine.gather_if_different(communication.digest([own]))) > 1
            state |= own if differ and engine.global_rank else {}
        return {"communication": state}

    def _restore_communication(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`_communication`.

        Raises:
            ResumeError: if the run would not continue exactly, although the resume must be exact.
        """
        trainer, engine = self._trainer, self._trainer.engine
        module, communicates = trainer.lightning_module, engine.communication
        if "weights" in state:
            parameters, weights = dict(module.named_parameters()), state["weights"]
            with torch.no_grad():
                for name in parameters.keys() & weights.keys():
                    parameters[name].copy_(weights[name])
            saved: dict[Tensor, torch.dtype] = {
                parameters[name]: value.dtype for name, value in weights.items() if name in parameters
            }
            engine.load_optimizer_states({"optimizer_states": state["optimizers"]}, saved)
            for place, average in self._averages():
                if place in state["averages"]:
                    average.load_state_dict(state["averages"][place])
        problems = communication.load(
            [] if communicates is None else communicates.holders,
            self._first_numbers,
            state.get("states", []),
            same_buckets=communicates is not None and communicates.keeps_buckets and state.get("keeps_buckets", False),
            device=engine.device,
        )
        if not problems:
            return
        problem = f"The run would not continue exactly: {join_first(problems, 3, separator='; ')}."
        advice = (
            "DDP rebuilds its buckets after the first backward pass, unless the run trains from the beginning with"
            " DDPStrategy(find_unused_parameters=True). A value is saved if its state has a state_dict() and a"
            " load_state_dict()."
        )
        refuse_inexact(problem, advice, exact=trainer.exact_resume)

    def _averages(self) -> Iterator[tuple[str, AveragedModel]]:
        """Yield the weight averages of callbacks, each with a name."""
        for callback in self._trainer.callbacks:
            for name, value in vars(callback).items():
                if isinstance(value, AveragedModel):
                    yield f"{callback.state_key}.{name}", value

    def _gradients(self, is_open: bool) -> dict[str, Tensor]:
        """Return the gradients that no optimizer step has used yet, without those of a batch that will be repeated.

        In automatic optimization these are the gradients of an open window, and all gradients if the module overrides
        ``optimizer_zero_grad``, which may keep them. A module that steps its optimizers itself may accumulate gradients
        over any number of batches; those that a step has used are left out.

        Args:
            is_open: whether the accumulation window is saved as an open one.
        """
        trainer, loop = self._trainer, self._trainer.loop
        window, waiting = loop.window, []
        if not trainer.lightning_module.automatic_optimization:
            if not window.in_batch:
                waiting = [optimizer for optimizer in loop.optimizers if not loop.gradients.are_used(optimizer)]
        elif window.in_batch and window.has_added_gradients:
            if is_open:
                warn(
                    f"A checkpoint was saved inside batch {loop.progress.batch_idx} of epoch"
                    f" {loop.progress.epochs_trained}, after its gradients were added to those of earlier batches of"
                    " its accumulation window. A run that resumes from it loses the gradients of the window's earlier"
                    " batches. Save in on_train_batch_start or on_train_batch_end instead, which keep them."
                )
        elif loop.gradients.are_parts:
            waiting = loop.optimizers if is_open else []  # may also be from batches of the other processes
        elif (is_open and window.backwards) or (loop.path.zero_grad is not None and trainer.engine.exposes_gradients):
            waiting = loop.optimizers
        gradients: Gradients = loop.gradients
        return gradients.state_dict(self._named_parameters(), waiting)

    def _used_gradients(self, saved: Container[str]) -> list[str]:
        """Return the names of the other gradients that exist, if ``zero_grad`` may set them to 0 instead of None.

        Optimizers leave a parameter without a gradient unchanged, but apply momentum and weight decay with one of 0.
        """
        loop, module = self._trainer.loop, self._trainer.lightning_module
        keeps = not module.automatic_optimization or any(map(has_own_zero_grad, loop.optimizers))
        is_whole = self._trainer.engine.exposes_gradients and not loop.gradients.are_parts
        if not (keeps and is_whole) or loop.window.in_batch:
            return []
        return loop.gradients.names(p for p in self._named_parameters() if p[0] not in saved)

    def _restore_gradients(self, state: dict[str, Tensor]) -> None:
        trainer, gradients = self._trainer, self._trainer.loop.gradients
        parameters = list(self._named_parameters())
        if trainer.engine.any_rank(not gradients.can_load(parameters, state)):
            problem = (
                "The checkpoint has gradients that no optimizer step has used, and another strategy saved them: this"
                " one holds other parts of the parameters."
            )
            refuse_inexact(problem, "Resume with the strategy of the saved run.", exact=trainer.exact_resume)
            state = {}
        gradients.load_state_dict(parameters, state)

    def _seen_batches(self) -> dict[str, dict[int, int]]:
        return {name: dict(one.progress.seen_batches) for name, one in self._eval_loops()}

    def _eval_loops(self) -> Iterator[tuple[str, Any]]:
        return ((loop.stage, loop) for loop in set(self._trainer.eval_loops.values()))
