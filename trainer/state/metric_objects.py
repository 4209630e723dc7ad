"""The states of torchmetrics' objects: a ``state_dict`` leaves them out, and a resumed epoch would lose them."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, MetricTracker
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum
from torchmetrics.utilities.distributed import gather_all_tensors

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


def exchange_over(group: Any, module: nn.Module) -> Callable[[], None]:
    """Have the metric objects of a module exchange what they have gathered over a group of processes, not over all.

    Those that have a group, or a way to exchange, of their own keep it.

    Args:
        group: of ``torch.distributed``.
        module: whose parts.

    Returns:
        What puts them back.
    """

    def gather(tensor: Tensor, **_: Any) -> list[Tensor]:
        gathered: list[Tensor] = gather_all_tensors(tensor, group)
        return gathered

    # not `process_group`: a metric is copied (MetricTracker), and a group cannot be
    for part in module.modules():
        if isinstance(part, Metric) and part.dist_sync_fn is None and part.process_group is None:
            part.dist_sync_fn = gather

    def put_back() -> None:
        for part in module.modules():
            if isinstance(part, Metric) and part.dist_sync_fn is gather:
                part.dist_sync_fn = None

    return put_back


def _kind(tensors: list[Tensor]) -> tuple[int, torch.dtype | None, tuple[int, ...]]:
    """How many they are, and the dtype and shape of each without the first dimension."""
    if not tensors:
        return 0, None, ()
    return len(tensors), tensors[0].dtype, tuple(tensors[0].shape[1:])


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
    dim_zero_mean: lambda values, *_: (
        torch.stack(values).to(torch.promote_types(values[0].dtype, torch.float32)).mean(0).to(values[0].dtype)
    ),
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
