"""The states of torchmetrics' objects: a ``state_dict`` leaves them out, and a resumed epoch would lose them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, MetricTracker
from torchmetrics.utilities import dim_zero_cat

from trainer.errors import ConfigurationError


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
        self._trackers = {n: part for n, part in module.named_modules() if isinstance(part, MetricTracker)}
        self._module = module
        self._find()

    def _find(self) -> None:
        for part in self._module.modules():
            if isinstance(part, MetricCollection):  # those that share a state see the one that is kept up to date
                list(part.values(copy_state=False))
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

    def outline(self, since: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """What processes tell each other of their metrics before these exchange what they have gathered.

        For each metric that does: how often it was updated and, for each state that is a list, the number of its
        tensors and their dtype and shape without the first dimension.

        Args:
            since: what :meth:`counts` returned earlier: updates are counted from there on.
        """
        self._find()
        found = {}
        for name, metric in self.by_name.items():
            if metric.sync_on_compute:
                lists = {n: value for n, value in metric.metric_state.items() if isinstance(value, list)}
                updates = metric._update_count - since.get(name, 0)
                found[name] = {"updates": updates, "lists": {n: _kind(v) for n, v in lists.items()}}
        return found

    def complete(self, outlines: Sequence[dict[str, dict[str, Any]]], device: torch.device) -> None:
        """Let a metric that was not updated in this process, but in others, exchange what it has: nothing.

        torchmetrics expects tensors of the same dtype and number of dimensions everywhere.

        Args:
            outlines: what :meth:`outline` returned on each process.
            device: where the metrics' states are.

        Raises:
            ConfigurationError: on all processes, where one keeps tensors apart (``dist_reduce_fx=None``) and has more
                of them on one process than on another: torchmetrics would exchange them one by one, and wait for ever.
        """
        for name, metric in self.by_name.items():
            everywhere = [outline[name] for outline in outlines if name in outline]
            if not any(one["updates"] for one in everywhere):
                continue
            metric._update_count = max(metric._update_count, 1)
            metric._computed = None  # of before another process's last update
            for state, value in metric.metric_state.items():
                if not isinstance(value, list):
                    continue
                kinds = [one["lists"][state] for one in everywhere]
                counts = [kind[0] for kind in kinds]
                if metric._reductions[state] is not dim_zero_cat and len(set(counts)) > 1:
                    raise ConfigurationError(
                        f"The metric {name!r} ({type(metric).__name__}) keeps {state!r} as a list of tensors,"
                        f" {', '.join(map(str, counts))} of them on processes 0 to {len(counts) - 1}. torchmetrics"
                        " exchanges them one by one, and would wait for ever. Have all processes evaluate equally many"
                        " samples: Trainer(pad_evaluation=True), which counts some twice."
                    )
                if not value and any(counts):
                    _, dtype, shape = next(kind for kind in kinds if kind[0])
                    setattr(metric, state, [torch.empty((0, *shape), dtype=dtype, device=device)])

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


def _kind(tensors: list[Tensor]) -> tuple[int, torch.dtype | None, tuple[int, ...]]:
    """How many they are, and the dtype and shape of each without the first dimension."""
    if not tensors:
        return 0, None, ()
    return len(tensors), tensors[0].dtype, tuple(tensors[0].shape[1:])


def _state_of(metric: Metric) -> dict[str, Any]:
    own = vars(metric)
    return {
        "states": {n: list(v) if isinstance(v, list) else v.detach() for n, v in metric.metric_state.items()},
        # `_update_count`, and what wrappers such as Running count
        "counts": {name: value for name, value in own.items() if name.startswith("_") and type(value) in (int, bool)},
    }
