"""Record training batches with the state that a replay needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from lightning_utilities import apply_to_collection
from torch import Tensor

from trainer.common.module_tree import is_dense
from trainer.data.batches import identity
from trainer.data.samples import PLAIN, leaves_in, nbytes
from trainer.diagnosis.replay_state import BufferState
from trainer.loop.accumulation import WeightedMean
from trainer.loop.batch_path import TrainingPath
from trainer.loop.run_state import RunState
from trainer.precision.scaler import snapshot_loss
from trainer.state import random_states
from trainer.state.outcome import StepOutcome

if TYPE_CHECKING:
    from trainer.loop.fit import FitLoop

_BYTES = 2**26
"""Maximum size of stored batches."""
_RATE = itemgetter("lr")
"""Returns the learning rate of a parameter group."""


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
    return number, _copy


def _copy(batch: Any) -> Any:
    """Return a batch with copies of its tensors."""
    if type(batch) not in (list, tuple):
        return apply_to_collection(batch, Tensor, torch.clone, allow_frozen=True)
    for item in batch:  # the usual case takes a fourth of the calls
        if type(item) is not Tensor:
            return apply_to_collection(batch, Tensor, torch.clone, allow_frozen=True)
    return type(batch)([item.clone() for item in batch])


class RecordedBatch(NamedTuple):
    """One batch, and the state just before its ``training_step``.

    Attributes:
        batch: the batch on the device, by reference or as a copy.
        batch_idx: index of the batch in the epoch, zero-based.
        step: ``trainer.global_step`` before the batch.
        mean: copy of the mean of the accumulation window, which weights the loss.
        random_state: states of all random generators (``trainer.state.random_states.capture``). Empty if they are not
            recorded.
        buffers: the floating-point buffers. None if they are not recorded with this batch.
        rates: learning rate of each parameter group. Empty if they are unknown.
    """

    batch: Any
    batch_idx: int
    step: int
    mean: WeightedMean
    random_state: dict[str, Any]
    buffers: BufferState | None = None
    rates: Sequence[Any] = ()


class Evidence:
    """The recent batches of a fit and their losses, for a diagnosis.

    It wraps the path of a batch, and adds to a step one append per batch, one per loss, and a comparison. It reads no
    value from the device.

    Args:
        loop: the fit loop.
        every: number of updates between two examinations that are due.
        most: maximum number of updates with recorded batches.
        begin: called before the first batch is recorded.
        examine: called with the outcome of an update and whether an examination is due. It is called if an examination
            is due or will be after the next update, if the update or the one before was skipped, or if the loss scale
            has changed.

    Attributes:
        losses: the unscaled losses that were not taken yet, each with the step of its batch.
        groups: the parameter groups with recorded learning rates, from the first batch on. [] if a learning rate is a
            tensor, which changes in place.
        scale: the loss scale after the last known outcome.
    """

    def __init__(
        self,
        loop: FitLoop,
        every: int,
        most: int,
        begin: Callable[[], None],
        examine: Callable[[StepOutcome, bool], None],
    ) -> None:
        self.groups: list[dict[str, Any]] = []
        self.losses: list[tuple[int, float | Tensor]] = []
        self.scale = loop.gradients.scaler.current_scale
        self._loop = loop
        self._every = every
        self._most = most
        self._begin = begin
        self._examine = examine
        self._updates = loop.progress.updates % every  # examined with the rows of the loggers, at multiples of `every`
        self._follows_skip = False
        self._latest = 0  # `batches_started` of the newest batch
        self._room = 0  # usual maximum of recorded batches; 0 before the first batch
        self._recent: deque[tuple[Any, int, int, WeightedMean, list[Any]]] = deque(maxlen=0)
        self._stored: Callable[[Any], Any] = identity
        self._rates: list[Any] = []  # the current learning rates
        self._is_on_host = loop.engine.device.type == "cpu"
        # with loss scaling, the step is skipped; processes examine together
        self._examines_at_once = loop.engine.world_size == 1 and not loop.gradients.scaler.is_enabled()
        loop.wrap(self)

    def stop(self) -> None:
        """Record no more batches, and drop the recorded ones."""
        self._loop.unwrap(self)
        self._recent.clear()
        self.losses.clear()

    def __call__(self, path: TrainingPath) -> TrainingPath:
        """Wrap the path of a batch: record each loss before it is scaled, and follow the outcomes of the updates."""
        return replace(path, scale=partial(self._record, path.scale), follow_outcome=self._follow)

    def _record(self, scale: Callable[[Tensor], Tensor], loss: Tensor) -> Tensor:
        progress = self._loop.progress
        step = progress.optimizer_steps
        if progress.batches_started != self._latest:  # a closure or a manual step may have several losses
            self._latest = progress.batches_started
            if not self._room:
                self._prepare()
            rates = list(map(_RATE, self.groups))
            if rates != self._rates:
                self._rates = rates
            mean, batch = self._loop.mean, self._loop.metrics.batch
            mean = mean if mean.window.batches == 1 else copy(mean)
            self._recent.append((self._stored(batch), progress.batch_idx, step, mean, self._rates))
        if self._is_on_host and type(loss) is Tensor and loss.numel() == 1:
            number = loss.item()
            self.losses.append((step, number))
            if number - number != 0 and self._examines_at_once:  # infinite or NaN: examine it after this update
                self._updates = self._every
        else:
            self.losses.append((step, _to_read(loss)))
        return scale(loss)

    def _prepare(self) -> None:
        """Set the number of recorded batches and the parameter groups, at the first batch."""
        self._begin()
        self._room, self._stored = storage_for(self._loop.metrics.batch, self._most * self._loop.window.size)
        self.resize()
        groups = [group for optimizer in self._loop.optimizers for group in optimizer.param_groups]
        self.groups = [] if any(isinstance(group["lr"], Tensor) for group in groups) else groups

    def _follow(self, outcome: StepOutcome) -> None:
        self._updates += 1
        is_near = self._updates + 1 >= self._every
        if is_near or outcome.skipped or self._follows_skip or outcome.scale != outcome.next_scale:
            is_due = self._updates >= self._every
            self._updates = 0 if is_due else self._updates
            self._follows_skip, self.scale = outcome.skipped, outcome.next_scale
            self._examine(outcome, is_due)

    @property
    def is_due_next(self) -> bool:
        """Whether an examination is due after the next update."""
        return self._updates + 1 >= self._every

    def take_losses(self, end: int) -> list[tuple[int, float | Tensor]]:
        """Remove and return the losses of the batches before this step."""
        count = len(self.losses)
        while count and self.losses[count - 1][0] >= end:
            count -= 1
        due, self.losses = self.losses[:count], self.losses[count:]
        return due

    def resize(self, least: int = 0) -> None:
        """Record the usual number of batches, but at least ``least``."""
        self._recent = deque(self._recent, max(self._room, least))

    def batches(self) -> list[RecordedBatch]:
        """Return the recent batches, oldest first."""
        return [RecordedBatch(*recorded[:4], {}, rates=recorded[4]) for recorded in self._recent]

    def batches_of(self, step: int) -> list[RecordedBatch]:
        """Return the recent batches of this step. A batch with several steps is recorded with its first step."""
        recent = self.batches()
        first = max((recorded.step for recorded in recent if recorded.step <= step), default=step)
        return [recorded for recorded in recent if recorded.step == first]


def _to_read(loss: Tensor) -> Tensor:
    """Return a loss as a tensor with one element, to read later."""
    value = snapshot_loss(loss)
    return value if value.numel() == 1 else value.sum()  # several, as in `manual_backward(outputs, gradient=...)`


class Recorder:
    """Record the batches of a weight update until its outcome is known.

    The recorder replaces the function ``step`` of the path of a batch by one that records the batch first, so a run
    without a recorder has no overhead. It records the random states of each batch, and the floating-point buffers
    before each window, after all ``on_train_batch_start`` hooks. With automatic optimization, batches without a loss
    are left out.

    The outcome of an update may be read after the next window has run, but before the next update. Therefore the owner
    calls :meth:`close` in ``on_before_optimizer_step``, and reads ``closed`` in ``on_after_optimizer_step``.

    Args:
        run: the state of the run.
        keeps_batches: whether to record the batches and random states. Default: True.

    Attributes:
        closed: the batches of the last update, or of the update that is being made.
    """

    def __init__(self, run: RunState, *, keeps_batches: bool = True) -> None:
        self._run = run
        self._module = run.module
        self._keeps_batches = keeps_batches
        self._buffers = [b for b in self._module.buffers() if is_dense(b) and b.is_floating_point() and b.numel()]
        self._loop = run.loop
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
        if not self._loop.update.unresolved:
            self.closed = []  # free its memory
        if window.is_first and is_automatic:
            self._open.clear()  # drop a window that made no update, for example because its loss weights sum to 0
        recorded, self._has_run = self._open, True
        buffers = None if recorded else BufferState(self._buffers)
        random_state = random_states.capture(self._run.device) if self._keeps_batches else {}
        given = batch if self._keeps_batches else None
        recorded.append(RecordedBatch(given, batch_idx, steps, copy(self._loop.mean), random_state, buffers))
        output = step(batch, batch_idx)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None and is_automatic:
            recorded.pop()
        return output
