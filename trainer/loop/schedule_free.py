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
    return [
        optimizer
        for optimizer in optimizers
        if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
    ]


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


def use_averages(optimizers: Iterable[Any]) -> list[Any]:
    """Switch schedule-free optimizers to their averages. Return those that had the training weights until now."""
    training = [
        optimizer for optimizer in schedule_free(optimizers) if not any(_COPY in state for state in _states(optimizer))
    ]
    for optimizer in training:
        optimizer.eval()
    return training


@contextmanager
def averaged(optimizers: Iterable[Any]) -> Iterator[None]:
    """Return a context for validations and checkpoints: the module has the averages of schedule-free optimizers."""
    training = use_averages(optimizers)
    try:
        yield
    finally:
        for optimizer in training:
            optimizer.train()


def _states(optimizer: Any) -> list[dict[str, Any]]:
    # a parameter without a state has not been updated: both weights are equal
    return [optimizer.state.get(parameter, {}) for parameter in parameters_of(optimizer)]


def _keep_and_average(optimizer: Any, average: Callable[[], Any]) -> None:
    for parameter, state in zip(parameters_of(optimizer), _states(optimizer), strict=True):
        if _COPY not in state:
            state[_COPY] = parameter.detach().clone()
    average()


@torch.no_grad()
def _train_and_restore(optimizer: Any, train: Callable[[], Any]) -> None:
    train()
    for parameter, state in zip(parameters_of(optimizer), _states(optimizer), strict=True):
        if (copy := state.pop(_COPY, None)) is not None:
            parameter.copy_(copy)
