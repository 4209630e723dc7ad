"""Record training batches with the state that a replay needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.loops.accumulation import AccumulationWindow
from trainer.loops.batch_path import TrainingPath
from trainer.postmortem.state import BufferState, ObjectState
from trainer.state import random_states

if TYPE_CHECKING:
    from trainer.trainer import Trainer


class RecordedBatch(NamedTuple):
    """One batch, and the state just before its ``training_step``.

    Attributes:
        batch: the batch on the device, by reference.
        batch_idx: index of the batch in the epoch, zero-based.
        step: ``trainer.global_step`` before the batch.
        window: copy of the accumulation window, which weights the loss.
        random_state: states of all random generators (``trainer.state.random_states.capture``).
        state: state of the module, or of its buffers. None if it is not recorded for each batch.
        has_loss: whether ``training_step`` has returned a loss.
    """

    batch: Any
    batch_idx: int
    step: int
    window: AccumulationWindow
    random_state: dict[str, Any]
    state: ObjectState | BufferState | None = None
    has_loss: bool = True


class Recorder:
    """Record the batches of a weight update until its outcome is known.

    The recorder wraps the step in the path of a batch, so a run without a recorder has no overhead. It records the
    state before the forward pass, after all ``on_train_batch_start`` hooks.

    The outcome of an update may be read after the next window has run. Therefore windows are numbered by the updates
    since the start of the recording, and :meth:`take` is called once for each outcome.

    Args:
        trainer: the Trainer.
        from_step: first ``global_step`` to record. Default: 0.
        parameters: whether to record the weights with each batch. They are needed for updates that were not skipped,
            because these have changed the weights when the outcome is known. Default: False.
        every_step: whether to record less, because every step of a run is recorded: of the state only the
            floating-point buffers before each window. Default: False.
        keeps_batches: whether to record the batches and random states. Default: True.
    """

    def __init__(
        self,
        trainer: Trainer,
        from_step: float = 0,
        *,
        parameters: bool = False,
        every_step: bool = False,
        keeps_batches: bool = True,
    ) -> None:
        self._from_step = from_step
        self._parameters = parameters
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._every_step = every_step
        self._keeps_batches = keeps_batches
        self._buffers = [b for b in self._module.buffers() if b.is_floating_point() and b.numel()]
        self._loop = trainer.loop
        self._steps = self._loop.progress.optimizer_steps
        self._update = 0  # the number of the update that the next batch belongs to
        self._resolved = 0  # the number of the update with the next outcome
        self._windows: dict[int, list[RecordedBatch]] = {}  # the recorded batches, by update
        self._loop.wrap(self)

    def stop(self) -> None:
        """Stop recording, and drop all batches."""
        self._windows.clear()
        self._from_step = math.inf
        self._loop.unwrap(self)

    def take(self) -> list[RecordedBatch]:
        """Return the batches of the update with the new outcome, or [] if its first batch was not recorded.

        If every step is recorded, the first batch may be missing: the run was resumed within the window.
        """
        batches = self._windows.pop(self._resolved, [])
        self._resolved += 1
        is_whole = self._every_step or not self._module.automatic_optimization
        return batches if batches and (is_whole or batches[0].window.is_first) else []

    def __call__(self, path: TrainingPath) -> TrainingPath:
        """Wrap the path of a batch: record each batch before its step."""
        return replace(path, step=partial(self._run_step, path.step))

    def _run_step(self, step: Callable[..., Any], batch: Any, batch_idx: int) -> Any:
        steps, window = self._loop.progress.optimizer_steps, self._loop.window
        if steps != self._steps:
            self._steps = steps
            self._update += 1
        if steps >= self._from_step:
            kept = self._windows.setdefault(self._update, [])
            if window.is_first and self._module.automatic_optimization:
                kept.clear()  # drop a window without an update, because every training_step returned None
            state = self._state(is_first=not kept)
            random_state = random_states.capture(self._trainer.engine.device) if self._keeps_batches else {}
            given = batch if self._keeps_batches else None
            recorded = RecordedBatch(given, batch_idx, steps, copy(window), random_state, state)
            kept.append(recorded)
            output = step(batch, batch_idx)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if loss is None and self._module.automatic_optimization:
                kept[-1] = recorded._replace(has_loss=False)
            return output
        return step(batch, batch_idx)

    def _state(self, is_first: bool) -> ObjectState | BufferState | None:
        if not self._every_step:
            return ObjectState([self._module], parameters=self._parameters)
        return BufferState(self._buffers) if is_first else None
