"""Accumulation windows: the batches that make one weight update, and the weighted mean over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.engine.protocol import Engine, Weight
from trainer.errors import ConfigurationError, expect, is_count
from trainer.loops.step_output import check_weight
from trainer.precision.readback import Readback

_STATE = (
    "batches", "size", "backwards", "is_first", "is_last", "factor", "correction", "_position", "_unit", "_total",
    "_is_weighted", "_shared_unit",
)  # fmt: skip

_MIXED = (
    "Got a `training_step` that returned a 'weight' for some batches of an accumulation window and none for others,"
    " expected one for all of them or for none. Return None in the place of a batch to leave out."
)


class AccumulationWindow:
    """The batches that make one weight update.

    A window has ``batches`` batches, or as many as the epoch still has. The update is computed from the weighted mean
    ``sum(w * g) / sum(w)`` of the gradients ``g`` of its batches' losses, over all processes. A batch's weight ``w`` is
    1 unless ``training_step`` returned one; a batch whose ``training_step`` returned None is not counted.

    ``sum(w)`` is not known before the window's last forward pass. So each loss is multiplied by its expected share
    (:meth:`share`): its weight relative to a usual one, the unit, over the window's size. Thus the loss keeps its
    ordinary size while it is scaled for float16, whatever the unit of the weights. After the last backward pass the
    gradients are multiplied by what makes them the mean of what has really come (:meth:`close`). Mostly that is 1.

    Several processes exchange their sums during the last backward pass. Where the number is likely not 1, or is not
    known to the host, a window of a single batch waits for them before it: there the loss is multiplied, one number in
    the place of all gradients (:meth:`joint_share`).

    The unit is the window's first weight. Several processes need one unit for all, or no factor would be right for
    gradients that have been averaged over them: it is the mean weight of the last window. In a run's first one
    it is that of the first batches, which takes an exchange of its own.

    Args:
        batches: ``accumulate_grad_batches``, the number of batches in a full window.
        straddles_epochs: whether a window continues in the next epoch. By default an epoch's end closes it.

    Attributes:
        batches: may be changed at any time; the next window follows it.
        size: batches in the current window, as far as its start could tell.
        backwards: batches in the current window so far that had a loss.
        is_first, is_last: whether the current batch opens, and closes, the window.
        batch_weight: what the current batch counts where ``training_step`` returns no weight; 0 for a batch that does
            not count in any case. None, which is usual, for 1. See ``trainer.data.elastic``.
        factor: what the current batch's loss was multiplied by, to be its share.
        correction: what :meth:`close` has multiplied the gradients by.

    Raises:
        ConfigurationError: ``batches`` is not a whole number, or below 1.
    """

    def __init__(self, batches: int = 1, straddles_epochs: bool = False) -> None:
        expect(is_count(batches), "a whole number of batches, at least 1", accumulate_grad_batches=batches)
        self.batches = batches
        self.straddles_epochs = straddles_epochs
        self.size = batches
        self.backwards = 0
        self.is_first = True
        self.is_last = True
        self.batch_weight: float | None = None
        self.factor: Weight = 1.0
        self.correction: Weight = 1.0
        self._position = -1
        self._data_parallel_size = 1
        self._sums: Callable[[], list[Weight]] | None = None  # over the processes: being computed
        self._has_loss: bool | None = None  # None before they are known
        self._shared_unit: Weight | None = None  # of all processes; None on one, and before it is known
        self._unit: Weight = 1.0  # of the current window; 1 where its batches have no weights
        self._total: Weight = 0.0  # sum of the weights
        self._is_weighted: bool | None = None
        self._before: tuple[int, Weight] = (0, 0.0)  # backwards and total without the current batch
        self._readback: Readback | None = None  # copies to the host a weight that `close` reads
        self._reads_late = False

    @property
    def is_open(self) -> bool:
        """Whether batches have been accumulated that no weight update has used yet."""
        return not self.is_last

    def start_run(self, data_parallel_size: int) -> None:
        """A fit begins, in which each window has batches of this many processes."""
        self.reset()
        self._data_parallel_size = data_parallel_size
        self._shared_unit = None

    def reset(self) -> None:
        """Forget the current window; the next batch opens a new one."""
        self._position = -1
        self.is_last = True

    def advance(self, batches_left: float, is_last_batch: bool, is_final_epoch: bool = True) -> None:
        """Start the next batch.

        Args:
            batches_left: batches of the epoch from this one on, itself included; inf if unknown.
            is_last_batch: whether this is the epoch's last batch.
            is_final_epoch: whether no other epoch follows that the window might go on in.
        """
        if self.straddles_epochs and not is_final_epoch:
            batches_left, is_last_batch = math.inf, False
        if self.is_last:
            self._position = 0
            self.size = int(min(self.batches, batches_left))
            self.backwards = 0
            self.is_first = True
            self._total = 0.0
            self._is_weighted = None
        else:
            self._position += 1
            self.is_first = False
        self._before = self.backwards, self._total
        self.factor = self.correction = 1.0
        self.is_last = is_last_batch or self._position + 1 >= self.size
        self._sums = self._has_loss = None
        self._reads_late = False

    def mark(self) -> dict[str, Any]:
        """The state of the window before its current batch, for :meth:`go_back`."""
        return dict(vars(self))

    def go_back(self, mark: dict[str, Any]) -> None:
        """Restore that state: an optimizer that evaluates the loss itself asks for the batch again."""
        vars(self).update(mark)

    def state_dict(self, *, is_open: bool) -> dict[str, Any]:
        """The state for a checkpoint: of an open window, or what the next one goes on from. Gradients are not in it."""
        names = _STATE if is_open else ("batches", "_shared_unit", "_unit")
        return {name.removeprefix("_"): getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on from what :meth:`state_dict` returned; with its number of batches until the next epoch sets another."""
        for name in _STATE:
            key = name.removeprefix("_")
            if key in state:
                value = state[key]
                setattr(self, name, value.to(device) if isinstance(value, Tensor) else value)

    def share(self, loss: Tensor, weight: Weight | None = None) -> Tensor:
        """The current batch's likely share of the window's mean loss.

        May be called again for the same batch, by an optimizer that evaluates the loss itself; the last call counts.

        Args:
            loss: the mean over the batch, a scalar.
            weight: how much the batch counts (its samples, its tokens); above 0. None for 1.

        Raises:
            ConfigurationError: some batches of a window come with a weight and others without.
        """
        self._count(weight)
        return self._times_factor(loss)

    def joint_share(self, loss: Tensor | None, weight: Weight | None, engine: Engine) -> Tensor | None:
        """:meth:`share`, where all processes come here at the same batch.

        Args:
            loss, weight: as in :meth:`share`; the loss is None where this process has none.
            engine: adds up over the processes.
        """
        if not (self.is_first and self.is_last):
            self.find_unit(loss is not None, weight, engine)
        if loss is not None:
            self._count(weight)
        if self._data_parallel_size > 1 and self.is_last:
            corrects = self.is_first and (bool(self._is_weighted) or engine.device.type != "cpu")
            self._begin_sums(engine, corrects)
            if corrects:
                self._has_loss = self._sum_up()
                self.factor, self.correction = self.factor * self.correction, 1.0
        return None if loss is None else self._times_factor(loss)

    def may_read_late(self, engine: Engine) -> bool:
        """Return whether a weight on a device can be read after the backward pass, by :meth:`close`.

        This requires a window of one batch on one process, so that gradients can be dropped if the weight is 0, and
        CUDA, where the copy does not wait for the backward pass.
        """
        is_alone = self.size == 1 and self._data_parallel_size == 1
        return is_alone and engine.device.type == "cuda" and engine.trains_unevenly

    def share_late(self, loss: Tensor, weight: Tensor) -> Tensor:
        """Return the share of the only batch in a window, of which :meth:`close` reads the weight.

        Args:
            loss: the mean over the batch, a scalar.
            weight: a 0-dim tensor on the device.
        """
        if self._readback is None:
            self._readback = Readback(weight.device.type)
        self._readback.start([weight])
        self._reads_late = True
        return self.share(loss)

    def find_unit(self, has_loss: bool, weight: Weight | None, engine: Engine) -> None:
        """Agree on the mean weight of the processes' batches, if any has a loss. Waits for the device, once in a run.

        Args:
            has_loss: whether this process's has one.
            weight: of that; None for 1.
            engine: adds up over the processes, all of which come here at the same batch.
        """
        if self._data_parallel_size == 1 or self._shared_unit is not None:
            return
        weight = self._weight_of(weight)
        weight = 1.0 if weight is None else weight
        total, count, _ = engine.begin_sum(weight if has_loss else 0.0, float(has_loss), 0.0)()
        if float(count):
            self._shared_unit = _positive(total / count)

    @property
    def _known_unit(self) -> Weight:
        return 1.0 if self._shared_unit is None else self._shared_unit

    def _times_factor(self, loss: Tensor) -> Tensor:
        """Where the batches have no weights, as one writes it by hand."""
        if self._is_weighted or isinstance(self.factor, Tensor) or self.factor != 1.0 / self.size:
            return loss * self.factor
        return loss if self.size == 1 else loss / self.size

    def _weight_of(self, given: Weight | None) -> Weight | None:
        """Return the weight of the current batch: the given one, if any. None stands for 1."""
        return self.batch_weight if given is None else given

    def _count(self, weight: Weight | None) -> None:
        """Count the current batch, and set the factor of its loss."""
        weight = self._weight_of(weight)
        backwards, total = self._before
        if backwards and (weight is not None) is not self._is_weighted:
            raise ConfigurationError(_MIXED)
        self._is_weighted = weight is not None
        self.backwards = backwards + 1
        self._total = total + (1.0 if weight is None else weight)
        if weight is None:
            self._unit, self.factor = 1.0, 1.0 / self.size
            return
        if not backwards:
            self._unit = (
                _positive(weight) if self._data_parallel_size == 1 and self._shared_unit is None else self._known_unit
            )
        self.factor = weight / (self._unit * self.size)

    def close(self, optimizers: Iterable[Optimizer], engine: Engine) -> bool:
        """Make the window's gradients the mean over what it really holds. Called after its last backward pass.

        On several processes all of them come here: the sums over them take one exchange, without waiting for a GPU.

        Args:
            optimizers: whose gradients these are.
            engine: adds up over the processes, and multiplies gradients.

        Returns:
            Whether any process had a loss in the window. If not, there is nothing to update the weights with.
        """
        if self.size == 1 and self._data_parallel_size == 1 and self.backwards <= 1:
            if self._reads_late:
                self._close_late(optimizers, engine)
            return bool(self.backwards)  # one loss, of which the factor is exact
        if self._has_loss is None:
            if self._data_parallel_size > 1 and self._sums is None:
                self._begin_sums(engine, corrects=False)
            self._has_loss = self._sum_up()
            if isinstance(self.correction, Tensor) or self.correction != 1.0:
                engine.gradients.multiply_(optimizers, self.correction)
        return self._has_loss

    def _close_late(self, optimizers: Iterable[Optimizer], engine: Engine) -> None:
        """Read the weight of the only batch. If it is 0, drop the gradients, which may be 0 * inf = NaN.

        The host waits for the forward pass only. Meanwhile, the device has the backward pass queued.
        """
        assert self._readback is not None
        self._reads_late = False
        if check_weight(*self._readback.wait()) == 0.0:
            self.backwards = 0
            for optimizer in optimizers:
                engine.gradients.clear(optimizer)

    def _begin_sums(self, engine: Engine, corrects: bool) -> None:
        """Begin the exchange. ``corrects`` says whether this process is going to correct its loss by it."""
        self._sums = engine.begin_sum(self._total / self._unit, float(self.backwards), float(corrects))

    def _sum_up(self) -> bool:
        """Set the correction, and the next window's unit. Returns whether any process had a loss."""
        sums: list[Weight] = [self._total / self._unit, float(self.backwards), 0.0]
        if self._sums is not None:
            sums, self._sums = self._sums(), None
        total, count, corrects = sums
        if isinstance(corrects, float) and 0.0 < corrects < count:
            raise ConfigurationError(_MIXED)
        # A process that had no loss in the whole window looks whether the others had one; the others need not look.
        # A host-device synchronisation, but for empty windows alone.
        if not self.backwards and not (self._data_parallel_size > 1 and float(count)):
            return False
        if self._data_parallel_size > 1 or self._shared_unit is not None:
            self._shared_unit = _positive(self._known_unit * total / count)
        total = total if isinstance(total, float) else total.clamp_min(torch.finfo(total.dtype).tiny)
        is_corrected = not self.backwards and float(corrects)  # by those that had a loss, before their backward
        self.correction = 1.0 if is_corrected else self.size * self._data_parallel_size / total
        return True

    def corrected(self, share: Tensor) -> Tensor:
        """A batch's real share of the window's mean loss, once the window is closed."""
        exact = isinstance(self.correction, float) and self.correction == 1.0
        return share if exact else share * self.correction


def _positive(weight: Weight) -> Weight:
    """``weight``, or 1 in the place of 0; a tensor is not read."""
    return weight or 1.0 if isinstance(weight, float) else torch.where(weight > 0, weight, 1.0)


def count_windows(batches: int, sizes: Iterable[int], straddle: bool) -> int:
    """How many windows there are in epochs of ``batches`` batches, with windows of ``sizes[i]`` in epoch ``i``."""
    windows, lacking = 0, 0  # what the window that is open at an epoch's end takes from the next
    for size in sizes:
        left = batches - lacking
        if left >= 0:
            windows += math.ceil(left / size)
        lacking = -left if left < 0 else -left % size if straddle else 0
    return windows
