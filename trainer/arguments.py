"""The Trainer's arguments: what each may be, what goes together, and what is not supported yet.

Everything is refused here, when the Trainer is built, not in epoch 3.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from trainer.errors import ONE_PACKAGE, ConfigurationError


@dataclass
class RunLimits:
    """How much of everything to run. ``fast_dev_run`` overrides most of it.

    Attributes:
        max_epochs: None where nobody said.
        max_steps: optimizer steps; -1 for no limit.
        train, val, test, predict: batches, or a share of them (float).
        val_check_interval: batches between validations, or a share of the epoch (float).
        val_check_seconds: seconds between validations; None to count batches.
        check_val_every_n_epoch: epochs between validations; None to count batches over all epochs.
        num_sanity_val_steps: batches of the sanity check; inf for all.
    """

    max_epochs: int | None
    max_steps: int
    train: int | float
    val: int | float
    test: int | float
    predict: int | float
    val_check_interval: int | float
    val_check_seconds: float | None
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int | float


def parse_limits(
    *,
    fast_dev_run: int | bool,
    overfit_batches: int | float,
    max_epochs: int | None,
    max_steps: int,
    limit_train_batches: int | float | None,
    limit_val_batches: int | float | None,
    limit_test_batches: int | float | None,
    limit_predict_batches: int | float | None,
    val_check_interval: Any,
    check_val_every_n_epoch: int | None,
    num_sanity_val_steps: int | None,
) -> RunLimits:
    """The limits that these arguments mean, checked.

    Raises:
        ConfigurationError: a value out of range.
    """
    if not isinstance(fast_dev_run, int) or fast_dev_run < 0:
        raise ConfigurationError(
            f"fast_dev_run={fast_dev_run!r} is not a valid configuration. It should be True, False or a number of"
            " batches."
        )
    if max_epochs is not None and max_epochs < -1:
        raise ConfigurationError(f"`max_epochs` must be a non-negative integer or -1. You passed in {max_epochs}.")
    if max_steps < -1:
        raise ConfigurationError(f"`max_steps` must be a non-negative integer or -1. You passed in {max_steps}.")
    val_check_seconds = None
    if isinstance(val_check_interval, (str, dict, timedelta)):
        val_check_interval, val_check_seconds = None, _seconds(val_check_interval)
    if check_val_every_n_epoch is not None and not isinstance(check_val_every_n_epoch, int):
        raise ConfigurationError(f"`check_val_every_n_epoch` should be an integer, found {check_val_every_n_epoch!r}.")
    if check_val_every_n_epoch is not None and check_val_every_n_epoch < 1:
        raise ConfigurationError(
            f"Got check_val_every_n_epoch={check_val_every_n_epoch}, expected at least 1, or None."
        )
    if check_val_every_n_epoch is None and isinstance(val_check_interval, float):
        raise ConfigurationError(
            "`val_check_interval` should be an integer or a time-based duration (str 'DD:HH:MM:SS',"
            " datetime.timedelta, or dict kwargs for timedelta) when `check_val_every_n_epoch=None`."
            f" Got {val_check_interval!r}."
        )
    train, val = (
        _amount(limit_train_batches, "limit_train_batches"),
        _amount(limit_val_batches, "limit_val_batches"),
    )
    if overfit_batches:
        train = val = _amount(overfit_batches, "overfit_batches")
    limits = RunLimits(
        max_epochs=max_epochs,
        max_steps=max_steps,
        train=train,
        val=val,
        test=_amount(limit_test_batches, "limit_test_batches"),
        predict=_amount(limit_predict_batches, "limit_predict_batches"),
        val_check_interval=_amount(val_check_interval, "val_check_interval"),
        val_check_seconds=val_check_seconds,
        check_val_every_n_epoch=check_val_every_n_epoch,
        num_sanity_val_steps=_sanity_steps(num_sanity_val_steps),
    )
    if fast_dev_run:
        batches = int(fast_dev_run)
        if not overfit_batches:
            limits.train = limits.val = batches
        limits.test = limits.predict = batches
        limits.max_steps, limits.max_epochs = batches, 1
        limits.num_sanity_val_steps, limits.val_check_interval, limits.check_val_every_n_epoch = 0, 1.0, 1
        limits.val_check_seconds = None
    return limits


BAREBONES = {
    "enable_checkpointing": "Checkpointing can impact raw speed",
    "logger": "Logging can impact raw speed",
    "enable_progress_bar": "The progress bar can impact raw speed",
    "log_every_n_steps": "Logging can impact raw speed",
    "enable_model_summary": "The model summary can impact raw speed",
    "num_sanity_val_steps": "The sanity check can impact raw speed",
    "fast_dev_run": "A development run is not meant for measuring raw speed",
    "detect_anomaly": "Looking for anomalies can impact raw speed",
    "profiler": "Profiling can impact raw speed",
}
"""What ``barebones=True`` switches off, and why."""


def check_barebones(**given: Any) -> None:
    """Refuse what ``barebones=True`` switches off, where somebody asks for it.

    Args:
        **given: the arguments in ``BAREBONES``. None, False and 0 ask for nothing.

    Raises:
        ConfigurationError: one asks for something.
    """
    for name, why in BAREBONES.items():
        if given[name] not in (None, 0):
            raise ConfigurationError(
                f"`Trainer(barebones=True, {name}={given[name]!r})` was passed. {why}, so it is disabled in barebones"
                f" mode: leave {name} out."
            )


def check_clipping(value: Any, algorithm: Any) -> None:
    """Check ``gradient_clip_val`` and ``gradient_clip_algorithm``.

    Raises:
        TypeError: the value is no number.
        ConfigurationError: an unknown algorithm.
    """
    if value is not None and not isinstance(value, (int, float)):
        raise TypeError(f"`gradient_clip_val` should be an int or a float. Got {value!r}.")
    known = isinstance(algorithm, str) and algorithm.lower() in ("norm", "value")
    if algorithm is not None and not known:
        raise ConfigurationError(
            f"`gradient_clip_algorithm` {algorithm} is invalid. Got gradient_clip_algorithm={algorithm!r}, expected"
            " 'norm' or 'value'."
        )


def refuse_other_package(argument: str, *given: Any) -> None:
    """Refuse what is built on ``pytorch_lightning`` where that is another package than ``lightning.pytorch``.

    Args:
        argument: what ``given`` was given as.
        *given: modules, datamodules, callbacks, loggers, strategies, plugins, or anything else.

    Raises:
        ConfigurationError: one is.
    """
    for value in given:
        roots = {str(kind.__module__).partition(".")[0] for kind in type(value).__mro__}
        for other, own in (("pytorch_lightning", "lightning.pytorch"), ("lightning_fabric", "lightning.fabric")):
            if other in roots and "lightning" not in roots and sys.modules.get(other) is not sys.modules.get(own):
                raise ConfigurationError(
                    f"Got {argument}={type(value).__name__}(...), which is built on {other}. To Python that is another"
                    f" package than {own}, which the Trainer is built on. To make them one, {ONE_PACKAGE}"
                )


def refuse_twice(argument: str, value: Any, default: Any, callbacks: Sequence[Any], kind: type) -> None:
    """Refuse a setting that an argument and a callback both make.

    Raises:
        ConfigurationError: ``value`` is not its default (or None) and ``callbacks`` has one of ``kind``.
    """
    if value not in (None, default) and any(isinstance(callback, kind) for callback in callbacks):
        raise ConfigurationError(
            f"Got {argument}={value!r} and a {kind.__name__} callback, expected one of them: they set the same thing."
        )


def _amount(given: int | float | None, name: str) -> int | float:
    """A number of batches (int) or a share of them (float); None is all, False none. True might be either."""
    if given is None:
        return 1.0
    if given is False:
        return 0
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise ConfigurationError(f"Got {name}={given!r}, expected a number of batches or a share from 0.0 to 1.0.")
    if given == 1:
        rank_zero_info(f"`Trainer({name}={given})` was configured so {_all_or_one(name, isinstance(given, int))}.")
    if 0 <= given <= 1:
        return given
    if given > 1 and given % 1 == 0:
        return int(given)
    raise ConfigurationError(f"You have passed invalid value {given} for {name}, it has to be in [0.0, 1.0] or an int.")


def _all_or_one(name: str, is_one: bool) -> str:
    """What 1, or 1.0, means, which are easily mistaken for each other."""
    if name == "val_check_interval":
        return f"validation will run {'after every batch' if is_one else 'at the end of the training epoch'}"
    amount = "1 batch" if is_one else "100% of the batches"
    return f"{amount} per epoch will be used" if name == "limit_train_batches" else f"{amount} will be used"


def _seconds(given: str | dict[str, Any] | timedelta) -> float:
    """An interval of time: ``"DD:HH:MM:SS"``, the arguments of a timedelta, or one."""
    if isinstance(given, str):
        parts = given.split(":")
        if len(parts) != 4 or not all(part.strip().isdecimal() for part in parts):
            raise ConfigurationError(
                f"Invalid time format for `val_check_interval`: {given!r}. Expected 'DD:HH:MM:SS', four whole numbers."
            )
        given = dict(zip(("days", "hours", "minutes", "seconds"), map(int, parts), strict=True))
    return (given if isinstance(given, timedelta) else timedelta(**given)).total_seconds()


def parse_reload_interval(given: Any) -> int:
    """``reload_dataloaders_every_n_epochs``, checked.

    Raises:
        ConfigurationError: not a whole number of epochs.
    """
    if not isinstance(given, int) or given < 0:
        raise ConfigurationError(f"`reload_dataloaders_every_n_epochs` should be an int >= 0, got {given!r}.")
    return given


def _sanity_steps(given: int | None) -> int | float:
    if given is None:
        return 2
    if given < -1:
        raise ConfigurationError(f"Got num_sanity_val_steps={given!r}, expected a number of batches, or -1 for all.")
    return float("inf") if given == -1 else given


def parse_resume(given: str | None) -> str | None:
    """``resume``.

    Raises:
        ConfigurationError: it is neither ``"auto"`` nor None.
    """
    if given not in ("auto", None):
        raise ConfigurationError(
            f"Got resume={given!r}, expected 'auto' (go on from the newest good checkpoint of this run) or None. To"
            " go on from a checkpoint that you name, call fit(ckpt_path=...)."
        )
    return given


def parse_timeout(given: float) -> float:
    """``dataloader_timeout``.

    Raises:
        ConfigurationError: no number of seconds.
    """
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given < float("inf"):
        raise ConfigurationError(
            f"Got dataloader_timeout={given!r}, expected seconds that the workers of a dataloader may take for a batch,"
            " or 0 for any time."
        )
    return given
