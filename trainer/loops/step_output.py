"""What ``training_step`` returns, and what is made of it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.engine.protocol import Weight
from trainer.errors import ConfigurationError

NOTHING: Mapping[str, Any] = {"loss": torch.zeros(()), "weight": 0.0}
"""The output of a batch that is None, for which ``training_step`` is not called."""


def loss_in(output: Any) -> tuple[Tensor | None, Weight | None]:
    """The loss in what ``training_step`` returned, and the weight beside it.

    None means that there is nothing to learn from this batch. ``training_step`` returning None draws a warning; a
    weight of 0 does not.

    Raises:
        ConfigurationError: something else than a tensor, a dict with one, or None; or a weight that is no number.
    """
    if isinstance(output, Tensor):
        return output, None
    if output is None:
        warnings.warn(
            "`training_step` returned `None`. If this was on purpose, ignore this warning: there is nothing to learn"
            " from this batch.",
            stacklevel=2,
        )
        return None, None
    if not isinstance(output, Mapping):
        raise ConfigurationError(
            "In automatic optimization, `training_step` must return a Tensor, a dict, or None (where the step"
            f" will be skipped). Got {type(output).__name__}."
        )
    loss, weight = output.get("loss"), weight_in(output)
    if not isinstance(loss, Tensor):
        raise ConfigurationError(
            "In automatic_optimization, when `training_step` returns a dict, the 'loss' key needs to be present"
            f" and hold a tensor. Got the keys {list(output)} and loss={loss!r}."
        )
    counts_nothing = isinstance(weight, float) and weight == 0.0  # a tensor is not read
    return (None, None) if counts_nothing else (loss, weight)


def outputs_of(loss: Tensor | None, output: Any) -> dict[str, Any] | None:
    """Return the outputs that ``on_train_batch_end`` receives: the detached loss, and the other items of a dict.

    As in Lightning, only the loss is detached. The other items keep their graphs until the batch ends.

    Args:
        loss: the loss multiplied by its share of the accumulation window, a scalar; None if the batch has no loss.
        output: what ``training_step`` returned, or ``NOTHING`` if the batch is None.

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


def weight_in(output: object) -> Weight | None:
    """The ``"weight"`` that ``training_step`` returned beside its loss; None without one.

    Returns:
        A number, or a 0-dim float32 tensor if it is on a device: reading it would be a host-device synchronisation.

    Raises:
        ConfigurationError: not a number or a tensor of one element, or negative, or not finite.
    """
    if not isinstance(output, Mapping) or "weight" not in output:
        return None
    weight = output["weight"]
    if isinstance(weight, Tensor) and weight.numel() == 1:
        if weight.device.type != "cpu":
            return weight.detach().reshape(()).float()
        weight = weight.item()
    if isinstance(weight, (int, float)) and not isinstance(weight, bool) and 0 <= weight < math.inf:
        return float(weight)
    raise ConfigurationError(
        f"Got 'weight': {weight!r} in the dict that `training_step` returned, expected one number, at least 0: how much"
        " the batch counts in an accumulation window (samples, tokens). Call it otherwise if you mean something else."
    )
