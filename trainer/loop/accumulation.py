"""Accumulation: the loss and weight of a batch, the batches between two optimizer steps, and the mean over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.errors import ConfigurationError, expect, is_count, warn
from trainer.loop.engine_protocol import Engine
from trainer.precision.readback import Readback

Weight = float | Tensor
"""Weight of a loss or metric: a number, or a 0-dim tensor on the device if reading it would synchronize."""

NOTHING: Mapping[str, Any] = {"loss": torch.zeros(()), "weight": 0.0}
"""The output of a batch that is None, for which ``training_step`` is not called."""

_STATE = (
    ("batches", "size", "is_first", "is_last", "_position"),
    ("backwards", "factor", "correction", "_unit", "_total", "_is_weighted", "_shared_unit"),
)
"""The attributes of the window and of the mean that a checkpoint stores."""

_MIXED = (
    "Got a `training_step` that returned a 'weight' for some batches of an accumulation window and none for others,"
    " expected one for all of them or for none. To skip a batch, return None."
)


def loss_in(output: Any, *, reads_weight: bool = True) -> tuple[Tensor | None, Weight | None]:
    """Return the loss that ``training_step`` returned, and its weight.

    The loss is None if the batch contributes nothing: if ``training_step`` returned None (with a warning) or a weight
    of 0 (without a warning). The loss is not multiplied by 0, because its gradients may be 0 * inf = NaN.

    Args:
        output: a tensor, a dict with a ``"loss"``, or None.
        reads_weight: whether to read a weight on a device, which is a host-device synchronization. Default: True. If
            False, such a weight is returned as a tensor, and may be 0.

    Raises:
        ConfigurationError: if ``output`` is anything else, or the weight is not a number, is negative or not finite.
    """
    if isinstance(output, Tensor):
        return output, None
    if output is None:
        warn(
            "`training_step` returned `None`. If this was on purpose, ignore this warning: there is nothing to learn"
            " from this batch."
        )
        return None, None
    if not isinstance(output, Mapping):
        raise ConfigurationError(
            "In automatic optimization, `training_step` must return a Tensor, a dict, or None (to skip the batch)."
            f" Got {type(output).__name__}. Return the loss itself, a scalar tensor with its graph (no number, no"
            ' `loss.item()`), and other values with it as {"loss": loss, "name": value}.'
        )
    loss, weight = output.get("loss"), weight_in(output, reads=reads_weight)
    if not isinstance(loss, Tensor):
        raise ConfigurationError(
            "In automatic_optimization, when `training_step` returns a dict, the 'loss' key needs to be present"
            f" and hold a tensor. Got the keys {list(output)} and loss={loss!r}. Return {{'loss': loss}} with a scalar"
            " tensor that has its graph (no number, no `loss.item()`)."
        )
    counts_nothing = isinstance(weight, float) and weight == 0.0
    return (None, None) if counts_nothing else (loss, weight)


def outputs_of(loss: Tensor | None, output: Any) -> dict[str, Any] | None:
    """Return the outputs that ``on_train_batch_end`` receives: the detached loss, and the other items of a dict.

    As in Lightning, only the loss is detached. The other items keep their graphs until the batch ends.

    Args:
        loss: the batch's share of the window's mean loss, a scalar; None if the batch has no loss.
        output: the return value of ``training_step``, or ``NOTHING`` if the batch is None.

    Returns:
        A dict; empty if there is no loss, and None if the batch is None.
    """
    if isinstance(output, Tensor):
        return {} if loss is None else {"loss": loss.detach()}
    if output is NOTHING:
        return None
    if loss is None or output is None:
        return {}
    return {"loss": loss.detach(), **{key: value for key, value in output.items() if key != "loss"}}


def weight_in(output: object, *, reads: bool = True) -> Weight | None:
    """Return the ``"weight"`` that ``training_step`` returned with its loss, or None if there is no weight.

    Args:
        output: the return value of ``training_step``.
        reads: whether to read a weight on a device, which is a host-device synchronization. Default: True.

    Returns:
        A finite number, at least 0; or a 0-dim float32 tensor if the weight is on a device and ``reads`` is False.

    Raises:
        ConfigurationError: if the weight is not a number or a tensor of one element, is negative, or is not finite.
    """
    if not isinstance(output, Mapping) or "weight" not in output:
        return None
    weight = output["weight"]
    if isinstance(weight, Tensor) and weight.numel() == 1:
        if not reads and weight.device.type != "cpu":
            return weight.detach().reshape(()).float()
        weight = weight.item()  # a host-device synchronization if it is on a device
    return check_weight(weight)


def check_weight(weight: Any) -> float:
    """Return a weight as a float.

    Raises:
        ConfigurationError: if it is not a finite number, at least 0.
    """
    if not isinstance(weight, bool) and isinstance(weight, Real):  # also a NumPy scalar
        number = float(weight)
        if 0 <= number < math.inf:
            return number
    raise ConfigurationError(
        f"Got 'weight': {weight!r} in the dict that `training_step` returned, expected one number, at least 0: how much"
        " the batch counts in an accumulation window (samples, tokens). Use another key for any other value."
    )


class AccumulationWindow:
    """The batches between two optimizer steps, and the position of the current batch among them.

    A window has ``batches`` batches, or fewer at the end of an epoch.

    Args:
        batches: ``accumulate_grad_batches``, the number of batches in a full window. Default: 1.
        straddles_epochs: whether a window continues in the next epoch. Default: False, the end of an epoch closes it.

    Attributes:
        batches: the number of batches in a full window. It can be changed at any time; the next window uses it.
        given: the value of ``batches`` at the start of the fit, from the user's code. A checkpoint restores its
            ``batches`` only if this value is the same in both runs.
        size: the number of batches in the current window, as far as was known at its start.
        is_first, is_last: whether the current batch is the first, or the last, of the window.

    Raises:
        ConfigurationError: if ``batches`` is not an integer, or is below 1.
    """

    def __init__(self, batches: int = 1, straddles_epochs: bool = False) -> None:
        expect(is_count(batches), "a whole number of batches, at least 1", accumulate_grad_batches=batches)
        self.batches = self.given = batches
        self.straddles_epochs = straddles_epochs
        self.size = batches
        self.is_first = True
        self.is_last = True
        self._position = -1

    @property
    def is_open(self) -> bool:
        """Whether accumulated batches wait for an optimizer step."""
        return not self.is_last

    def start_run(self) -> None:
        """Start a fit."""
        self.reset()
        self.given = self.batches

    def reset(self) -> None:
        """Drop the current window; the next batch opens a new one."""
        self._position = -1
        self.is_last = True

    def advance(self, batches_left: float, is_last_batch: bool, is_final_epoch: bool = True) -> None:
        """Start the next batch.

        Args:
            batches_left: the number of batches left in the epoch, including this one; inf if unknown.
            is_last_batch: whether this is the last batch of the epoch.
            is_final_epoch: whether no other epoch follows, so that the window cannot continue. Default: True.
        """
        if self.straddles_epochs and not is_final_epoch:
            batches_left, is_last_batch = math.inf, False
        self.is_first = self.is_last
        if self.is_first:
            self._position = 0
            self.size = int(min(self.batches, batches_left))
        else:
            self._position += 1
        self.is_last = is_last_batch or self._position + 1 >= self.size


class WeightedMean:
    """The weighted mean of the gradients of a window's batches, over all processes.

    An update uses the mean of the gradients ``g`` of its batches' losses, ``sum(w * g) / sum(w)``. The weight ``w`` of
    a batch is the one that ``training_step`` returned; default: 1. A batch does not count if its ``training_step``
    returned None.

    ``sum(w)`` is unknown until the window's last forward pass. Therefore :meth:`share` multiplies each loss by an
    expected factor: its weight divided by the window's size and by a typical weight, called the unit. Thus the loss
    has its usual magnitude when it is scaled for float16, however large the weights are. After the last backward pass,
    :meth:`close` multiplies the gradients by a correction. It is 1 if no weight differs from the unit and no batch is
    missing, as in a full window without weights.

    Several processes all-reduce their sums of weights during the last backward pass. In a window of a single batch,
    they may do this before the backward pass instead (:meth:`joint_share`). The correction then multiplies the loss,
    which is cheaper than multiplying all gradients. This is done if the batch has a weight. It is also done if the sums
    are on a GPU, because the host cannot check there whether the correction is 1.

    With one process, the unit is the first weight of the window. Several processes need the same unit, because
    gradients that were averaged over the processes cannot be corrected for different units. This unit is the mean
    weight of the last window; in the first window of a run, it is the mean weight of the first batches, which takes one
    more collective.

    Args:
        window: the window; each of its batches begins with ``window.advance`` and :meth:`begin_batch`.
        engine: computes sums over the processes, and multiplies gradients.

    Attributes:
        backwards: the number of batches with a loss in the current window so far.
        batch_weight: the weight of the current batch if ``training_step`` returns no weight. If it is 0, the batch does
            not count, whatever ``training_step`` returns. Default: None, for 1. See ``trainer.data.elastic_sampling``.
        factor: the factor that turned the current batch's loss into its share.
        correction: the factor that :meth:`close` multiplied the gradients by.
    """

    def __init__(self, window: AccumulationWindow, engine: Engine) -> None:
        self.window = window
        self._engine = engine
        self.backwards = 0
        self.batch_weight: float | None = None
        self.factor: Weight = 1.0
        self.correction: Weight = 1.0
        self._data_parallel_size = 1
        self._sums: Callable[[], list[Weight]] | None = None  # waits for the sums over the processes
        self._has_loss: bool | None = None  # None until the sums are known
        self._shared_unit: Weight | None = None  # the unit of all processes; None on one process, and until it is known
        self._unit: Weight = 1.0  # of the current window; 1 if its batches have no weights
        self._total: Weight = 0.0  # sum of the weights
        self._is_weighted: bool | None = None
        self._before: tuple[int, Weight] = (0, 0.0)  # backwards and total without the current batch
        self._readback: Readback | None = None  # copies to the host the weight that `close` reads
        self._reads_late = False

    def start_run(self) -> None:
        """Start a fit."""
        self._data_parallel_size = self._engine.data_parallel_size
        self._shared_unit = None

    def begin_batch(self) -> None:
        """Start the next batch of the window, after ``window.advance``."""
        if self.window.is_first:
            self.backwards = 0
            self._total = 0.0
            self._is_weighted = None
        self._before = self.backwards, self._total
        self.factor = self.correction = 1.0
        self._sums = self._has_loss = None
        self._reads_late = False

    def __copy__(self) -> WeightedMean:
        """Return a copy with its own window. ``copy.copy`` alone would take longer, and the diagnosis copies often."""
        copied, window = object.__new__(WeightedMean), object.__new__(AccumulationWindow)
        vars(window).update(vars(self.window))
        vars(copied).update(vars(self), window=window)
        return copied

    def rewind(self, mark: WeightedMean) -> None:
        """Restore the state of a copy, and that of its window, to repeat or discard the batch."""
        vars(self.window).update(vars(mark.window))
        vars(self).update(vars(mark), window=self.window)

    def state_dict(self, *, is_open: bool) -> dict[str, Any]:
        """Return the state for a checkpoint, with that of the window. Excludes gradients.

        Args:
            is_open: whether a resumed run continues the current window. If not, only the part for the next window.
        """
        window, mean = _STATE if is_open else (("batches",), ("_shared_unit", "_unit"))
        holders = (self.window, (*window, "given")), (self, mean)
        return {name.removeprefix("_"): getattr(holder, name) for holder, names in holders for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`; ``batches`` only if ``given`` is the same in both runs."""
        if state.get("given") != self.window.given:
            state = {**state, "batches": self.window.batches}
        for holder, names in zip((self.window, self), _STATE, strict=True):
            for name in names:
                if (key := name.removeprefix("_")) in state:
                    value = state[key]
                    setattr(holder, name, value.to(self._engine.device) if isinstance(value, Tensor) else value)

    def share(self, loss: Tensor, weight: Weight | None = None) -> Tensor:
        """Return the current batch's expected share of the window's mean loss.

        May be called again for the same batch by an optimizer that evaluates the loss itself; the last call counts.

        Args:
            loss: the mean over the batch, a scalar.
            weight: the weight of the batch (such as its number of samples or tokens), above 0. Default: None, for 1.

        Raises:
            ConfigurationError: if some batches of a window have a weight and others have none.
        """
        self._count(weight)
        return self._scale_loss(loss)

    def joint_share(self, loss: Tensor | None, weight: Weight | None) -> Tensor | None:
        """Return the same as :meth:`share`, but take part in collectives. All processes call this at the same batch.

        Args:
            loss, weight: as in :meth:`share`; the loss is None if this process has none.
        """
        window = self.window
        if not (window.is_first and window.is_last):
            self._find_unit(loss is not None, weight)
        if loss is not None:
            self._count(weight)
        if self._data_parallel_size > 1 and window.is_last:
            corrects = window.is_first and (bool(self._is_weighted) or self._engine.device.type != "cpu")
            self._begin_sums(corrects)
            if corrects:
                self._has_loss = self._finish_sums()
                self.factor, self.correction = self.factor * self.correction, 1.0
        return None if loss is None else self._scale_loss(loss)

    def may_read_late(self) -> bool:
        """Return whether a weight on a device can be read after the backward pass, by :meth:`close`.

        This requires a window of one batch on one process, so that gradients can be dropped if the weight is 0. It also
        requires CUDA, where the copy does not wait for the backward pass.
        """
        engine, is_alone = self._engine, self.window.size == 1 and self._data_parallel_size == 1
        return is_alone and engine.device.type == "cuda" and engine.supports_uneven_inputs

    def share_late(self, loss: Tensor, weight: Tensor) -> Tensor:
        """Return the share of the only batch in a window; :meth:`close` reads its weight.

        Args:
            loss: the mean over the batch, a scalar.
            weight: a 0-dim tensor on the device.
        """
        if self._readback is None:
            self._readback = Readback(weight.device.type)
        self._readback.start([weight])
        self._reads_late = True
        return self.share(loss)

    def _find_unit(self, has_loss: bool, weight: Weight | None) -> None:
        """Set the unit to the mean weight of the processes' batches that have a loss. Keep it if there are none.

        A host-device synchronization, once per run: at the first batch that has a loss on any process.

        Args:
            has_loss: whether this process has a loss.
            weight: the weight of its batch; None for ``batch_weight``.
        """
        if self._data_parallel_size == 1 or self._shared_unit is not None:
            return
        weight = self.batch_weight if weight is None else weight
        weight = 1.0 if weight is None else weight
        total, count, _ = self._engine.collectives.begin_sum(weight if has_loss else 0.0, float(has_loss), 0.0)()
        if float(count):
            self._shared_unit = _positive(total / count)

    @property
    def _known_unit(self) -> Weight:
        return 1.0 if self._shared_unit is None else self._shared_unit

    def _scale_loss(self, loss: Tensor) -> Tensor:
        """Multiply the loss by the factor; without weights, divide by the size, as in a hand-written loop."""
        size = self.window.size
        if self._is_weighted or isinstance(self.factor, Tensor) or self.factor != 1.0 / size:
            return loss * self.factor
        return loss if size == 1 else loss / size

    def _count(self, weight: Weight | None) -> None:
        """Count the current batch and set the factor of its loss. ``weight`` is None for ``batch_weight``."""
        weight = self.batch_weight if weight is None else weight
        backwards, total = self._before
        if backwards and (weight is not None) is not self._is_weighted:
            raise ConfigurationError(_MIXED)
        self._is_weighted = weight is not None
        self.backwards = backwards + 1
        self._total = total + (1.0 if weight is None else weight)
        if weight is None:
            self._unit, self.factor = 1.0, 1.0 / self.window.size
            return
        if not backwards:
            self._unit = (
                _positive(weight) if self._data_parallel_size == 1 and self._shared_unit is None else self._known_unit
            )
        self.factor = weight / (self._unit * self.window.size)

    def close(self, optimizers: Iterable[Optimizer]) -> bool:
        """Correct the window's gradients to the mean over the batches that it really had.

        All data-parallel processes call this together, after the window's last backward pass. Their sums take one
        collective. A host-device synchronization only if :meth:`share_late` was called, or if this process has no loss.

        Args:
            optimizers: the optimizers of the gradients.

        Returns:
            Whether any process had a loss in the window. If not, the weights must not be updated.
        """
        if self.window.size == 1 and self._data_parallel_size == 1 and self.backwards <= 1:
            if self._reads_late:
                self._close_late(optimizers)
            return bool(self.backwards)  # one loss, its factor is exact
        if self._has_loss is None:
            if self._data_parallel_size > 1 and self._sums is None:
                self._begin_sums(corrects=False)
            self._has_loss = self._finish_sums()
            if isinstance(self.correction, Tensor) or self.correction != 1.0:
                self._engine.gradients.multiply_(optimizers, self.correction)
        return self._has_loss

    def _close_late(self, optimizers: Iterable[Optimizer]) -> None:
        """Read the weight of the only batch. If it is 0, drop the gradients, which may be 0 * inf = NaN.

        A host-device synchronization. It waits for the forward pass only; the backward pass is already queued.
        """
        assert self._readback is not None
        self._reads_late = False
        if check_weight(*self._readback.wait()) == 0.0:
            self.backwards = 0
            for optimizer in optimizers:
                self._engine.gradients.clear(optimizer)

    def _begin_sums(self, corrects: bool) -> None:
        """Start the all-reduce. ``corrects`` is whether this process corrects its loss instead of its gradients."""
        self._sums = self._engine.collectives.begin_sum(
            self._total / self._unit, float(self.backwards), float(corrects)
        )

    def _finish_sums(self) -> bool:
        """Set the correction and the unit of the next window. Return whether any process had a loss."""
        sums: list[Weight] = [self._total / self._unit, float(self.backwards), 0.0]
        if self._sums is not None:
            sums, self._sums = self._sums(), None
        total, count, corrects = sums
        if isinstance(corrects, float) and 0.0 < corrects < count:
            raise ConfigurationError(_MIXED)
        # Host-device synchronization, but only on a process without a loss in the whole window: it checks whether
        # another process had one.
        if not self.backwards and not (self._data_parallel_size > 1 and float(count)):
            return False
        if self._data_parallel_size > 1 or self._shared_unit is not None:
            self._shared_unit = _positive(self._known_unit * total / count)
        total = total if isinstance(total, float) else total.clamp_min(torch.finfo(total.dtype).tiny)
        # if this process had no loss, the others may have corrected theirs before their backward passes
        is_corrected = not self.backwards and float(corrects)
        self.correction = 1.0 if is_corrected else self.window.size * self._data_parallel_size / total
        return True

    def corrected(self, share: Tensor) -> Tensor:
        """Return a batch's real share of the window's mean loss, once the window is closed."""
        exact = isinstance(self.correction, float) and self.correction == 1.0
        return share if exact else share * self.correction


def _positive(weight: Weight) -> Weight:
    """Return ``weight``, or 1 instead of 0, without reading a tensor."""
    return weight or 1.0 if isinstance(weight, float) else torch.where(weight > 0, weight, 1.0)


def count_windows(batches: int, sizes: Iterable[int], straddle: bool) -> int:
    """Return the number of windows in several epochs.

    Args:
        batches: the number of batches in an epoch.
        sizes: the number of batches in a full window, for each epoch.
        straddle: whether a window continues in the next epoch.
    """
    windows, missing = 0, 0  # missing: number of the next epoch's batches that complete an open window
    for size in sizes:
        left = batches - missing
        if left >= 0:
            windows += math.ceil(left / size)
        missing = -left if left < 0 else -left % size if straddle else 0
    return windows
