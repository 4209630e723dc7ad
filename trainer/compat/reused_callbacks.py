"""Callbacks of Lightning that the fit of another Trainer has used: their results of that fit are reset.

Programs and libraries create a callback once and pass it to several Trainers, such as one for each fold of a
cross-validation. Otherwise, an ``EarlyStopping`` would compare the scores with those of the earlier fit.
"""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from functools import partial
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

from trainer.compat.modules import assigned_by_bases

if TYPE_CHECKING:
    from trainer.trainer import Trainer

_KINDS = (EarlyStopping, ModelCheckpoint, StochasticWeightAveraging, Timer, WeightAveraging)
_FITS: WeakKeyDictionary[Callback, tuple[ref[Trainer], dict[str, Any], dict[str, Any]]] = WeakKeyDictionary()
"""The Trainer of the last fit, and the attributes before the first fit and after the last one."""


def reset_results(trainer: Trainer, session: ExitStack) -> None:
    """Reset the results of callbacks that the fit of another Trainer has used. Called when a fit starts.

    Attributes that the user has set after that fit are kept.
    """
    for callback in trainer.callbacks:
        if not isinstance(callback, _KINDS):
            continue
        kind: type = type(callback)
        own, names = vars(callback), assigned_by_bases(kind)
        owner, first, last = _FITS.get(callback, (None, {}, {}))
        if owner is None:
            first = {name: deepcopy(value) for name, value in own.items() if name in names}
        elif (is_timer := isinstance(callback, Timer)) or owner() is not trainer:  # each fit has its own time
            changed = {name for name in first if is_timer or own.get(name) is last.get(name)}
            own.update({name: deepcopy(first[name]) for name in changed})
        _FITS[callback] = ref(trainer), first, {}
        session.callback(partial(_note, callback, ref(trainer), first))


def _note(callback: Callback, owner: ref[Trainer], first: dict[str, Any]) -> None:
    _FITS[callback] = owner, first, dict(vars(callback))
