"""Optuna studies: the sweep opens its study, and its runs report to it. Imports Optuna at first use, and no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.errors import ConfigurationError, did_you_mean

_PRUNERS = {"median": "MedianPruner", "hyperband": "HyperbandPruner", "none": "NopPruner"}
_SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "grid": "RandomSampler"}


def make_pruner(settings: Mapping[str, Any] | None) -> Any:
    """Build a pruner of Optuna.

    Args:
        settings: ``name``, one of median, hyperband and none, and arguments of Optuna's class. None for no pruner.

    Raises:
        ConfigurationError: if the name is unknown, or the class does not take an argument.
    """
    import optuna

    return _make(optuna.pruners, _PRUNERS, "pruner", settings or {"name": "none"})


def make_sampler(settings: Mapping[str, Any], trials: int) -> Any:
    """Build a sampler of Optuna.

    Args:
        settings: ``name``, one of tpe, random and grid, and arguments of Optuna's class. The points of a grid
            are put into the study's queue, so the grid's sampler has nothing to do.
        trials: number of trials in the study; it changes the seed, so that resumed studies draw new points.

    Raises:
        ConfigurationError: if the name is unknown, or the class does not take an argument.
    """
    import optuna

    seed = {"seed": settings["seed"] + trials} if settings.get("seed") is not None else {}
    return _make(optuna.samplers, _SAMPLERS, "sampler", {**settings, **seed})


def _make(module: Any, classes: Mapping[str, str], kind: str, settings: Mapping[str, Any]) -> Any:
    arguments = dict(settings)
    name = str(arguments.pop("name", None))
    if name not in classes:
        expected = f"expected one of {', '.join(classes)}.{did_you_mean(name, classes)}"
        raise ConfigurationError(f"The {kind} is {name}, {expected}")
    try:
        return getattr(module, classes[name])(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"The {kind} {name} does not take these settings: {error}.") from error


def trial_of(storage: str, study_name: str, number: int, pruner: Mapping[str, Any] | None) -> Any:
    """Return a trial of a study, so that a process that has not started the trial can report to it."""
    import optuna

    opened = optuna.storages.get_storage(storage)
    study = optuna.load_study(study_name=study_name, storage=opened, pruner=make_pruner(pruner))
    trial = opened.get_trial_id_from_study_id_trial_number(opened.get_study_id_from_name(study_name), number)
    return optuna.trial.Trial(study, trial)
