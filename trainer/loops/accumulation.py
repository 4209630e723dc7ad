"""Accumulation windows: the batches that make one weight update, and the weighted mean over them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.engine.protocol import Engine, Weight
from trainer.errors import ConfigurationError

_STATE = (
    "batches", "size", "backwards", "is_first", "is_last", "factor", "correction", "_position", "_unit", "_total",
    "_is_weighted",
)  # fmt: skip


class AccumulationWindow:
    """The batches that make one weight update.

    A window has ``batches`` batches, or as many as the epoch still has. The update is computed from the weighted mean
    ``sum(w * g) / sum(w)`` of the gradients ``g`` of its batches' losses, over all processes. A batch's weight ``w`` is
    1 unless ``training_step`` returned one; a batch whose ``training_step`` returned None is not counted.

    Nobody knows ``sum(w)`` before the window's last forward pass. So each loss gets the share that is likely
    (:meth:`share`): its weight relative to the window's first one, over the window's size. Thus the loss keeps its
    ordinary size while it is scaled for float16, whatever the unit of the weights. Before the last backward pass, loss
    and gradients are corrected by what has really come (:meth:`close`). Mostly that is nothing.

    Args:
        batches: ``accumulate_grad_batches``, the number of batches in a full window.
        straddles_epochs: whether a window goes on in the next epoch. By default an epoch's end closes it.

    Attributes:
        batches: may be changed at any time; the next window follows it.
        size: batches in the current window, as far as its start could tell.
        backwards: batches in the current window so far that had a loss.
        is_first, is_last: whether the current batch opens, and closes, the window.
        factor: what the current batch's loss was multiplied by, to be its share.
        correction: what :meth:`close` has multiplied all shares by.

    Raises:
        ConfigurationError: ``batches`` is not a whole number, or below 1.
    """

    def __init__(self, batches: int = 1, straddles_epochs: bool = False) -> None:
        if not isinstance(batches, int) or isinstance(batches, bool) or batches < 1:
            raise ConfigurationError(
                f"Got accumulate_grad_batches={batches!r}, expected a whole number of batches, at least 1."
            )
        self.batches = batches
        self.straddles_epochs = straddles_epochs
        self.size = batches
        self.backwards = 0
        self.is_first = True
        self.is_last = True
        self.factor: Weight = 1.0
        self.correction: Weight = 1.0
        self._position = -1
        self._unit: Weight = 1.0  # the first weight, which the others are measured by
        self._total: Weight = 0.0  # sum of the weights
        self._is_weighted: bool | None = None
        self._before: tuple[int, Weight] = (0, 0.0)  # backwards and total without the current batch

    @property
    def is_open(self) -> bool:
        """Whether batches have been accumulated that no weight update has used yet."""
        return not self.is_last

    def reset(self) -> None:
        """Forget the current window; the next batch opens a new one."""
        self._position = -1
        self.is_last = True

    def advance(self, batches_left: float, is_last_batch: bool, is_final_epoch: bool = True) -> None:
        """Take in one more batch.

        Args:
            batches_left: batches of the epoch from this one on, itself included; inf where nobody knows.
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

    def mark(self) -> dict[str, Any]:
        """Where the window stands, for :meth:`go_back`."""
        return dict(vars(self))

    def go_back(self, mark: dict[str, Any]) -> None:
        """Stand where the window stood: an optimizer that evaluates the loss itself wants a batch again."""
        vars(self).update(mark)

    def state_dict(self) -> dict[str, Any]:
        """Where the window stands, for a checkpoint. The gradients are the parameters'."""
        return {name.removeprefix("_"): getattr(self, name) for name in _STATE if hasattr(self, name)}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Stand where the window stood; its number of batches, too, until the next epoch says otherwise."""
        for name in _STATE:
            value = state[name.removeprefix("_")]
            setattr(self, name, value.to(device) if isinstance(value, Tensor) else value)

    def next_part(self) -> None:
        """The next loss is that of another part of the current batch (``trainer.loops.splitting``): weights add up."""
        self._before = self.backwards, self._total

    def share(self, loss: Tensor, weight: Weight | None = None) -> Tensor:
        """The current batch's likely share of the window's mean loss.

        May be called again for the same batch, by an optimizer that evaluates the loss itself; the last call counts.

        Args:
            loss: the mean over the batch, a scalar.
            weight: how much the batch counts (its samples, its tokens); above 0. None for 1.

        Raises:
            ConfigurationError: some batches of a window come with a weight and others without.
        """
        backwards, total = self._before
        if backwards and (weight is not None) is not self._is_weighted:
            raise ConfigurationError(
                "Got a `training_step` that returned a 'weight' for some batches of an accumulation window and none for"
                " others, expected one for all of them or for none. Return None in the place of a batch to leave out."
            )
        self._is_weighted = weight is not None
        self.backwards = backwards + 1
        self._total = total + (1.0 if weight is None else weight)
        if weight is None:
            self._unit, self.factor = 1.0, 1.0 / self.size
            return loss if self.size == 1 else loss / self.size
        if not backwards:
            self._unit = weight if isinstance(weight, float) else torch.where(weight > 0, weight, 1.0)
        self.factor = weight / (self._unit * self.size)
        return loss * self.factor

    def close(self, loss: Tensor | None, optimizers: Iterable[Optimizer], engine: Engine) -> Tensor | None:
        """Make the window's gradients the mean over what it really holds. Called before its last backward pass.

        On several processes all of them come here. There, the sum of the weights takes one exchange of one number,
        without waiting for a GPU, and a process without a loss gets a loss of zero, whose backward pass the others'
        gradient synchronisation waits for.

        Args:
            loss: the last batch's share; None if it had no loss.
            optimizers: whose gradients are the earlier batches'.
            engine: adds up over the processes.

        Returns:
            What to run the last backward pass on; None for none.
        """
        total, processes = self._total, engine.world_size
        if processes > 1:
            total = engine.sum(total)
            # A process that had no loss in the whole window looks: if the others had none either, there is no update.
            # The others need not look; they know. A host-device synchronisation, but for empty windows alone.
            if not self.backwards and not float(total):
                return None
        if self.backwards:
            total = total if isinstance(total, float) else total.clamp_min(torch.finfo(total.dtype).tiny)
            correction = self._unit * self.size * processes / total
            if isinstance(correction, Tensor) or correction != 1.0:
                gradients = gradients_of(optimizers)
                if gradients:
                    torch._foreach_mul_(gradients, correction)
                self.factor, self.correction = self.factor * correction, correction
                loss = None if loss is None else loss * correction
        if loss is None and processes > 1:
            loss = zero_loss(engine.model.parameters())
            engine.expect_backward(loss)
        return loss


def count_windows(batches: int, sizes: Iterable[int], straddle: bool) -> int:
    """How many windows there are in epochs of ``batches`` batches, with windows of ``sizes[i]`` in epoch ``i``."""
    windows, lacking = 0, 0  # what the window that is open at an epoch's end takes from the next
    for size in sizes:
        left = batches - lacking
        if left >= 0:
            windows += math.ceil(left / size)
        lacking = -left if left < 0 else -left % size if straddle else 0
    return windows


def gradients_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """The gradients of all parameters that have one."""
    return [p.grad for o in optimizers for group in o.param_groups for p in group["params"] if p.grad is not None]


def zero_loss(parameters: Iterable[Tensor]) -> Tensor:
    """A loss that is 0 and has a gradient of exact zeros for every trainable parameter.

    A process whose ``training_step`` returned None runs its backward over this one, so that the other processes'
    gradient synchronisation finds a partner. An empty slice, not ``parameter * 0``: 0 times inf is nan.
    """
    trainable = [p for p in parameters if p.requires_grad]
    return torch.stack([p.reshape(-1)[:0].sum() for p in trainable]).sum()
