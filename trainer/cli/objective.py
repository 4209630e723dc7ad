"""The objective of a run: the metric that ranks the jobs of a sweep and that a sweeper optimizes. Imports no torch.

The metric is ``objective.metric``. If that is null, it is the metric that the run's checkpoints monitor, or else the
metric of early stopping. ``trainer.record.run_record.RunRecord.objective_value`` returns its value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.arguments import TEXT
from trainer.cli.schema import setting
from trainer.errors import did_you_mean
from trainer.record.run_record import direction_of


@dataclass(frozen=True)
class Objective:
    """The settings ``objective.*``."""

    metric: str | None = setting(None, TEXT._replace(words="the name of a logged metric"), None)
    mode: str | None = setting(None, "min", "max", None)


def choose(node: Mapping[str, Any] | None, monitor: Mapping[str, Any] | None) -> tuple[str, str] | None:
    """Return the metric to optimize and its mode, ``"min"`` or ``"max"``; None if there is no metric.

    Args:
        node: the config's ``objective``.
        monitor: the return value of :func:`monitored`.
    """
    node, monitor = node or {}, monitor or {}
    metric = node.get("metric") or monitor.get("metric")
    if metric is None:
        return None
    mode = node.get("mode") or (monitor.get("mode") if metric == monitor.get("metric") else None)
    return str(metric), str(mode or (direction_of(str(metric)) or "max"))


def not_logged(setting: str, metric: str, clause: str, logged: Collection[str]) -> str:
    """Return the message about a setting with a metric that was not logged.

    Args:
        setting: key of the setting.
        metric: its value.
        clause: the end of the sentence, such as ``no run logged``.
        logged: names of the logged metrics.
    """
    names = ", ".join(logged) or "nothing"
    return f"{setting} is {metric}, which {clause}.{did_you_mean(metric, logged)} Logged metrics: {names}."


def monitored(callbacks: Any) -> dict[str, Any] | None:
    """Return the metric and mode that a callback monitors, or None. Checkpoint callbacks take precedence."""
    named = (node for node in (callbacks or {}).values() if isinstance(node, Mapping) and node.get("monitor"))
    nodes = [node for node in named if node["monitor"] != "auto"]  # resolved during the run
    nodes.sort(key=lambda node: "Checkpoint" not in str(node.get("_target_")))
    return {"metric": nodes[0]["monitor"], "mode": nodes[0].get("mode", "min")} if nodes else None
