"""The torchmetrics objects of a module: their updates, their reduction over processes, their states in a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, MetricTracker
from torchmetrics.metric import CompositionalMetric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.wrappers.abstract import WrapperMetric

from trainer.common.module_tree import plain_name
from trainer.errors import ConfigurationError
from trainer.state.snapshot import State


class MetricObjects:
    """The metric objects among a module's submodules, by name.

    Args:
        module: the module.

    Attributes:
        by_name: the metric objects.
    """

    by_name: dict[str, Any]
    _names: dict[int, str]

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._find()

    def _find(self) -> None:
        for submodule in self._module.modules():
            if isinstance(submodule, MetricCollection):  # updates metrics that share a state
                list(submodule.values(copy_state=False))
        self.by_name = {name: metric for name, metric in self._module.named_modules() if isinstance(metric, Metric)}
        self._names = {id(metric): name for name, metric in self.by_name.items()}

    def name_of(self, metric: Any) -> str | None:
        """Return the metric's name, or None if it is not part of the module."""
        return self._names.get(id(metric))

    def counts(self) -> dict[str, int]:
        """Return the number of updates of each metric since its last reset."""
        return {name: updates_of(metric) for name, metric in self.by_name.items()}

    def clear_results(self) -> None:
        """Make each metric compute its result again, because its states have changed."""
        for metric in self.by_name.values():
            metric._computed = None

    def states_in_snapshot(self, names: Container[str]) -> dict[str, set[str]]:
        """Return the names of the states of some metrics in a snapshot of the program, by path."""
        return {path_of(name): state_names(metric) for name, metric in self.by_name.items() if name in names}

    def without_updates(self, but: Iterable[str] = ()) -> set[str]:
        """Return the names of metrics without updates, and of other given ones, with the metrics that they wrap."""
        given = tuple(f"{name}." for name in but)
        return {name for name, count in self.counts().items() if not count or f"{name}.".startswith(given)}

    def outline(self, since: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """Return a description of the metrics, which processes exchange before they reduce the states.

        The description of each metric that is reduced contains the number of updates. For each state that is a list, it
        also contains the number of tensors, and their dtype and shape without the first dimension.

        Args:
            since: an earlier result of :meth:`counts`. Updates are counted from there.
        """
        self._find()
        outlines = {}
        for name, metric in self.by_name.items():
            if metric.sync_on_compute:
                lists = {n: value for n, value in metric.metric_state.items() if isinstance(value, list)}
                updates = metric.update_count - since.get(name, 0)
                outlines[name] = {"updates": updates, "lists": {n: _kind(v) for n, v in lists.items()}}
        return outlines

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
            if not any(description["updates"] for description in descriptions):
                continue
            metric._update_count = max(metric._update_count, 1)
            metric._computed = None  # from before another process's last update
            for state, value in metric.metric_state.items():
                if not isinstance(value, list):
                    continue
                layouts = [description["lists"][state] for description in descriptions]
                counts = [layout[0] for layout in layouts]
                if metric._reductions[state] is not dim_zero_cat and len(set(counts)) > 1:
                    raise ConfigurationError(
                        f"The metric {name!r} ({type(metric).__name__}) keeps {state!r} as a list of tensors,"
                        f" {', '.join(map(str, counts))} of them on processes 0 to {len(counts) - 1}. torchmetrics"
                        " exchanges them one by one, and would wait forever. Have all processes evaluate equally many"
                        " samples: Trainer(pad_evaluation=True), which counts some twice."
                    )
                if not value and any(counts):
                    _, dtype, shape = next(layout for layout in layouts if layout[0])
                    setattr(metric, state, [torch.empty((0, *shape), dtype=dtype, device=device)])

    def shared(self, snapshots: Sequence[State], rank: int, processes: int) -> tuple[State, set[str]]:
        """Convert the ``snapshots`` of a run with another number of processes to the snapshot of one process.

        The first process gets sums and concatenated states; each process gets means, maxima and minima. States with
        another reduction stay on the process with the same rank. All other values are those of the first process.

        Args:
            snapshots: the states of the program in the saved processes.
            rank, processes: rank of this process, and number of processes.

        Returns:
            The snapshot, and the names of metrics that lose a part of their state.
        """
        shared, lost = dict(snapshots[0]), set[str]()
        for name, metric in self.by_name.items():
            path, names = path_of(name), state_names(metric)
            values = [snapshot[path][1] if path in snapshot else {} for snapshot in snapshots]
            present = [saved for saved in values if "_update_count" in saved]
            if not present:
                continue
            merged = {key: value for key, value in values[0].items() if key not in names}
            merged["_update_count"] = max(saved["_update_count"] for saved in present)
            for state, reduce in metric._reductions.items():
                if reduce in _REDUCTIONS:
                    if rank == 0 or reduce not in (dim_zero_sum, dim_zero_cat):
                        merged[state] = _reduced([saved[state] for saved in present if state in saved], reduce)
                    continue
                if rank < len(values) and state in values[rank]:
                    merged[state] = values[rank][state]
                if len(values) > processes:
                    lost.add(name)
            shared[path] = [type(metric).__qualname__, merged]
        return shared, lost


def path_of(name: str) -> str:
    """Return the path of a submodule in the snapshot of the program."""
    return plain_name(f"module.{name}")


def state_names(metric: Metric) -> set[str]:
    """Return the names of the attributes that a reset changes."""
    return {*metric.metric_state, "_update_count"}


def tracked_in(module: nn.Module) -> dict[str, int]:
    """Return the number of metrics in each MetricTracker, by name."""
    return {name: len(tracker) for name, tracker in module.named_modules() if isinstance(tracker, MetricTracker)}


def add_tracked(module: nn.Module, tracked: dict[str, int]) -> None:
    """Add the metrics that each MetricTracker had created when :func:`tracked_in` was called."""
    for name, tracker in list(module.named_modules()):
        while isinstance(tracker, MetricTracker) and len(tracker) < tracked.get(name, 0):
            tracker.increment()


def metric_objects_in(module: nn.Module) -> list[Metric]:
    """Return the metric objects among a module's submodules."""
    return [metric for metric in module.modules() if isinstance(metric, Metric)]


def updates_of(metric: Metric) -> int:
    """Return the number of updates of a metric, and of those that it wraps, since the last reset.

    torchmetrics' wrappers do not count their updates, except ``Running``, which has another name for the number.
    ``CompositionalMetric`` does not reset its own count.
    """
    return sum(
        vars(inner).get("_num_vals_seen", 0) if isinstance(inner, WrapperMetric) else inner.update_count
        for inner in metric_objects_in(metric)
        if not isinstance(inner, CompositionalMetric)
    )


def reset(metric: Metric) -> None:
    """Reset a metric and those that it wraps, with the number of updates, which an override of ``reset`` may leave."""
    metric.reset()
    for inner in metric_objects_in(metric):
        defaults = inner._defaults.items()
        if inner._update_count and all(_is_initial(getattr(inner, name), default) for name, default in defaults):
            inner._update_count = 0


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

    # not `process_group`: a metric must stay copyable (for MetricTracker), and a group cannot be copied;
    # not `Session.replace`, which does not restore the copies
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn is None and metric.process_group is None:
            metric.dist_sync_fn = gather

    def restore() -> None:
        for metric in module.modules():
            if isinstance(metric, Metric) and metric.dist_sync_fn is gather:
                metric.dist_sync_fn = None

    return restore


def _kind(tensors: list[Tensor]) -> tuple[int, torch.dtype | None, tuple[int, ...]]:
    """Return the number of tensors, and the dtype and shape of each without the first dimension."""
    if not tensors:
        return 0, None, ()
    return len(tensors), tensors[0].dtype, tuple(tensors[0].shape[1:])


_REDUCTIONS = {dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min, dim_zero_cat}


def _reduced(values: list[Any], reduce: Any) -> Any:
    """Return the reduction of encoded states (see ``trainer.state.snapshot``)."""
    tag, first = values[0][:2]
    if tag == "list":
        return ["list", [item for value in values for item in value[1]]]
    tensors: Any = [value[1] for value in values]
    if reduce is not dim_zero_cat:
        tensors = torch.stack(tensors)
    if reduce is dim_zero_mean:
        tensors = tensors.double()
    return ["weights", reduce(tensors).to(first.dtype), values[0][2]]
