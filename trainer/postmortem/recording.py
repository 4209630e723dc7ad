"""Keeping training batches, with what is needed to run them again."""

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
        batch: as it is on the device; a reference.
        batch_idx: zero-based, within the epoch.
        step: ``trainer.global_step`` at the time.
        window: a copy; it weights the loss.
        random_state: of all generators (``trainer.state.random_states.capture``).
        state: of the module; None where it was not kept with each batch.
        has_loss: whether its ``training_step`` has returned a loss.
        loss: what it was, without its graph, where that is kept.
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
    """Keeps the batches of weight updates until their outcome is known.

    While it records it wraps the step in the path of a batch: a run that records nothing has no cost, and the state is
    that just before the forward pass, after all ``on_train_batch_start`` hooks.

    The outcome of an update may be delivered late, when the next window has run already. So windows are numbered
    by the updates there have been since recording started, and :meth:`take` is called once for each outcome.

    Args:
        trainer: whose batches.
        from_step: keep no update that begins at a ``global_step`` below this one.
        parameters: whether to keep the weights with each batch. Those of a skipped step do not change; others will
            have when the outcome is known.
    """

    def __init__(self, trainer: Trainer, from_step: float = 0, *, parameters: bool = False) -> None:
        self._from_step = from_step
        self._parameters = parameters
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._loop = trainer.loop
        self._steps = self._loop.progress.optimizer_steps
        self._update = 0  # the number of the update that the next batch belongs to
        self._resolved = 0  # the number of the update whose outcome comes next
        self._windows: dict[int, Any] = {}  # what is kept of each
        self._loop.wrap(self)

    def stop(self) -> None:
        """Stop recording, and drop all batches."""
        self._windows.clear()
        self._from_step = math.inf
        self._loop.unwrap(self)

    def take(self) -> list[RecordedBatch]:
        """The batches of the update whose outcome has come; [] where they were not recorded from the first on."""
        batches: list[RecordedBatch] = self.kept() or []
        whole = bool(batches) and (batches[0].window.is_first or not self._module.automatic_optimization)
        return batches if whole else []

    def kept(self) -> Any:
        """What is kept of the update whose outcome has come; None for nothing."""
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
                kept.clear()  # of a window in which every training_step returned None: no update came of it
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
