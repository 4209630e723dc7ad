"""Callbacks of Lightning that the fit of another Trainer has used: their results of that fit are reset.

Programs and libraries create a callback once and pass it to several Trainers, such as one for each fold of a
cross-validation. Otherwise, an ``EarlyStopping`` would compare the scores with those of the earlier fit.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_RESULTS: dict[type[Callback], tuple[str, ...]] = {
    EarlyStopping: (
        "wait_count", "stopped_epoch", "best_score", "stopping_reason", "stopping_reason_message",
        "_check_on_train_epoch_end",
    ),
    ModelCheckpoint: (
        "dirpath", "current_score", "best_k_models", "kth_best_model_path", "kth_value", "best_model_score",
        "best_model_path", "last_model_path", "_last_global_step_saved", "_last_checkpoint_saved",
        "_defer_save_until_validation",
    ),
    StochasticWeightAveraging: (
        "n_averaged", "_init_n_averaged", "_initialized", "_latest_update_epoch", "_scheduler_state",
        "_swa_epoch_start", "_swa_lrs",
    ),
    Timer: ("_start_time", "_end_time", "_offset"),
    WeightAveraging: ("_latest_update_step", "_latest_update_epoch"),
}  # fmt: skip
"""The attributes that a fit sets."""

_FIRST: WeakKeyDictionary[Callback, tuple[ref[Trainer], dict[str, Any]]] = WeakKeyDictionary()
"""The Trainer of the last fit with a callback, and the values of its attributes before the first fit."""


def reset_results(trainer: Trainer) -> None:
    """Reset the results of callbacks that the fit of another Trainer has used. Called when a fit starts."""
    for callback in trainer.callbacks:
        names = next((names for kind, names in _RESULTS.items() if isinstance(callback, kind)), ())
        if not names:
            continue
        owner, first = _FIRST.get(callback, (None, {}))
        if owner is None:
            first = {name: deepcopy(value) for name, value in vars(callback).items() if name in names}
            if first.get("dirpath") is not None:
                del first["dirpath"]  # not set by the fit
        elif owner() is not trainer or isinstance(callback, Timer):  # each fit has its own time
            vars(callback).update(deepcopy(first))
        _FIRST[callback] = ref(trainer), first
