"""The values logged with ``self.log``: those of this step, and their reductions over the epoch.

Logging a tensor causes no host-device synchronization: the tensor stays on its device until a logger, a progress bar or
a callback reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric

from trainer.errors import ConfigurationError, rank_zero_warn
from trainer.metrics.metric_objects import reset, updates_of
from trainer.state.progress import FitProgress

T = TypeVar("T")

_FLUSH_EVERY = 256
"""Number of values that are reduced together: one stack and one sum instead of 256 additions."""

_STARTS = {"max": float("-inf"), "min": float("inf")}


class LogOptions(NamedTuple):
    """How one name is logged: the arguments of ``self.log`` with the same names."""

    prog_bar: bool = False
    logger: bool = True
    on_step: bool = False
    on_epoch: bool = True
    reduce_fx: str = "mean"
    sync_dist: bool = False
    sync_dist_group: Any = None
    add_dataloader_idx: bool = True
    rank_zero_only: bool = False
    enable_graph: bool = False


Reduce = Callable[..., Tensor]
"""``engine.collectives.reduce``: takes (tensor, op, group), and returns the tensor reduced over the processes."""


class LoggedValue:
    """One name logged from one hook: its last value and, if requested, its reduction over the epoch.

    Values are 0-dim tensors on their device, or numbers on the host, because a number takes a fraction of the time.
    Every 256 values are added one by one in their order and dtype, and the sum is added to a total in float64 (float32
    on MPS). Up to 256 values of one dtype, the results of tensors are bit-identical to Lightning's; values of several
    dtypes are added in the largest one.
    """

    __slots__ = ("_dtype", "_epoch_value", "_last", "_number_dtype", "_pending", "_reduce", "_total", "_weight",
                 "_weights", "dataloader_idx", "first_options", "has_value", "hook", "metric", "name", "options",
                 "shares_epochs", "shares_steps")  # fmt: skip

    def __init__(self, hook: str, name: str, options: LogOptions, dataloader_idx: int | None, reduce: Reduce) -> None:
        self.hook = hook
        self.name = name
        self.options = options
        self.first_options: object = None  # of the first call, which later calls are compared with
        self.dataloader_idx = dataloader_idx
        self.metric: Metric | None = None
        self.has_value = False
        # whether step and epoch values are reduced over the processes; an evaluation may change it
        self.shares_steps = self.shares_epochs = options.sync_dist and not options.rank_zero_only
        self._reduce = reduce
        self._epoch_value: Tensor | None = None  # cached until the next update: reduced over processes once
        self._last: Tensor | float | None = None
        self._pending: list[Tensor | float] = []
        self._number_dtype = torch.float64  # of the last value and the pending ones, if they are numbers
        self._weights: list[Any] = []
        self._total: Tensor | None = None
        self._weight: Any = 0
        self._dtype: torch.dtype | None = None  # of the values in the total

    def update(self, value: Tensor | float, weight: int, dtype: torch.dtype = torch.float64) -> None:
        """Add one value.

        Args:
            value: a tensor (0-dim, detached, in float32 or float64) or a number.
            weight: the number of samples.
            dtype: the dtype of a number. Default: ``torch.float64``.
        """
        self.has_value = True
        options = self.options
        if dtype is not self._number_dtype:
            self._pending = [as_tensor(earlier, self._number_dtype) for earlier in self._pending]
            self._number_dtype = dtype
        if options.on_step:
            self._last = self._across(as_tensor(value, dtype).clone()) if self.shares_steps else value
        if options.on_epoch:
            self._epoch_value = None
            self._pending.append(value)
            self._weights.append(weight)
            if len(self._pending) >= _FLUSH_EVERY:
                self._total, self._weight, self._dtype = self.accumulated()
                self._pending.clear()
                self._weights.clear()

    @property
    def step_value(self) -> Any:
        """The last value, a 0-dim tensor; the value of a metric object may be any object."""
        if self.metric is None and self._last is not None:
            self._last = as_tensor(self._last, self._number_dtype)
        return self._last

    @property
    def reduces_steps(self) -> bool:
        """Whether the value of each batch is reduced over all processes."""
        return self.options.on_step and self.shares_steps and self.options.sync_dist_group is None

    def update_metric(self, metric: Metric) -> None:
        """Add a metric object, which accumulates by itself."""
        self.has_value = True
        self.metric = metric
        value = metric._forward_cache
        self._last = None if value is None else _without_graph(value)

    def epoch_value(self) -> Tensor | None:
        """Return the reduction of all values since the last reset.

        They are also reduced over the processes if ``sync_dist`` is set, or if :meth:`MetricStore.complete` was called.
        """
        if self.metric is not None:
            computed: Tensor | None = _without_graph(self.metric.compute())
            return computed
        if self._epoch_value is None:
            self._epoch_value = self._reduced()
        return self._epoch_value

    def accumulated(self) -> tuple[Tensor | None, Any, torch.dtype | None]:
        """Return the reduction of this process's values, the number of samples of a mean, and the values' dtype."""
        total, weight = self._total, self._weight
        if not self._pending:
            return total, weight, self._dtype
        values = self._values()
        op, device = self.options.reduce_fx, values.device
        dtype = torch.promote_types(values.dtype, self._dtype or accumulation_dtype())
        if op in ("max", "min"):
            chunk = values.amax() if op == "max" else values.amin()
            if total is not None:
                chunk = getattr(torch, f"{op}imum")(moved(total, device), chunk)
            return chunk, weight, dtype
        start = torch.zeros((), dtype=accumulation_dtype(), device=device)
        if device.type in ("cpu", "cuda") and (op == "sum" or {*map(type, self._weights)} == {int}):
            if op == "mean":
                weight = weight + sum(self._weights)
                weights: Any = self._weights[0]
                if {*self._weights} != {weights}:
                    weights = torch.tensor(self._weights, dtype=values.dtype).to(device, non_blocking=True)
                values = values.mul_(weights)
            chunk = _sum_in_order(start, values)
        else:
            chunk = start
            for value, samples in zip(values.unbind(), self._weights, strict=True):
                chunk = chunk + (value * samples if op == "mean" else value)
                weight = torch.as_tensor(weight) + samples
        if total is not None:
            chunk = moved(total, device).add(chunk)
        elif len(values) >= _FLUSH_EVERY and device.type != "mps":
            chunk = chunk.double()
        return chunk, weight, dtype

    def reset(self) -> None:
        """Reset all values; keep the options."""
        self.has_value = False
        self._last = self._epoch_value = None
        self._pending.clear()
        self._weights.clear()
        self._total = self._dtype = None
        self._weight = 0
        if self.metric is not None:
            reset(self.metric)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, without that of a metric object. Pending values stay separate, to get the same sums."""
        return {
            "hook": self.hook,
            "name": self.name,
            # None replaces a group
            "options": [option if isinstance(option, (bool, str)) else None for option in self.options],
            "dataloader_idx": self.dataloader_idx,
            "has_value": self.has_value,
            "step_value": self.step_value if isinstance(self.step_value, Tensor) else None,
            "pending": list(self._pending),
            "number_dtype": self._number_dtype,
            "weights": list(self._weights),
            "total": self._total,
            "weight": self._weight,
            "dtype": self._dtype,
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        self.has_value = state["has_value"]
        self._last, self._total = (
            None if v is None else moved(v, device) for v in (state["step_value"], state["total"])
        )
        self._number_dtype = state["number_dtype"]
        self._pending = [moved(v, device) if isinstance(v, Tensor) else v for v in state["pending"]]
        self._weights, self._weight, self._dtype = list(state["weights"]), state["weight"], state.get("dtype")
        self._epoch_value = None

    def join(self, dtype: torch.dtype, value_dtype: torch.dtype) -> None:
        """Let this process take part in the reduction of the epoch's value, even if it logged nothing.

        Args:
            dtype: of the totals of all processes.
            value_dtype: of the values of all processes, and of the result.
        """
        self.has_value = self.shares_epochs = True
        total, self._weight, _ = self.accumulated()
        self._dtype = value_dtype
        if total is None:
            total = torch.full((), _STARTS.get(self.options.reduce_fx, 0.0))
        self._total = total.to(dtype)
        self._pending.clear()
        self._weights.clear()
        self._epoch_value = None

    def replace(self, value: float) -> None:
        """Replace the epoch's value until the next update."""
        if (current := self.epoch_value()) is not None:
            self._epoch_value = torch.full_like(current, value)

    def _reduced(self) -> Tensor | None:
        total, samples, dtype = self.accumulated()
        if total is None:
            return None
        shared = self.shares_epochs
        if self.options.reduce_fx != "mean":
            return (self._across(total.clone()) if shared else total).to(dtype)
        weight = torch.full_like(total, samples)  # on a GPU, dividing by a number multiplies by its inverse
        if shared:
            group = self.options.sync_dist_group
            if group is not None:  # `complete` excludes it, and only some processes may have totals in float64
                total, weight = total.double(), weight.double()
            total, weight = self._reduce(total.clone(), "sum", group), self._reduce(weight, "sum", group)
        return (total / weight).to(dtype)

    def _across(self, value: Tensor) -> Tensor:
        return self._reduce(value, self.options.reduce_fx, self.options.sync_dist_group)

    def _values(self) -> Tensor:
        """Return the pending values, of shape ``(N,)``, on their device, in their dtype or the largest one."""
        if {*map(type, self._pending)} == {float}:
            return torch.tensor(self._pending, dtype=self._number_dtype)
        values = [as_tensor(value, self._number_dtype) for value in self._pending]
        device = next((value.device for value in values if value.device.type != "cpu"), values[0].device)
        return torch.stack([moved(value, device) for value in values])


def as_tensor(value: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Convert a number to a 0-dim tensor of a dtype. Return a tensor unchanged."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype)


def moved(value: Tensor, device: torch.device) -> Tensor:
    """Move a value to a device; to MPS in float32, because it has no double precision."""
    return value.to(device, torch.float32 if device.type == "mps" else value.dtype, non_blocking=True)


def accumulation_dtype() -> torch.dtype:
    """Return the dtype of logged tensors in other precisions: the default dtype, but at least float32."""
    dtype = torch.get_default_dtype()
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _sum_in_order(start: Tensor, values: Tensor) -> Tensor:
    """Return ``start + values[0] + values[1] + ...``, rounded after each addition, in one kernel.

    ``sum`` and ``cumsum`` use another order or precision. ``segment_reduce`` adds each column in one thread. On a GPU,
    this requires several columns, so there are two equal ones.
    """
    column = torch.cat([start.reshape(1), values])
    count = torch.full((1,), len(column), device=column.device)
    columns = column.unsqueeze(1).expand(-1, 2).contiguous()
    return torch.segment_reduce(columns, "sum", lengths=count, unsafe=True)[0, 0]


def _without_graph(value: Any) -> Any:
    """Detach the value of a metric object, which may keep the batch's graph alive (as MeanSquaredError does)."""
    return value.detach() if isinstance(value, Tensor) else value


class StageMetrics(NamedTuple):
    """Metrics by consumer, as 0-dim tensors."""

    callback: dict[str, Any]
    logger: dict[str, Any]
    progress_bar: dict[str, Any]


class Outline(NamedTuple):
    """Description of a logged name that processes exchange."""

    key: tuple[str | None, str, int | None]
    options: tuple[Any, ...]
    dataloader_idx: int | None
    metric: str | None
    dtype: torch.dtype | None = None
    value_dtype: torch.dtype | None = None


class MetricStore:
    """Values logged in one stage (training, or one kind of evaluation) since the epoch started.

    Args:
        training: whether the stage is training, with step values that callbacks may monitor.

    Attributes:
        shares_steps: whether values of single batches are reduced over the processes, if requested.
        shared_hooks: hooks that are called for each batch. Their logged values are reduced over the processes at the
            end of the epoch, even if not requested, because a process has seen only a part of the data.
    """

    def __init__(self, training: bool) -> None:
        self.training = training
        self.entries: dict[tuple[str | None, str, int | None], LoggedValue] = {}
        self.batch: Any = None
        self.batch_size: int | None = None
        self.dataloader_idx: int | None = None
        self.shares_steps = True
        self.shared_hooks: Collection[str] = ()
        self.in_batch = False
        """Whether the current values are those of a step: from an epoch's first batch to its :meth:`end_epoch`."""
        self.copies: list[tuple[Tensor, int, Tensor]] = []
        """For each tensor logged in this batch: the tensor without its graph, its version, and its copy."""
        self.reduced_names = 0
        """Checksum of the names of the values of single batches that were reduced over the processes in this epoch."""

    def begin_batch(self, batch: Any, dataloader_idx: int | None = None) -> None:
        """Begin a batch. ``self.log`` infers the batch size from ``batch``."""
        self.batch = batch
        self.batch_size = None
        self.dataloader_idx = dataloader_idx
        self.in_batch = True

    def copy_of(self, value: Tensor) -> Tensor:
        """Return a copy that outlives the batch: the one that ``self.log`` made of this value, if it was logged."""
        for logged, version, copy in self.copies:
            if logged.is_set_to(value) and version == value._version:  # the same memory, not written to since
                return copy
        return value.detach().clone()

    def share_steps(self, shares: bool) -> None:
        """Set whether values of single batches are reduced over the processes if ``sync_dist`` is set.

        They cannot be reduced if another process does not have the batch.
        """
        self.shares_steps = shares
        for entry in self.entries.values():
            entry.shares_steps = shares and entry.options.sync_dist and not entry.options.rank_zero_only

    def outline(self, name_of: Callable[[Any], str | None]) -> list[Outline]:
        """Return the values of the current dataloader that are reduced over all processes, in the order of logging.

        These are metric objects, values logged with ``sync_dist``, and values logged in the hooks ``shared_hooks``,
        except those with ``rank_zero_only`` or a process group.

        Args:
            name_of: returns the name of a metric object. Objects without a name (None) are excluded.
        """
        outlines = []
        for key, entry in self.entries.items():
            options = entry.options
            if not entry.has_value or not options.on_epoch or entry.dataloader_idx != self.dataloader_idx:
                continue
            if entry.metric is not None:
                if (name := name_of(entry.metric)) is not None:
                    outlines.append(
                        Outline(key, tuple(options._replace(sync_dist_group=None)), entry.dataloader_idx, name)
                    )
            elif (options.sync_dist or entry.hook in self.shared_hooks) and not (
                options.rank_zero_only or options.sync_dist_group
            ):
                total, _, value_dtype = entry.accumulated()
                dtype = None if total is None else total.dtype
                outlines.append(Outline(key, tuple(options), entry.dataloader_idx, None, dtype, value_dtype))
        return outlines

    def complete(self, outlines: Sequence[Sequence[Outline]], metric_of: Callable[[str], Any], reduce: Reduce) -> None:
        """Let all processes reduce the same values in the same order, even if only one of them has logged a value.

        Args:
            outlines: the result of :meth:`outline` on each process.
            metric_of: returns the metric object with a name.
            reduce: reduces a tensor over the processes.
        """
        union = {described.key: described for outline in outlines for described in outline}
        for key, described in union.items():
            if (entry := self.entries.get(key)) is None:
                options = LogOptions(*described.options)
                entry = LoggedValue(key[0] or "", key[1], options, described.dataloader_idx, reduce)
                self.entries[key] = entry
            if described.metric is not None:
                entry.metric, entry.has_value = metric_of(described.metric), True
            else:
                same = [other for outline in outlines for other in outline if other.key == key]
                dtypes = (filter(None, map(attrgetter(name), same)) for name in ("dtype", "value_dtype"))
                entry.join(*(functools.reduce(torch.promote_types, each) for each in dtypes))
        if [key for key in self.entries if key in union] != list(union):
            rest = {key: entry for key, entry in self.entries.items() if key not in union}
            ordered = {key: self.entries[key] for key in union}
            self.entries.clear()
            self.entries.update(ordered | rest)

    def align(self, gather_if_different: Callable[[Any], list[Any]], reduce: Reduce) -> None:
        """Let all processes reduce the same values over an epoch of training; see :meth:`complete`.

        Warns if the values of single batches that were reduced together had different names.

        Args:
            gather_if_different: gathers a value on all processes; returns one value if all are equal.
            reduce: reduces a tensor over the processes.
        """
        gathered = gather_if_different((self.outline(lambda _: None), self.reduced_names))
        self.reduced_names = 0
        if len(gathered) == 1:
            return
        if len({checksum for _, checksum in gathered}) > 1:
            names = sorted({entry.name for entry in self.entries.values() if entry.reduces_steps})
            rank_zero_warn(
                "In this epoch, the processes logged different names, or the same names in another order, with"
                f" `on_step=True, sync_dist=True` ({', '.join(names)} on this process). Values of different names were"
                " reduced together, so they are wrong. Log the same names in the same order on all processes, or use"
                " `on_step=False, on_epoch=True`."
            )
        self.complete([outline for outline, _ in gathered], lambda _: None, reduce)

    def take_first(self, broadcast: Callable[[Any], Any]) -> None:
        """Replace values that were not reduced over the processes with the values of rank 0, at the end of the epoch.

        Thus callbacks make the same decisions on all processes, based on the values in the loggers. Values that are
        logged with ``rank_zero_only`` are not replaced.

        Args:
            broadcast: returns the argument of rank 0.
        """
        unreduced = {
            key: entry
            for key, entry in self.entries.items()
            if entry.has_value and entry.metric is None and not (entry.shares_epochs or entry.options.rank_zero_only)
        }
        current = {key: entry.epoch_value() for key, entry in unreduced.items()}
        values = to_scalars({key: value for key, value in current.items() if value is not None})
        for key, value in broadcast(values).items():
            if key in values:
                unreduced[key].replace(value)

    def refuse_shared_metrics(self, before: Mapping[int, int]) -> None:
        """Raise an error if the value of a logged metric object also includes data of another stage or dataloader.

        Args:
            before: the numbers of updates of metric objects, by ``id`` (see ``update_counts``), at the start of the
                dataloader, of the pass, or of a validation inside the epoch of training.

        Raises:
            ConfigurationError: if a metric object was updated before and after this start, without a reset in between.
        """
        for entry in self.entries.values():
            metric = entry.metric
            if metric is None or not entry.has_value or not entry.options.on_epoch:
                continue
            if entry.dataloader_idx == self.dataloader_idx and 0 < before.get(id(metric), 0) < updates_of(metric):
                suffix = "" if self.dataloader_idx is None else f" for dataloader {self.dataloader_idx}"
                raise ConfigurationError(
                    f"The metric object ({type(metric).__name__}) logged as {entry.name!r}{suffix} was also updated"
                    " with the data of another stage or dataloader, and its value would include both. Use a separate"
                    " metric object for each stage and each dataloader, or call its reset() in between."
                )

    def end_batch(self) -> None:
        """End a batch: release the references to it and to the values logged in it."""
        if self.copies:
            self.copies.clear()
        self.batch = None
        self.batch_size = None

    def end_epoch(self) -> None:
        """End the batches of the epoch. From here on, the current values are those of the epoch."""
        self.in_batch = False

    def current(self, on_step: bool | None = None) -> StageMetrics:
        """Return the last step's values, or the epoch's reductions (of the current dataloader).

        Args:
            on_step: True for the step's values, False for the epoch's. Default: None, the value of ``in_batch``.

        Raises:
            ConfigurationError: if the value of a metric object is not a tensor.
        """
        metrics = StageMetrics({}, {}, {})
        on_step = self.in_batch if on_step is None else on_step
        for entry in self.entries.values():
            options = entry.options
            if not entry.has_value or entry.dataloader_idx != self.dataloader_idx:
                continue
            if not (options.on_step if on_step else options.on_epoch):
                continue
            value = entry.step_value if on_step else entry.epoch_value()
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise ConfigurationError(
                    f"The `.compute()` return of the metric logged as {entry.name!r} must be a tensor."
                    f" Found {value}. Log its parts one by one, or a MetricCollection with self.log_dict."
                )
            name = full_name = entry.name
            if options.on_step and options.on_epoch:
                full_name += "_step" if on_step else "_epoch"
            if options.add_dataloader_idx and entry.dataloader_idx is not None:
                name += f"/dataloader_idx_{entry.dataloader_idx}"
                full_name += f"/dataloader_idx_{entry.dataloader_idx}"
            if options.logger:
                metrics.logger[full_name] = value
            if self.training or not on_step:
                metrics.callback[name] = value
                metrics.callback[full_name] = value
            if options.prog_bar:
                metrics.progress_bar[full_name] = value
        return metrics

    def reset(self) -> None:
        """Reset all values at the end of an epoch; keep the names."""
        for entry in self.entries.values():
            entry.reset()
        self.batch = None
        self.batch_size = None
        self.dataloader_idx = None
        self.in_batch = False
        self.reduced_names = 0

    def state_dict(self, name_of: Callable[[Any], str | None]) -> dict[str, Any]:
        """Return the values logged since the epoch started.

        Args:
            name_of: returns the name of a metric object, to find it again. Objects without a name (None) are excluded.
        """
        entries = []
        for key, entry in self.entries.items():
            name = None if entry.metric is None else name_of(entry.metric)
            if entry.metric is None or name is not None:
                entries.append({**entry.state_dict(), "key": list(key), "metric": name})
        return {"in_batch": self.in_batch, "entries": entries}

    def load_state_dict(
        self, state: dict[str, Any], metric_of: Callable[[str], Any], reduce: Reduce, device: torch.device
    ) -> None:
        """Restore the state that :meth:`state_dict` returned.

        Args:
            state: the state.
            metric_of: returns the metric object with a name.
            reduce: reduces a tensor over the processes.
            device: the device of the values.
        """
        self.in_batch = state["in_batch"]
        for saved in state["entries"]:
            options = LogOptions(*saved["options"])
            entry = LoggedValue(saved["hook"], saved["name"], options, saved["dataloader_idx"], reduce)
            entry.load_state_dict(saved, device)
            if saved["metric"] is not None:
                entry.metric = metric_of(saved["metric"])
            hook, name, dataloader_idx = saved["key"]
            self.entries[hook, name, dataloader_idx] = entry

    def names(self) -> set[str]:
        """Return all names that its values may have been published under."""
        names = set()
        for entry in self.entries.values():
            has_index = entry.options.add_dataloader_idx and entry.dataloader_idx is not None
            index = f"/dataloader_idx_{entry.dataloader_idx}" if has_index else ""
            names |= {f"{entry.name}{moment}{index}" for moment in ("", "_step", "_epoch")}
        return names

    def clear(self) -> None:
        """Remove all values and all names."""
        self.reset()
        self.entries.clear()


def shared_among(processes: int, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Convert the states of a run with another number of processes to the state that each process gets.

    Each process gets an equal part of all sums and counts, so that a mean includes all logged values, whether or not
    they are reduced over the processes. Each process gets the whole maximum or minimum.

    Args:
        processes: the current number of processes.
        states: the states of the saved processes' MetricStores.

    Returns:
        The state for :meth:`MetricStore.load_state_dict`.
    """
    logged: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for state in states:
        for entry in state["entries"]:
            logged.setdefault(tuple(entry["key"]), []).append(entry)
    return {**states[0], "entries": [_shared(ones, processes) for ones in logged.values()]}


def _shared(entries: list[dict[str, Any]], processes: int) -> dict[str, Any]:
    first, options = entries[0], LogOptions(*entries[0]["options"])
    sums: list[tuple[Tensor, Any]] = []
    dtype = first.get("dtype")
    for entry in entries:
        value = LoggedValue(entry["hook"], entry["name"], options, entry["dataloader_idx"], torch.as_tensor)
        value.load_state_dict(entry, torch.device("cpu"))
        total, weight, value_dtype = value.accumulated()
        sums += [] if total is None else [(total.double(), weight)]
        dtype = value_dtype or dtype
    if not sums or options.rank_zero_only:
        return first
    values, weights = torch.stack([total for total, _ in sums]), sum(weight for _, weight in sums)
    if options.reduce_fx in ("max", "min"):
        total = values.amax() if options.reduce_fx == "max" else values.amin()
    else:
        total = values.sum() / processes
    return {**first, "pending": [], "weights": [], "total": total, "weight": weights / processes, "dtype": dtype}


class PublishedMetrics:
    """The dictionaries for loggers, callbacks and progress bars, such as ``trainer.callback_metrics``.

    Each is one live dict for the whole run, because some callbacks write into ``callback_metrics``. The next run gets
    new ones, so that references to those of an earlier run do not change.

    Args:
        progress: provides the current epoch, which is added to every row of the loggers.

    Attributes:
        loggers: the loggers that get the rows.
    """

    def __init__(self, progress: FitProgress) -> None:
        self.callback: dict[str, Any] = {}
        self.logged: dict[str, Any] = {}
        self.progress_bar: dict[str, Any] = {}
        self.loggers: list[Any] = []
        self._progress = progress

    def begin_run(self) -> None:
        """Publish new, empty dictionaries from now on."""
        self.callback, self.logged, self.progress_bar = {}, {}, {}

    def take(self, metrics: StageMetrics) -> None:
        """Update the published values of these names."""
        self.callback.update(metrics.callback)
        self.logged.update(metrics.logger)
        self.progress_bar.update(metrics.progress_bar)

    def send(self, metrics: dict[str, Any], step: int, *, exact_step: bool = False) -> None:
        """Send one row to every logger, and add it to ``logged``. A host-device synchronization on a GPU.

        A no-op without loggers.

        Args:
            metrics: names and 0-dim tensors or numbers.
            step: the row's step. If the user logged a metric called ``step``, that is used instead, and no epoch is
                added.
            exact_step: use ``step`` unchanged and add no epoch (for rows of single evaluation batches). Default: False.
        """
        if not self.loggers or not metrics:
            return
        self.logged.update(metrics)
        scalars = to_scalars(metrics)
        if not exact_step and "step" in scalars:
            step = int(scalars.pop("step"))
        elif not exact_step:
            scalars.setdefault("epoch", self._progress.epoch)
        for logger in self.loggers:
            logger.log_metrics(metrics=scalars, step=step)
            logger.save()

    def drop(self, names: Collection[str]) -> None:
        """Remove the values of these names."""
        for metrics in (self.callback, self.logged, self.progress_bar):
            for name in metrics.keys() & names:
                del metrics[name]

    def read_progress_bar(self) -> dict[str, Any]:
        """Return the progress bar's metrics as numbers. At most one host-device synchronization."""
        self.progress_bar.update(to_scalars(self.progress_bar))
        return self.progress_bar

    def take_to_cpu(self) -> None:
        """Move the published values to the host at the end of a run, so that they keep no device memory."""
        for metrics in (self.callback, self.logged, self.progress_bar):
            metrics.update({name: value.cpu() for name, value in metrics.items() if isinstance(value, Tensor)})

    def clear(self) -> None:
        """Remove all metrics after a sanity check, in place."""
        for metrics in (self.callback, self.logged, self.progress_bar):
            metrics.clear()


def to_scalars(metrics: dict[T, Any]) -> dict[T, Any]:
    """Convert tensors to Python numbers, with at most one host-device synchronization for each device.

    On MPS there are at most two, one of them for integers.

    Raises:
        ConfigurationError: if a tensor has more than one element.
    """
    scalars = dict(metrics)
    on_device: dict[tuple[torch.device, torch.dtype], list[tuple[T, Tensor]]] = {}
    for name, value in metrics.items():
        if not isinstance(value, Tensor):
            continue
        if value.numel() != 1:
            raise ConfigurationError(
                f"The metric `{value}` does not contain a single element, thus it cannot be converted to a scalar."
                f" Log {name!r} as a mean, or its elements one by one."
            )
        if value.device.type == "cpu":
            scalars[name] = value.item()
        else:
            on_device.setdefault((value.device, _dtype_to_read(value)), []).append((name, value))
    for (_, dtype), named in on_device.items():
        numbers = torch.stack([value.detach().reshape(()).to(dtype) for _, value in named]).tolist()
        scalars.update(zip((name for name, _ in named), numbers, strict=True))
    return scalars


def _dtype_to_read(value: Tensor) -> torch.dtype:
    """Return a dtype that represents the value exactly; except on MPS, integers above 2**53 are rounded."""
    if value.device.type != "mps":
        return torch.float64
    return torch.float32 if value.is_floating_point() else torch.int64  # MPS has no double precision
