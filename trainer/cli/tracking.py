"""Check and complete the settings of a config's loggers with their adapters (`trainer.loggers`). Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.cli.parsing import UsageError
from trainer.cli.processes import is_first
from trainer.common import redaction
from trainer.errors import ConfigurationError
from trainer.loggers import LoggedRun, adapter_class, adapter_classes

_NOT_LOGGED = (
    "allowed_packages", "checkpoint_files", "checks", "compare", "exact_resume", "logger", "objective", "resume",
    "tune",
)  # fmt: skip
"""Settings that have no effect on the trained weights."""


def check(config: Mapping[str, Any]) -> None:
    """Check that the packages of a config's loggers are installed, and their settings fit ``checkpoint_files``.

    Raises:
        UsageError: if a package is missing, or settings contradict each other. The message names them.
    """
    for name, node in _nodes(config["logger"]).items():
        try:
            adapter_class(node).check(f"logger.{name}", node, config["checkpoint_files"])
        except ConfigurationError as error:
            raise UsageError(str(error)) from error


def complete(loggers: Mapping[str, Any] | None, run: LoggedRun, former: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group ``logger`` with its null settings filled in.

    Args:
        loggers: the group, resolved.
        run: the run that logs.
        former: the ids of the loggers in the run that wrote the checkpoint, by `LoggerAdapter.key`.
    """
    completed = {}
    for name, node in _nodes(loggers).items():
        adapter = adapter_class(node)
        completed[name] = adapter.complete(node, run._replace(former=former.get(adapter.key())))
    return completed


def open_stores(loggers: Mapping[str, Any]) -> None:
    """Create the stores that runs share, before parallel jobs would create them at the same time."""
    for node in loggers.values() if is_first() else ():
        adapter_class(node).prepare(node)


def has_tracker(loggers: Mapping[str, Any] | None) -> bool:
    """Return whether one of the loggers collects runs, such as W&B's or MLflow's."""
    return any(adapter_class(node).is_tracker for node in _nodes(loggers).values())


def end(*, ok: bool) -> None:
    """Close the connections of the loggers; ``ok`` if the run completed or was pruned."""
    for adapter in adapter_classes():
        adapter.end(ok=ok)


def _nodes(loggers: Any) -> dict[str, Any]:
    return dict(loggers) if isinstance(loggers, Mapping) else {}


def settings_to_log(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that W&B and MLflow show, without secrets and nulls.

    Args:
        settings: the resolved config.
    """
    logged = _without_nulls({name: value for name, value in settings.items() if name not in _NOT_LOGGED})
    return {name: redaction.setting(name, redaction.containers(value)) for name, value in logged.items()}


def _without_nulls(node: Mapping[str, Any]) -> dict[str, Any]:
    return {
        str(name): _without_nulls(value) if isinstance(value, Mapping) else value
        for name, value in node.items()
        if value is not None and value != {}
    }
