"""Lightning's weight averaging, without skipped steps.

``WeightAveraging`` averages in ``on_train_batch_end``, after each optimizer step that ``trainer.global_step`` counts:
skipped ones too. Here the same method runs when the outcome of an update is known, unless it was skipped. The weights
are still those of that update, also if the outcome arrives late.

A subclass that overrides ``on_train_batch_end`` is called after each batch, as usual. Its ``should_update`` is only
called for steps that were not skipped, which waits for a late outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import WeightAveraging
from torch.optim import Optimizer

from trainer.state.outcome import StepOutcome

_HOOK, _QUESTION, _SWAP = "on_after_optimizer_step", "should_update", "_swap_models"


def follows_outcomes(callback: Any) -> bool:
    """Whether a callback's ``on_train_batch_end`` runs with an update's outcome, not after the batch."""
    return isinstance(callback, WeightAveraging) and _HOOK in vars(callback)


def attach_averaging(trainer: Any) -> None:
    """Let the averaging callbacks leave skipped steps out."""
    for callback in trainer.callbacks:
        if not isinstance(callback, WeightAveraging):
            continue
        vars(callback)[_SWAP] = _Swap(callback)
        if type(callback).on_train_batch_end is WeightAveraging.on_train_batch_end:
            vars(callback)[_HOOK] = partial(_average, callback)
        elif trainer.scaler.skips_steps:
            vars(callback)[_QUESTION] = partial(_unless_skipped, trainer, callback.should_update)


def detach_averaging(callbacks: Iterable[Any]) -> None:
    """Undo :func:`attach_averaging`."""
    for callback in callbacks:
        if isinstance(callback, WeightAveraging):
            for name in (_HOOK, _QUESTION, _SWAP):
                vars(callback).pop(name, None)


@contextmanager
def training_weights(callbacks: Iterable[Any], module: LightningModule) -> Iterator[None]:
    """A context for checkpoints: the module has its training weights, also during an evaluation of the average."""
    swaps = [vars(callback).get(_SWAP) for callback in callbacks if isinstance(callback, WeightAveraging)]
    swapped = [swap for swap in swaps if swap is not None and swap.is_swapped]
    for swap in swapped:
        swap(module)
    try:
        yield
    finally:
        for swap in swapped:
            swap(module)


class _Swap:
    """``WeightAveraging._swap_models`` of one callback, which counts whether the models are swapped."""

    def __init__(self, callback: WeightAveraging) -> None:
        self.is_swapped = False
        self._swap = partial(type(callback)._swap_models, callback)

    def __call__(self, module: LightningModule) -> None:
        self._swap(module)
        self.is_swapped = not self.is_swapped


def _average(
    callback: WeightAveraging, trainer: Any, pl_module: LightningModule, optimizer: Optimizer, outcome: StepOutcome
) -> None:
    is_last = optimizer is trainer.optimizers[outcome.optimizers[-1]]  # called for each; averaged once
    if is_last and len(outcome.skipped_optimizers) < len(outcome.optimizers):
        callback.on_train_batch_end(trainer, pl_module, {}, None, trainer.progress.batch_idx)


def _unless_skipped(
    trainer: Any, ask: Callable[..., bool], step_idx: int | None = None, epoch_idx: int | None = None
) -> bool:
    if step_idx is not None:
        outcome = trainer.step_outcome  # waits for a fused optimizer on a GPU
        if outcome is not None and len(outcome.skipped_optimizers) == len(outcome.optimizers):
            return False
    return ask(step_idx=step_idx, epoch_idx=epoch_idx)
