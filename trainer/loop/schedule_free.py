"""Schedule-free optimizers: those that have ``train()`` and ``eval()``, and hold the training weights and an average.

A forward pass in training uses the training weights. Validation, test, predictions and checkpoints use the average,
which ``eval()`` computes from them. ``train()`` computes the training weights again, but not the same bits. Therefore
``eval()`` also stores a copy of each training weight in the optimizer's state, and ``train()`` restores it: a run does
not depend on its validations and checkpoints, and a checkpoint contains what a resumed run needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from trainer.common.module_tree import parameters_of
from trainer.common.session import Session

_COPY = "training_weight"


def schedule_free(optimizers: Iterable[Any]) -> list[Any]:
    """Return the optimizers that have ``train()`` and ``eval()``."""
    return [one for one in optimizers if callable(getattr(one, "train", None)) and callable(getattr(one, "eval", None))]


def prepare(wrapped: Any, session: Session) -> None:
    """Make ``train()`` of a schedule-free optimizer undo ``eval()`` exactly, until ``session`` closes.

    Args:
        wrapped: Lightning's wrapper of the optimizer. The methods of both are replaced, because hooks may call them.
        session: restores the methods.
    """
    optimizer = wrapped.optimizer
    average = partial(_keep_and_average, optimizer, optimizer.eval)
    train = partial(_train_and_restore, optimizer, optimizer.train)
    for owner in (optimizer, wrapped):
        session.replace(owner, "eval", average)
        session.replace(owner, "train", train)


def use_averages(optimizers: Iterable[Any]) -> None:
    """Leave the averages of schedule-free optimizers in the module, at the end of a fit."""
    for optimizer in schedule_free(optimizers):
        optimizer.eval()


@contextmanager
def averaged(optimizers: Iterable[Any]) -> Iterator[None]:
    """Return a context for validations and checkpoints: the module has the averages of schedule-free optimizers."""
    training = [optimizer for optimizer in schedule_free(optimizers) if not any(map(_has_copy, _states(optimizer)))]
    for optimizer in training:
        optimizer.eval()
    try:
        yield
    finally:
        for optimizer in training:
            optimizer.train()


def _states(optimizer: Any) -> list[dict[str, Any]]:
    return [optimizer.state.get(parameter, {}) for parameter in parameters_of(optimizer)]


def _has_copy(state: dict[str, Any]) -> bool:
    return _COPY in state


def _keep_and_average(optimizer: Any, average: Callable[[], Any]) -> None:
    for parameter, state in zip(parameters_of(optimizer), _states(optimizer), strict=True):
        if state and _COPY not in state:  # without a state, both weights are equal
            state[_COPY] = parameter.detach().clone()
    average()


@torch.no_grad()
def _train_and_restore(optimizer: Any, train: Callable[[], Any]) -> None:
    train()
    for parameter, state in zip(parameters_of(optimizer), _states(optimizer), strict=True):
        if (copy := state.pop(_COPY, None)) is not None:
            parameter.copy_(copy)
