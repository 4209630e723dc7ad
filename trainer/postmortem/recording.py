"""Record training batches with the state that a replay needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from lightning_utilities import apply_to_collection
from torch import Tensor

from trainer.data.batches import identity
from trainer.data.samples import PLAIN, leaves_in, nbytes
from trainer.loops.accumulation import AccumulationWindow
from trainer.loops.batch_path import TrainingPath
from trainer.module_tree import is_dense
from trainer.postmortem.state import BufferState
from trainer.state import random_states

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_BYTES = 2**26
"""Maximum size of stored batches."""


def storage_for(batch: Any, most: int) -> tuple[int, Callable[[Any], Any]]:
    """Return how many batches like this one may be stored, and the function to apply to a batch before it is stored.

    The batches take at most 64 MiB. If one batch takes more, or has parts of unknown size, such as objects of other
    classes, only one batch may be stored. If several may be stored, the function copies tensors that are in shared
    memory, such as those from the workers of a dataloader. Without a copy, each stored tensor would keep a file open
    and take up a part of ``/dev/shm``, which may be small.

    Args:
        batch: the first batch.
        most: the maximum number.
    """
    leaves = [leaf for _, leaf in leaves_in(batch)]
    if not all(isinstance(leaf, (Tensor, np.ndarray, list, tuple, *PLAIN)) for leaf in leaves):
        return 1, identity
    size = sum(nbytes(leaf) if isinstance(leaf, Tensor) else getattr(leaf, "nbytes", 0) for leaf in leaves)
    number = max(1, min(_BYTES // max(size, 1), most))
    host = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cpu and is_dense(leaf)]
    if number == 1 or not any(leaf.is_shared() for leaf in host):  # type: ignore[no-untyped-call]
        return number, identity
    return number, partial(apply_to_collection, dtype=Tensor, function=torch.clone, allow_frozen=True)


class RecordedBatch(NamedTuple):
    """One batch, and the state just before its ``training_step``.

    Attributes:
        batch: the batch on the device, by reference or as a copy.
        batch_idx: index of the batch in the epoch, zero-based.
        step: ``trainer.global_step`` before the batch.
        window: copy of the accumulation window, which weights the loss.
        random_state: states of all random generators (``trainer.state.random_states.capture``). Empty if they are not
            recorded.
        buffers: the floating-point buffers. None if they are not recorded with this batch.
        rates: learning rate of each parameter group. Empty if they are unknown.
    """

    batch: Any
    batch_idx: int
    step: int
    window: AccumulationWindow
    random_state: dict[str, Any]
    buffers: BufferState | None = None
    rates: Sequence[Any] = ()


class Recorder:
    """Record the batches of a weight update until its outcome is known.

    The recorder replaces the function ``step`` of the path of a batch by one that records the batch first, so a run
    without a recorder has no overhead. It records the random states of each batch, and the floating-point buffers
    before each window, after all ``on_train_batch_start`` hooks. With automatic optimization, batches without a loss
    are left out.

    The outcome of an update may be read after the next window has run, but before the next update. Therefore the owner
    calls :meth:`close` in ``on_before_optimizer_step``, and reads ``closed`` in ``on_after_optimizer_step``.

    Args:
        trainer: the Trainer.
        keeps_batches: whether to record the batches and random states. Default: True.

    Attributes:
        closed: the batches of the last update, or of the update that is being made.
    """

    def __init__(self, trainer: Trainer, *, keeps_batches: bool = True) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._keeps_batches = keeps_batches
        self._buffers = [b for b in self._module.buffers() if is_dense(b) and b.is_floating_point() and b.numel()]
        self._loop = trainer.loop
        self._open: list[RecordedBatch] = []  # the batches since the last update
        self._has_run = False  # whether a batch has run since the last update
        self.closed: list[RecordedBatch] = []
        self._loop.wrap(self)

    def stop(self) -> None:
        """Stop recording, and drop all batches."""
        self._open, self.closed = [], []
        self._loop.unwrap(self)

    def close(self) -> None:
        """Assign the recorded batches to the update that is being made. No-op for its second and later optimizers."""
        if self._has_run:
            self.closed, self._open, self._has_run = self._open, [], False

    def __call__(self, path: TrainingPath) -> TrainingPath:
        """Wrap the path of a batch: record each batch before its step."""
        return replace(path, step=partial(self._run_step, path.step))

    def _run_step(self, step: Callable[..., Any], batch: Any, batch_idx: int) -> Any:
        steps, window = self._loop.progress.optimizer_steps, self._loop.window
        is_automatic = self._module.automatic_optimization
        if not self._loop.unresolved:
            self.closed = []  # free its memory
        if window.is_first and is_automatic:
            self._open.clear()  # drop a window that made no update, for example because its loss weights sum to 0
        recorded, self._has_run = self._open, True
        buffers = None if recorded else BufferState(self._buffers)
        random_state = random_states.capture(self._trainer.engine.device) if self._keeps_batches else {}
        given = batch if self._keeps_batches else None
        recorded.append(RecordedBatch(given, batch_idx, steps, copy(window), random_state, buffers))
        output = step(batch, batch_idx)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None and is_automatic:
            recorded.pop()
        return output
