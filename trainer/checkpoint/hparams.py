"""Save and log hyperparameters without secrets.

Checkpoints contain hyperparameters with the changes that safe loading requires. Loggers receive OmegaConf's nodes as
plain containers, and other objects unchanged.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.parsing import clean_namespace

from trainer.checkpoint.inert import refusal
from trainer.checkpoint.plain import name_of, plain_numbers
from trainer.checkpoint.plain_form import is_config, plain, plain_dict, resolved
from trainer.common import redaction
from trainer.common.lightning_private import hparams_name_of, log_hyperparams
from trainer.errors import join_first, rank_zero_warn
from trainer.loggers import adapter
from trainer.loop.run_state import RunState

_reported: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # by module or datamodule


def hyper_parameters_of(*owners: Any) -> dict[str, Any]:
    """Return a checkpoint's entries for the hyperparameters (``save_hyperparameters``) of modules or datamodules."""
    entries: dict[str, Any] = {}
    for owner in owners:
        if owner is None or not owner.hparams:
            continue
        entries |= hparams_name_of(owner)
        given = owner.hparams
        entries[owner.CHECKPOINT_HYPER_PARAMS_KEY] = given if is_config(given) else dict(given)
        if is_config(given):
            entries[owner.CHECKPOINT_HYPER_PARAMS_TYPE] = type(given)
    return entries


def make_loadable(checkpoint: dict[str, Any], *owners: Any) -> None:
    """Change the hyperparameters in ``checkpoint`` so that they can be written and read again, and hold no secret.

    NumPy numbers become plain ones, and secrets are replaced by the interpolations that they come from. An object that
    cannot be pickled, that our reader cannot skip (:mod:`trainer.checkpoint.inert`), or that holds a secret is replaced
    by its plain form: OmegaConf configs, dataclasses and Namespaces become dicts; paths become strings; enums become
    their values; NumPy arrays become lists; timedeltas become seconds. An object without a plain form is left out, with
    a warning; in a list, None replaces it.

    Each message appears once for each module and datamodule.
    """
    for owner in owners:
        given = None if owner is None else checkpoint.get(owner.CHECKPOINT_HYPER_PARAMS_KEY)
        if is_config(given):
            if reason := refusal(given):
                left_out: list[str] = []
                entries = redaction.containers(plain(resolved(given), "", left_out))
                checkpoint[owner.CHECKPOINT_HYPER_PARAMS_KEY] = entries
                # if the type is a string, Lightning loads the hyperparameters as an `AttributeDict`
                checkpoint[owner.CHECKPOINT_HYPER_PARAMS_TYPE] = name_of(given)
                _report(owner, {}, {"hparams": reason}, left_out)
            else:
                _report(owner, {"hparams": name_of(given)}, {}, [])
        elif isinstance(given, dict):
            checkpoint[owner.CHECKPOINT_HYPER_PARAMS_KEY] = _loadable(owner, given)
        elif given is not None:  # set by a hook
            checkpoint.update(_loadable(owner, {owner.CHECKPOINT_HYPER_PARAMS_KEY: given}))


def announce(*owners: Any) -> None:
    """Print the messages about hyperparameters at the start of a run that saves checkpoints."""
    make_loadable(hyper_parameters_of(*owners), *owners)


def _loadable(owner: Any, given: dict[Any, Any]) -> dict[Any, Any]:
    entries, objects, offences = {}, {}, {}
    for name, value in redaction.containers(dict(given)).items():
        places: list[tuple[str, Any]] = []
        entries[name] = plain_numbers(value, str(name), places)
        if places:
            objects[name], offences[name] = entries[name], places
    reasons_by_name: dict[Any, str] = {}
    while objects and (combined_reason := refusal(objects)):
        refused = {name: reason for name, value in objects.items() if (reason := refusal({name: value}))}
        reasons_by_name |= refused or dict.fromkeys(objects, combined_reason)
        objects = {name: value for name, value in objects.items() if name not in reasons_by_name}
    left_out: list[str] = []
    loadable: dict[Any, Any] = {}
    for name, value in entries.items():
        loadable |= (
            redaction.containers(plain_dict({name: value}, "", left_out)) if name in reasons_by_name else {name: value}
        )
    objects_by_place = {place: name_of(value) for name in objects for place, value in offences[name]}
    reasons = {name: reason for name, reason in reasons_by_name.items() if name in loadable}
    _report(owner, objects_by_place, reasons, left_out)
    return loadable


def _report(owner: Any, objects_by_place: dict[str, str], reasons: dict[Any, str], left_out: list[str]) -> None:
    """Report once which hyperparameters are objects, which are saved in plain form and why, and which are not saved."""
    name, reported = type(owner).__name__, _reported.setdefault(owner, set())
    objects = [f"{place} ({class_})" for place, class_ in objects_by_place.items() if place not in reported]
    if objects:
        rank_zero_info(
            f"Hyperparameters of {name} are objects: {join_first(objects, 5)}. Checkpoints contain them, but only"
            f" {name}.load_from_checkpoint(..., weights_only=False), which can run any code, restores them; resuming"
            " does not need it. To exclude them: self.save_hyperparameters(ignore=[...])."
        )
    for parameter, reason in reasons.items():
        if str(parameter) not in reported:
            rank_zero_info(f"The hyperparameter {parameter} of {name} is saved in its plain form: {reason}.")
    new = [entry for entry in left_out if entry not in reported]
    if new:
        rank_zero_warn(
            f"Checkpoints do not contain these hyperparameters of {name}, because they could not be loaded safely:"
            f" {', '.join(new)}. Pass them to {name}.load_from_checkpoint, or exclude them:"
            " self.save_hyperparameters(ignore=[...])."
        )
    reported.update(objects_by_place, map(str, reasons), new)


def log_hyper_parameters(run: RunState) -> None:
    """Send the hyperparameters to the loggers, without secrets."""
    log_hyperparams(
        SimpleNamespace(  # type: ignore[arg-type]
            loggers=[_WithoutSecrets(logger) for logger in run.loggers],
            lightning_module=run.module,
            datamodule=run.datamodule,
        )
    )


class _WithoutSecrets:
    """Wraps a logger: removes secrets, and hyperparameters that the run in MLflow already has."""

    def __init__(self, logger: Any) -> None:
        self.log_graph = logger.log_graph
        self.save = logger.save
        self._logger = logger

    def log_hyperparams(self, hparams: dict[str, Any]) -> None:
        """Pass hyperparameters on to the logger, with OmegaConf nodes as plain containers."""
        given = {name: resolved(value) if is_config(value) else value for name, value in hparams.items()}
        self._logger.log_hyperparams(adapter(self._logger).new_parameters(redaction.containers(given)))


def drop_unpicklable(module: Any) -> None:
    """Remove entries from ``module.hparams`` that cannot be pickled."""
    if hasattr(module, "hparams"):
        clean_namespace(module.hparams)
