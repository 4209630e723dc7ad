"""Hyper-parameters: into checkpoints as they were given, into loggers as plain containers; without secrets."""

from __future__ import annotations

import dataclasses
import enum
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date, timedelta
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import lightning
import torch
from lightning.pytorch.loggers.utilities import _log_hyperparams
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.parsing import clean_namespace
from omegaconf import Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from trainer import redaction
from trainer.checkpoint.inert import refusal
from trainer.checkpoint.plain import name_of, plain_numbers

_LEAVES = (bool, int, float, complex, str, bytes)
_KEPT = (torch.Tensor, torch.Size, torch.dtype, torch.device)

_reported: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # by module or datamodule


def as_lightning(loops: dict[str, Any], *owners: Any) -> dict[str, Any]:
    """The entries of a checkpoint that Lightning needs: its version, ``loops``, hyper-parameters."""
    return {"pytorch-lightning_version": lightning.__version__, "loops": loops, **hyper_parameters_of(*owners)}


def hyper_parameters_of(*owners: Any) -> dict[str, Any]:
    """The hyper-parameters of modules or datamodules (``save_hyperparameters``), under the keys of a checkpoint."""
    kept: dict[str, Any] = {}
    for owner in owners:
        if owner is None or not owner.hparams:
            continue
        if hasattr(owner, "_hparams_name"):
            kept[owner.CHECKPOINT_HYPER_PARAMS_NAME] = owner._hparams_name
        given = owner.hparams
        kept[owner.CHECKPOINT_HYPER_PARAMS_KEY] = given if isinstance(given, Container) else dict(given)
        if isinstance(given, Container):
            kept[owner.CHECKPOINT_HYPER_PARAMS_TYPE] = type(given)
    return kept


def settle(checkpoint: dict[str, Any], *owners: Any) -> None:
    """Change the hyper-parameters in ``checkpoint`` so that they can be written and read again, and hold no secret.

    Numbers of numpy become plain ones, and secrets the text that names them. An object that cannot be pickled, that our
    reader cannot skip (:mod:`trainer.checkpoint.inert`), or that holds a secret is replaced by its plain form: a dict
    for an OmegaConf config, a dataclass or a Namespace, a text for a path, the value of an enum, a list for a numpy
    array, the seconds of a timedelta. An object without a plain form is left out, with a warning.

    Each message appears once for each module and datamodule.
    """
    for owner in owners:
        given = None if owner is None else checkpoint.get(owner.CHECKPOINT_HYPER_PARAMS_KEY)
        if isinstance(given, Container):
            if reason := refusal(given):
                left_out: list[str] = []
                made = redaction.containers(plain(_resolved(given), "", left_out))
                # a text makes Lightning load it as a dict with access by attribute
                checkpoint[owner.CHECKPOINT_HYPER_PARAMS_TYPE] = name_of(given)
                _tell(owner, {}, {"hparams": reason}, left_out)
            else:
                made = given
                _tell(owner, {"hparams": name_of(given)}, {}, [])
            checkpoint[owner.CHECKPOINT_HYPER_PARAMS_KEY] = made
        elif isinstance(given, dict):
            checkpoint[owner.CHECKPOINT_HYPER_PARAMS_KEY] = _settled(owner, given)
        elif given is not None:  # a hook has put it there
            checkpoint.update(_settled(owner, {owner.CHECKPOINT_HYPER_PARAMS_KEY: given}))


def announce(*owners: Any) -> None:
    """At the start of a run that saves checkpoints: print the messages about hyper-parameters now."""
    settle(hyper_parameters_of(*owners), *owners)


def _settled(owner: Any, given: dict[Any, Any]) -> dict[Any, Any]:
    made, objects, offences = {}, {}, {}
    for name, value in redaction.containers(dict(given)).items():
        found: list[tuple[str, Any]] = []
        made[name] = plain_numbers(value, str(name), found)
        if found:
            objects[name], offences[name] = made[name], found
    reasons: dict[Any, str] = {}
    while objects and (reason := refusal(objects)):
        bad = {name: why for name, value in objects.items() if (why := refusal({name: value}))}
        reasons |= bad or dict.fromkeys(objects, reason)
        objects = {name: value for name, value in objects.items() if name not in reasons}
    left_out: list[str] = []
    settled: dict[Any, Any] = {}
    for name, value in made.items():
        settled |= redaction.containers(_plain_dict({name: value}, "", left_out)) if name in reasons else {name: value}
    kept = {place: name_of(value) for name in objects for place, value in offences[name]}
    _tell(owner, kept, {name: why for name, why in reasons.items() if name in settled}, left_out)
    return settled


def plain(value: Any, place: str, left_out: list[str]) -> Any:
    """``value`` as plain containers.

    Args:
        value: anything.
        place: where it stands, for ``left_out``.
        left_out: gets the place and the type of each value without a plain form. Containers lose it; alone it becomes
            None.
    """
    if value is None or type(value) in _LEAVES or isinstance(value, _KEPT):
        return value
    if isinstance(value, enum.Enum):
        return plain(value.value, place, left_out) if _is_simple(value.value) else value.name
    for kind in _LEAVES:
        if isinstance(value, kind):
            return kind(value)  # type: ignore[arg-type]  # of a class of its own
    if isinstance(value, Container):
        value = _resolved(value)
    elif isinstance(value, Namespace):
        value = vars(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
    elif type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        value = value.tolist()  # arrays, and scalars
        if type(value) in _LEAVES:
            return value
    if isinstance(value, Mapping):
        return _plain_dict(value, place, left_out)
    if isinstance(value, (list, tuple, set, frozenset, deque, range)):
        children = [plain(child, f"{place}[{index}]", left_out) for index, child in enumerate(value)]
        return tuple(children) if isinstance(value, tuple) else children
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, date):  # and datetime
        return value.isoformat()
    safe = torch.serialization.get_safe_globals()  # classes, or such with another name
    if any(type(value) is (entry[0] if isinstance(entry, tuple) else entry) for entry in safe):
        return value
    left_out.append(f"{place} ({type(value).__module__}.{type(value).__qualname__})".replace("(builtins.", "("))
    return None


def _plain_dict(value: Mapping[Any, Any], place: str, left_out: list[str]) -> dict[Any, Any]:
    made = {}
    for name, child in value.items():
        here = f"{place}.{name}" if place else str(name)
        missing = len(left_out)
        new = plain(child, here, left_out)
        if new is not None or child is None or len(left_out) == missing:
            made[name if type(name) in _LEAVES else str(name)] = new
    return made


def _is_simple(value: Any) -> bool:
    return value is None or isinstance(value, _LEAVES)


def _resolved(config: Container) -> Any:
    """``config`` as plain containers. A value from the environment stays the text that refers to it."""
    try:
        with _environment_unread():
            return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException:
        return OmegaConf.to_container(config, resolve=False)


@contextmanager
def _environment_unread() -> Iterator[None]:
    reader = redaction.environment_value  # which is at least as good as OmegaConf's own
    OmegaConf.register_new_resolver("oc.env", _unread, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", reader, replace=True)


def _unread(*arguments: Any) -> Any:
    try:
        value = oc.env(*arguments)
    except KeyError:
        value = ""
    return redaction.stand_in(str(arguments[0])) if value is not None else None


def _tell(owner: Any, kept: dict[str, str], reasons: dict[Any, str], left_out: list[str]) -> None:
    """Report once which are objects, which are saved in their plain form and why, and which are not saved."""
    name, said = type(owner).__name__, _reported.setdefault(owner, set())
    objects = [f"{place} ({kind})" for place, kind in kept.items() if place not in said]
    if objects:
        listed = ", ".join(objects[:5]) + (f" and {len(objects) - 5} more" if len(objects) > 5 else "")
        rank_zero_info(
            f"Hyper-parameters of {name} are objects: {listed}. Checkpoints hold them, and only"
            f" {name}.load_from_checkpoint(..., weights_only=False), which runs what a file asks for, brings them back;"
            " to resume, it is not needed. For files that load without it, leave them out:"
            " self.save_hyperparameters(ignore=[...])."
        )
    for parameter, reason in reasons.items():
        if str(parameter) not in said:
            rank_zero_info(f"The hyper-parameter {parameter} of {name} is saved in its plain form: {reason}.")
    new = [entry for entry in left_out if entry not in said]
    if new:
        rank_zero_warn(
            f"Checkpoints do not hold these hyper-parameters of {name}, which have no plain form and could not be"
            f" loaded safely: {', '.join(new)}. Pass them to {name}.load_from_checkpoint, or leave them out:"
            " self.save_hyperparameters(ignore=[...])."
        )
    said.update(kept, map(str, reasons), new)


def log_hyper_parameters(trainer: Any) -> None:
    """Send the hyper-parameters to the loggers, without secrets."""
    _log_hyperparams(
        SimpleNamespace(  # type: ignore[arg-type]
            loggers=[_WithoutSecrets(logger) for logger in trainer.loggers],
            lightning_module=trainer.lightning_module,
            datamodule=trainer.datamodule,
        )
    )


class _WithoutSecrets:
    """A logger that removes secrets from the hyper-parameters it is given."""

    def __init__(self, logger: Any) -> None:
        self.log_graph = logger.log_graph
        self.save = logger.save
        self._log = logger.log_hyperparams

    def log_hyperparams(self, hparams: dict[str, Any]) -> None:
        """Pass on; an OmegaConf node as plain containers."""
        given = {name: _resolved(value) if isinstance(value, Container) else value for name, value in hparams.items()}
        self._log(redaction.containers(given))


def drop_unpicklable(module: Any) -> None:
    """Remove from ``module.hparams`` what cannot be pickled."""
    if hasattr(module, "hparams"):
        clean_namespace(module.hparams)
