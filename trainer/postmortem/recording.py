"""Record training batches with the state that a replay needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from trainer.loops.accumulation import AccumulationWindow
from trainer.loops.batch_path import TrainingPath
from trainer.postmortem.state import ObjectState
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
        state: state of the module. None if it is not recorded for each batch.
        has_loss: whether ``training_step`` has returned a loss.
        loss: detached loss. None if it is not recorded.
    """

    batch: Any
    batch_idx: int
    step: int
    window: AccumulationWindow
    random_state: dict[str, Any]
    state: ObjectState | None = None
    has_loss: bool = True
    loss: Tensor | None = None


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
    """

    def __init__(self, trainer: Trainer, from_step: float = 0, *, parameters: bool = False) -> None:
        self._from_step = from_step
        self._parameters = parameters
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._loop = trainer.loop
        self._steps = self._loop.progress.optimizer_steps
        self._update = 0  # the number of the update that the next batch belongs to
        self._resolved = 0  # the number of the update with the next outcome
        self._windows: dict[int, Any] = {}  # the recorded batches, by update
        self._loop.wrap(self)

    def stop(self) -> None:
        """Stop recording, and drop all batches."""
        self._windows.clear()
        self._from_step = math.inf
        self._loop.unwrap(self)

    def take(self) -> list[RecordedBatch]:
        """Return the batches of the update with the new outcome, or [] if its first batch was not recorded."""
        batches: list[RecordedBatch] = self.kept() or []
        whole = bool(batches) and (batches[0].window.is_first or not self._module.automatic_optimization)
        return batches if whole else []

    def kept(self) -> Any:
        """Return the records of the update with the new outcome, or None."""
        self._resolved += 1
        return self._windows.pop(self._resolved - 1, None)

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
            state = ObjectState([self._module], parameters=self._parameters)
            random_state = random_states.capture(self._trainer.engine.device)
            recorded = RecordedBatch(batch, batch_idx, steps, copy(window), random_state, state)
            kept.append(recorded)
            output = step(batch, batch_idx)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if loss is None and self._module.automatic_optimization:
                kept[-1] = recorded._replace(has_loss=False)
            return output
        return step(batch, batch_idx)
