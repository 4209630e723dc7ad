"""Save the states of torchmetrics objects, because ``Module.state_dict`` omits them and a resumed epoch needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, MetricTracker
from torchmetrics.metric import CompositionalMetric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.wrappers.abstract import WrapperMetric

from trainer.errors import ConfigurationError


class MetricObjects:
    """The metric objects among a module's submodules, by name.

    Args:
        module: the module.

    Attributes:
        by_name: the metric objects. :meth:`load_state_dict` adds those that a MetricTracker created in the saved run.
    """

    by_name: dict[str, Any]
    _names: dict[int, str]

    def __init__(self, module: nn.Module) -> None:
        self._trackers = {n: part for n, part in module.named_modules() if isinstance(part, MetricTracker)}
        self._module = module
        self._find()

    def _find(self) -> None:
        for part in self._module.modules():
            if isinstance(part, MetricCollection):  # updates metrics that share a state
                list(part.values(copy_state=False))
        self.by_name = {name: part for name, part in self._module.named_modules() if isinstance(part, Metric)}
        self._names = {id(metric): name for name, metric in self.by_name.items()}

    def name_of(self, metric: Any) -> str | None:
        """Return the metric's name, or None if it is not part of the module."""
        return self._names.get(id(metric))

    def counts(self) -> dict[str, int]:
        """Return the number of updates of each metric since its last reset."""
        return {name: updates_of(metric) for name, metric in self.by_name.items()}

    def state_dict(self, without: Iterable[str] = (), *, copies: bool = False) -> dict[str, Any]:
        """Return this process's states of the metrics that have been updated since their last reset.

        Args:
            without: names of metrics to exclude, with the metrics that they wrap, as if they were reset. Default: none.
            copies: whether to copy the tensors that later updates may change in place. Default: False.
        """
        names = tuple(f"{name}." for name in without)
        state: dict[str, Any] = {
            name: _state_of(metric, copies)
            for name, metric in self.by_name.items()
            if updates_of(metric) and not f"{name}.".startswith(names)
        }
        state |= {name: {"tracked": len(tracker)} for name, tracker in self._trackers.items()}
        return state

    def outline(self, since: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """Return a description of the metrics, which processes exchange before they reduce the states.

        The description of each metric that is reduced contains the number of updates. For each state that is a list, it
        also contains the number of tensors, and their dtype and shape without the first dimension.

        Args:
            since: an earlier result of :meth:`counts`. Updates are counted from there.
        """
        self._find()
        found = {}
        for name, metric in self.by_name.items():
            if metric.sync_on_compute:
                lists = {n: value for n, value in metric.metric_state.items() if isinstance(value, list)}
                updates = metric.update_count - since.get(name, 0)
                found[name] = {"updates": updates, "lists": {n: _kind(v) for n, v in lists.items()}}
        return found

    def complete(self, outlines: Sequence[dict[str, dict[str, Any]]], device: torch.device) -> None:
        """Give empty states to metrics that were updated only on other processes, so that they can be reduced.

        torchmetrics requires tensors of the same dtype and number of dimensions on all processes.

        Args:
            outlines: the result of :meth:`outline` on each process.
            device: device of the metrics' states.

        Raises:
            ConfigurationError: on all processes, if a metric keeps a list of separate tensors (``dist_reduce_fx=None``)
                and their number differs between processes: torchmetrics would gather them one by one and wait forever.
        """
        for name, metric in self.by_name.items():
            descriptions = [outline[name] for outline in outlines if name in outline]
            if not any(one["updates"] for one in descriptions):
                continue
            metric._update_count = max(metric._update_count, 1)
            metric._computed = None  # from before another process's last update
            for state, value in metric.metric_state.items():
                if not isinstance(value, list):
                    continue
                kinds = [description["lists"][state] for description in descriptions]
                counts = [kind[0] for kind in kinds]
                if metric._reductions[state] is not dim_zero_cat and len(set(counts)) > 1:
                    raise ConfigurationError(
                        f"The metric {name!r} ({type(metric).__name__}) keeps {state!r} as a list of tensors,"
                        f" {', '.join(map(str, counts))} of them on processes 0 to {len(counts) - 1}. torchmetrics"
                        " exchanges them one by one, and would wait forever. Have all processes evaluate equally many"
                        " samples: Trainer(pad_evaluation=True), which counts some twice."
                    )
                if not value and any(counts):
                    _, dtype, shape = next(kind for kind in kinds if kind[0])
                    setattr(metric, state, [torch.empty((0, *shape), dtype=dtype, device=device)])

    def shared(self, states: Sequence[dict[str, Any]], rank: int, processes: int) -> tuple[dict[str, Any], set[str]]:
        """Convert the ``states`` of a run with another number of processes to the state of one process.

        The first process gets sums; each process gets means, maxima and minima, and a part of concatenated states.
        States with another reduction stay on the process with the same rank.

        Args:
            states: the results of :meth:`state_dict` on the saved processes.
            rank, processes: rank of this process, and number of processes.

        Returns:
            The state for :meth:`load_state_dict`, and the names of metrics that lose a part of their state.
        """
        shared: dict[str, Any] = {}
        lost: set[str] = set()
        for name in dict.fromkeys(name for state in states for name in state):
            gathered = [state.get(name) for state in states]
            present = [one for one in gathered if one is not None]
            if "tracked" in present[0]:
                shared[name] = present[0]
                continue
            metric = self.by_name.get(name)
            reductions = {} if metric is None else metric._reductions
            own: dict[str, Any] = {}
            for attribute in present[0]["states"]:
                values = [one["states"][attribute] for one in present]
                reduce = reductions.get(attribute)
                if reduce in _SHARED:
                    own[attribute] = _SHARED[reduce](values, rank, processes)
                elif rank < len(gathered) and (own_state := gathered[rank]) is not None:
                    own[attribute] = own_state["states"][attribute]
                if reduce not in _SHARED and len(gathered) > processes:
                    lost.add(name)
            counts = {key: max(one["counts"][key] for one in present) for key in present[0]["counts"]}
            shared[name] = {"states": own, "counts": counts}
        return shared, lost

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore the state that :meth:`state_dict` returned. Other metrics stay unchanged."""
        for name in state.keys() & self._trackers.keys():
            tracker = self._trackers[name]
            while len(tracker) < state[name]["tracked"]:
                tracker.increment()
        self._find()
        for name in state.keys() & self.by_name.keys():
            metric = self.by_name[name]
            for attribute, value in state[name]["states"].items():
                moved = [item.to(device) for item in value] if isinstance(value, list) else value.to(device)
                setattr(metric, attribute, moved)
            vars(metric).update(state[name]["counts"])
            metric._computed = None


def metric_objects_in(module: nn.Module) -> list[Metric]:
    """Return the metric objects among a module's submodules."""
    return [part for part in module.modules() if isinstance(part, Metric)]


def saved_attributes(metric: Metric) -> set[str]:
    """Return the names of the attributes that :class:`MetricObjects` saves."""
    return {*metric.metric_state, *_counts_of(metric)}


def updates_of(metric: Metric) -> int:
    """Return the number of updates of a metric, and of those that it wraps, since the last reset.

    torchmetrics' wrappers do not count their updates, except ``Running``, which has another name for the number.
    ``CompositionalMetric`` does not reset its own count.
    """
    return sum(
        vars(part).get("_num_vals_seen", 0) if isinstance(part, WrapperMetric) else part.update_count
        for part in metric_objects_in(metric)
        if not isinstance(part, CompositionalMetric)
    )


def reset(metric: Metric) -> None:
    """Reset a metric and those that it wraps, with the number of updates, which an override of ``reset`` may leave."""
    metric.reset()
    for part in metric_objects_in(metric):
        if part._update_count and all(_is_initial(getattr(part, name), own) for name, own in part._defaults.items()):
            part._update_count = 0


def _is_initial(state: Any, initial: Any) -> bool:
    return not state if isinstance(state, list) else torch.equal(state, initial.to(state.device))


def update_counts(metrics: Iterable[Metric | None]) -> dict[int, int]:
    """Return the number of updates since the last reset, by ``id`` of the metric object. Skips None."""
    return {id(metric): updates_of(metric) for metric in metrics if metric is not None}


def reduce_over_group(group: Any, module: nn.Module) -> Callable[[], None]:
    """Reduce the metric objects of a module over a group of processes instead of over all.

    Metrics with their own group or their own function for reductions keep it.

    Args:
        group: a ``torch.distributed`` group.
        module: the module.

    Returns:
        A function that undoes this.
    """

    def gather(tensor: Tensor, **_: Any) -> list[Tensor]:
        gathered: list[Tensor] = gather_all_tensors(tensor, group)
        return gathered

    # not `process_group`: a metric must stay copyable (for MetricTracker), and a group cannot be copied
    for part in module.modules():
        if isinstance(part, Metric) and part.dist_sync_fn is None and part.process_group is None:
            part.dist_sync_fn = gather

    def restore() -> None:
        for part in module.modules():
            if isinstance(part, Metric) and part.dist_sync_fn is gather:
                part.dist_sync_fn = None

    return restore


def _kind(tensors: list[Tensor]) -> tuple[int, torch.dtype | None, tuple[int, ...]]:
    """Return the number of tensors, and the dtype and shape of each without the first dimension."""
    if not tensors:
        return 0, None, ()
    return len(tensors), tensors[0].dtype, tuple(tensors[0].shape[1:])


def _place_on_first(values: list[Tensor], rank: int, processes: int) -> Tensor:
    total = torch.stack(values).sum(0).to(values[0].dtype)
    return total if rank == 0 else torch.zeros_like(total)


def _split_over_ranks(values: list[Any], rank: int, processes: int) -> Any:
    tensors = [item for value in values for item in (value if isinstance(value, list) else [value])]
    part = torch.tensor_split(dim_zero_cat(tensors), processes)[rank] if tensors else None
    if not isinstance(values[0], list):
        return part
    return [part] if part is not None and len(part) else []


_SHARED: dict[Any, Callable[[list[Any], int, int], Any]] = {
    dim_zero_sum: _place_on_first,
    dim_zero_mean: lambda values, *_: (
        torch.stack(values).to(torch.promote_types(values[0].dtype, torch.float32)).mean(0).to(values[0].dtype)
    ),
    dim_zero_max: lambda values, *_: torch.stack(values).amax(0),
    dim_zero_min: lambda values, *_: torch.stack(values).amin(0),
    dim_zero_cat: _split_over_ranks,
}
"""The functions that compute one process's part from (states, rank, processes), by torchmetrics' reduction."""


def _state_of(metric: Metric, copies: bool) -> dict[str, Any]:
    def value_of(state: Any) -> Any:
        if isinstance(state, list):
            return list(state)
        return state.detach().clone() if copies else state.detach()

    states = {name: value_of(state) for name, state in metric.metric_state.items()}
    return {"states": states, "counts": _counts_of(metric)}


def _counts_of(metric: Metric) -> dict[str, int]:
    """Return `_update_count`, and the counts of wrappers such as Running."""
    return {name: value for name, value in vars(metric).items() if name[0] == "_" and type(value) in (int, bool)}
