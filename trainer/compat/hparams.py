"""Hyper-parameters: into checkpoints and loggers."""

from __future__ import annotations

from typing import Any

import lightning
from lightning.pytorch.loggers.utilities import _log_hyperparams
from lightning.pytorch.utilities.imports import _OMEGACONF_AVAILABLE
from lightning.pytorch.utilities.parsing import clean_namespace


def as_lightning(loops: dict[str, Any], *owners: Any) -> dict[str, Any]:
    """The entries of a checkpoint that are there for Lightning's sake: its version, ``loops``, hyper-parameters."""
    return {"pytorch-lightning_version": lightning.__version__, "loops": loops, **hyper_parameters_of(*owners)}


def hyper_parameters_of(*owners: Any) -> dict[str, Any]:
    """What ``save_hyperparameters`` of a module or datamodule kept, under the keys of a checkpoint."""
    kept: dict[str, Any] = {}
    for owner in owners:
        if owner is None or not owner.hparams:
            continue
        if hasattr(owner, "_hparams_name"):
            kept[owner.CHECKPOINT_HYPER_PARAMS_NAME] = owner._hparams_name
        if _is_omegaconf(owner.hparams):  # as it is: with interpolations, and access by attribute
            kept[owner.CHECKPOINT_HYPER_PARAMS_KEY] = owner.hparams
            kept[owner.CHECKPOINT_HYPER_PARAMS_TYPE] = type(owner.hparams)
        else:
            kept[owner.CHECKPOINT_HYPER_PARAMS_KEY] = dict(owner.hparams)
    return kept


def _is_omegaconf(hparams: Any) -> bool:
    if not _OMEGACONF_AVAILABLE:
        return False
    from omegaconf import Container

    return isinstance(hparams, Container)


def log_hyper_parameters(trainer: Any) -> None:
    """Send them to the loggers."""
    _log_hyperparams(trainer)


def drop_unpicklable(module: Any) -> None:
    """Remove from ``module.hparams`` what could not be sent to another process."""
    if hasattr(module, "hparams"):
        clean_namespace(module.hparams)
