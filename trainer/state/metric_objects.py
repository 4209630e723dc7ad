"""The states of torchmetrics' objects: a ``state_dict`` leaves them out, and a resumed epoch would lose them."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, MetricTracker
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum


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

    def shared(self, states: Sequence[dict[str, Any]], rank: int, processes: int) -> tuple[dict[str, Any], set[str]]:
        """What one of so many processes goes on from, where others have gathered ``states``.

        The first process gets sums, each gets means and largest and smallest values, and what is concatenated is
        divided. States that are reduced in another way stay with the process that has gathered them.

        Args:
            states: of those processes, as :meth:`state_dict` returned them.
            rank, processes: which process this is, and how many there are.

        Returns:
            For :meth:`load_state_dict`; and the names of metrics of which a part is lost.
        """
        shared: dict[str, Any] = {}
        lost: set[str] = set()
        for name in dict.fromkeys(name for state in states for name in state):
            gathered = [state.get(name) for state in states]
            some = [one for one in gathered if one is not None]
            if "tracked" in some[0]:
                shared[name] = some[0]
                continue
            metric = self.by_name.get(name)
            reductions = {} if metric is None else metric._reductions
            own: dict[str, Any] = {}
            for attribute in some[0]["states"]:
                values = [one["states"][attribute] for one in some]
                reduce = reductions.get(attribute)
                if reduce in _SHARED:
                    own[attribute] = _SHARED[reduce](values, rank, processes)
                elif rank < len(gathered) and (mine := gathered[rank]) is not None:
                    own[attribute] = mine["states"][attribute]
                if reduce not in _SHARED and len(gathered) > processes:
                    lost.add(name)
            counts = {key: max(one["counts"][key] for one in some) for key in some[0]["counts"]}
            shared[name] = {"states": own, "counts": counts}
        return shared, lost

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


def _on_first(values: list[Tensor], rank: int, processes: int) -> Tensor:
    total = torch.stack(values).sum(0).to(values[0].dtype)
    return total if rank == 0 else torch.zeros_like(total)


def _divided(values: list[Any], rank: int, processes: int) -> Any:
    tensors = [one for value in values for one in (value if isinstance(value, list) else [value])]
    part = torch.tensor_split(dim_zero_cat(tensors), processes)[rank] if tensors else None
    if not isinstance(values[0], list):
        return part
    return [part] if part is not None and len(part) else []


_SHARED: dict[Any, Callable[[list[Any], int, int], Any]] = {
    dim_zero_sum: _on_first,
    dim_zero_mean: lambda values, *_: torch.stack(values).float().mean(0).to(values[0].dtype),
    dim_zero_max: lambda values, *_: torch.stack(values).amax(0),
    dim_zero_min: lambda values, *_: torch.stack(values).amin(0),
    dim_zero_cat: _divided,
}
"""By how torchmetrics reduces a state over processes: what one of so many gets of the states (rank, processes)."""


def _state_of(metric: Metric) -> dict[str, Any]:
    own = vars(metric)
    return {
        "states": {n: list(v) if isinstance(v, list) else v.detach() for n, v in metric.metric_state.items()},
        # `_update_count`, and what wrappers such as Running count
        "counts": {name: value for name, value in own.items() if name.startswith("_") and type(value) in (int, bool)},
    }
