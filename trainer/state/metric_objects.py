"""The states of torchmetrics' objects: a ``state_dict`` leaves them out, and a resumed epoch would lose them."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric, MetricCollection, MetricTracker


class MetricObjects:
    """The metric objects among a module's parts, by their names there.

    Args:
        module: whose parts.

    Attributes:
        by_name: the metric objects. A MetricTracker's are known once there are as many of them as there were.
    """

    by_name: dict[str, Any]
    _names: dict[int, str]

    def __init__(self, module: nn.Module) -> None:
        for part in module.modules():
            if isinstance(part, MetricCollection):  # those that share a state see the one that is kept up to date
                list(part.values(copy_state=False))
        self._trackers = {n: part for n, part in module.named_modules() if isinstance(part, MetricTracker)}
        self._module = module
        self._find()

    def _find(self) -> None:
        self.by_name = {name: part for name, part in self._module.named_modules() if isinstance(part, Metric)}
        self._names = {id(metric): name for name, metric in self.by_name.items()}

    def name_of(self, metric: Any) -> str | None:
        """The metric's name; None where it is no part of the module."""
        return self._names.get(id(metric))

    def counts(self) -> dict[str, int]:
        """How often each has been updated since its last reset."""
        return {name: metric._update_count for name, metric in self.by_name.items()}

    def state_dict(self, without: Container[str] = ()) -> dict[str, Any]:
        """What the metrics that have been updated since their last reset have gathered, in this process.

        Args:
            without: names of metrics to leave out, as if they were reset.
        """
        state: dict[str, Any] = {
            name: _state_of(metric)
            for name, metric in self.by_name.items()
            if metric._update_count and name not in without
        }
        state |= {name: {"tracked": len(tracker)} for name, tracker in self._trackers.items()}
        return state

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Continue from what :meth:`state_dict` returned; metrics that are not in it are left alone."""
        for name in state.keys() & self._trackers.keys():
            tracker = self._trackers[name]
            while len(tracker) < state[name]["tracked"]:
                tracker.increment()
        self._find()
        for name in state.keys() & self.by_name.keys():
            metric = self.by_name[name]
            for attribute, value in state[name]["states"].items():
                moved = [one.to(device) for one in value] if isinstance(value, list) else value.to(device)
                setattr(metric, attribute, moved)
            vars(metric).update(state[name]["counts"])
            metric._computed = None


def _state_of(metric: Metric) -> dict[str, Any]:
    own = vars(metric)
    return {
        "states": {n: list(v) if isinstance(v, list) else v.detach() for n, v in metric.metric_state.items()},
        # `_update_count`, and what wrappers such as Running count
        "counts": {name: value for name, value in own.items() if name.startswith("_") and type(value) in (int, bool)},
    }
