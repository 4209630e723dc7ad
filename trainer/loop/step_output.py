"""The output of ``training_step``: its loss, its weight, and the outputs for the hooks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from trainer.errors import ConfigurationError, warn

Weight = float | Tensor
"""Weight of a loss or metric: a number, or a 0-dim tensor on the device if reading it would synchronize."""

NOTHING: Mapping[str, Any] = {"loss": torch.zeros(()), "weight": 0.0}
"""The output of a batch that is None, for which ``training_step`` is not called."""


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
            " from this batch.",
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
