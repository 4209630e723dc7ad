"""Callbacks: who overrides what, in which order they run, and those that come from the module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.fabric.utilities.registry import _load_external_callbacks
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder, Checkpoint, EarlyStopping, LearningRateFinder

from trainer.compat.averaging import follows_outcomes

_BASES = (Callback, LightningModule, LightningDataModule)


def overrides(owner: Any, name: str) -> bool:
    """Whether ``owner``'s method ``name`` is its own, not the empty one of Lightning's base class."""
    if name in vars(owner):
        return True
    if name == "on_train_batch_end" and follows_outcomes(owner):
        return False
    method = getattr(type(owner), name, None)
    base = next((getattr(base, name, None) for base in _BASES if isinstance(owner, base)), None)
    return method is not base


def monitors(callback: Any) -> bool:
    """Whether a callback's ``on_train_epoch_end`` comes after the module's: it reads metrics logged there."""
    return isinstance(callback, (EarlyStopping, Checkpoint))


def in_order(callbacks: Sequence[Any]) -> list[Any]:
    """Tuners first, those that save checkpoints last, the others between them as they were given."""

    def place(callback: Any) -> int:
        if isinstance(callback, (BatchSizeFinder, LearningRateFinder)):
            return 0
        return 2 if isinstance(callback, Checkpoint) else 1

    return sorted(callbacks, key=place)


def with_model_callbacks(callbacks: list[Any], module: LightningModule) -> list[Any]:
    """``callbacks`` with those of ``module.configure_callbacks()``, which replace others of the same type."""
    own = module.configure_callbacks()
    own = [own] if not isinstance(own, Sequence) else list(own)
    if not own:
        return callbacks
    types = {type(callback) for callback in own} - {Callback}
    return in_order([callback for callback in callbacks if type(callback) not in types] + own)


def external_callbacks() -> list[Any]:
    """Callbacks that installed packages register under Lightning's entry point."""
    return list(_load_external_callbacks("lightning.pytorch.callbacks_factory"))
