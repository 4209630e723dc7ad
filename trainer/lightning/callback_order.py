"""Callbacks: the order in which they run, and those that come from the module."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from lightning.fabric.utilities import registry
from lightning.pytorch.trainer.connectors.callback_connector import _CallbackConnector, _validate_callbacks_list

from trainer.arguments import refuse_other_package
from trainer.callbacks.gradient_accumulation import accumulation_schedule
from trainer.errors import ConfigurationError
from trainer.loop.overrides import defines_defaults
from trainer.loop.run_state import RunState


def sort_callbacks(callbacks: Sequence[Any]) -> list[Any]:
    """Return ``callbacks`` with tuners first and those that save checkpoints last, otherwise in the given order.

    Raises:
        RuntimeError: if two callbacks with a state have the same ``state_key``, because one state would overwrite the
            other in a checkpoint.
    """
    try:
        _validate_callbacks_list(list(callbacks))
    except RuntimeError as error:
        advice = "Leave one out, or give them different arguments or different values of `state_key`."
        raise RuntimeError(f"{error} {advice}") from None
    return _CallbackConnector._reorder_callbacks(list(callbacks))


def attach_model_callbacks(run: RunState) -> None:
    """Add the callbacks of ``LightningModule.configure_callbacks``.

    Each of them replaces the callbacks of the same type or of one of its base classes.
    """
    before = run.callbacks
    if other := sys.modules.get("pytorch_lightning"):
        defines_defaults(other.Callback)  # its empty hooks
    run.trainer._callback_connector._attach_model_callbacks()
    try:
        for callback in run.callbacks:
            is_given = any(callback is given for given in before)
            refuse_other_package("trainer.callbacks" if is_given else "configure_callbacks", callback)
    except ConfigurationError:
        run.callbacks = before
        raise


def resume_accumulation(run: RunState) -> None:
    """Set the number of batches in a window for the rest of an epoch, as a callback sets it when the epoch starts."""
    schedule = accumulation_schedule(run)
    current = run.epoch
    run.accumulate_grad_batches = schedule[max(epoch for epoch in schedule if epoch <= current)]


_FACTORIES = "lightning.pytorch.callbacks_factory"


def external_callbacks() -> list[Any]:
    """Create the callbacks that installed packages register under Lightning's entry point."""
    if not _has_factories(registry.entry_points, _search_path()):  # type: ignore[attr-defined]  # tests replace it
        return []
    return list(registry._load_external_callbacks(_FACTORIES))


@lru_cache(maxsize=1)
def _has_factories(entry_points: Callable[..., Any], search_path: tuple[tuple[str, float], ...]) -> bool:
    """Return whether an installed package registers callbacks. The scan takes most of the time of ``Trainer()``."""
    return bool(entry_points(group=_FACTORIES))


def _search_path() -> tuple[tuple[str, float], ...]:
    """Return the import folders with the time of their last change, which an installation of a package updates."""
    return tuple((folder, os.stat(folder).st_mtime) for folder in sys.path if os.path.isdir(folder))
