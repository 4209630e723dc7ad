"""A faster ``LightningModule.log``, and adapters for Lightning's code that reads or writes logged metrics.

Lightning's own takes about 350 microseconds per call. This one checks a name's options at the first call and only
compares them afterwards. A module that overrides ``log`` keeps its override; ``super().log()`` in it reaches the same
metrics through :class:`ResultsView`.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any, Protocol
from zlib import crc32

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torchmetrics import Metric

from trainer.common.collectives import Collectives
from trainer.common.parts import whole
from trainer.common.session import Session
from trainer.errors import rank_zero_warn
from trainer.metrics.metrics import (
    LoggedValue,
    LogOptions,
    MetricStore,
    PublishedMetrics,
    accumulation_dtype,
    to_scalars,
)
from trainer.precision.compilation import keep_out_of_graphs
from trainer.state.progress import FitProgress

_LOSSLESS_DTYPES = (torch.float32, torch.float64)
"""Values of other dtypes are converted to one of these; otherwise, the sum over an epoch would lose digits."""
_LOG = LightningModule.log

# our own hook, which Lightning's table of hooks lacks
_FxValidator.functions["on_after_optimizer_step"] = _FxValidator.functions["on_before_optimizer_step"]


class LoggedRun(Protocol):
    """The parts of a run that logging needs: a ``trainer.loop.run_state.RunState``."""

    callbacks: list[Any]
    collectives: Collectives
    device: torch.device
    progress: FitProgress
    published: PublishedMetrics

    @property
    def active_metrics(self) -> MetricStore | None: ...
    @property
    def loggers(self) -> list[Any]: ...
    @property
    def module(self) -> LightningModule: ...
    @property
    def world_size(self) -> int: ...
    def first_batch_size(self, index: int) -> int | None: ...


class ModuleLog:
    """Replaces a module's ``log`` during a run.

    Args:
        module: the LightningModule, or an object with its ``_current_fx_name``.
        run: the state of the run, with the metrics of the running stage (``active_metrics``) and the loggers.
        copies: whether a tensor is copied, because the caller may change it in place later. Default: True.
    """

    def __init__(self, module: Any, run: LoggedRun, *, copies: bool = True) -> None:
        self._module = module
        self._copies = copies
        self._state = vars(module)
        self._run = run
        step = getattr(module, "training_step", None)
        self._has_warned = False  # of an inferred batch size
        self._draws = step is not None and is_param_in_hook_signature(step, "dataloader_iter", explicit=True)

    def __reduce__(self) -> Any:
        # SWA and WeightAveraging copy the module: the copy has no trainer
        return _DetachedLog, ()

    def __call__(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a value. Arguments and errors are those of ``LightningModule.log``."""
        store: MetricStore | None = self._run.active_metrics
        hook = self._state["_current_fx_name"]
        # LogOptions as a bare tuple, which costs a tenth of a named one
        given: tuple[Any, ...] = (prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, sync_dist_group,
                                  add_dataloader_idx, rank_zero_only, enable_graph)  # fmt: skip
        entry = None
        if store is not None:
            entry = store.entries.get((hook, name, store.dataloader_idx if add_dataloader_idx else None))
        if entry is None:
            entry = self._register(store, hook, name, value, LogOptions(*given), metric_attribute)
            if batch_size is None and store is not None and not isinstance(value, Metric):
                self._check_batch_size(store, entry.options)
        elif entry.first_options is None:  # restored from a checkpoint
            restored, entry = entry, self._register(store, hook, name, value, LogOptions(*given), metric_attribute)
            entry.load_state_dict(restored.state_dict(), self._run.device)
        elif entry.first_options != given or (not add_dataloader_idx and entry.dataloader_idx != store.dataloader_idx):  # type: ignore[union-attr]
            if entry.first_options != given or entry.has_value:
                raise MisconfigurationException(
                    f"You called `self.log({name}, ...)` twice in `{hook}` with different arguments. This is not"
                    " allowed"
                )
            # another dataloader logged the name in an earlier pass
            entry = self._register(store, hook, name, value, LogOptions(*given), metric_attribute)
        assert store is not None
        dtype = torch.float64
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"`self.log({name}, {value})` was called, but the tensor must have a single element."
                    f" You can try doing `self.log({name}, {value}.mean())`"
                )
            if type(value) is Tensor and value.is_cpu and value.dtype in _LOSSLESS_DTYPES:
                dtype, value = value.dtype, value.item()
            else:
                value = self._copy(value, store)
        elif (entry.metric is not None and value is entry.metric) or isinstance(value, Metric):  # the second is slow
            entry.update_metric(value)
            return
        elif isinstance(value, numbers.Number):
            value = float(value) if isinstance(value, (int, float)) else torch.tensor(value, dtype=dtype)
        else:
            raise ValueError(
                f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values cannot be logged"
            )
        if batch_size is None:
            if self._draws and store.training:
                raise MisconfigurationException(
                    "With `def training_step(self, dataloader_iter)`, `self.log(..., batch_size=...)` should be"
                    " provided."
                )
            batch_size = _batch_size(store) if entry.options.on_epoch and entry.options.reduce_fx == "mean" else 1
        if entry.shares_steps and entry.reduces_steps:
            store.reduced_names = crc32(name.encode(), store.reduced_names)
        entry.update(value, batch_size, dtype)

    def _copy(self, value: Tensor, store: MetricStore) -> Tensor:
        """Return a 0-dim tensor without a graph, in a lossless dtype, that the caller cannot change."""
        value = whole(value.detach())
        if value.dtype not in _LOSSLESS_DTYPES:
            value = value.to(_lossless_dtype(value))
        elif self._copies:
            copy = value.clone()
            if not value.is_inference():  # inference tensors have no version
                store.copies.append((value, value._version, copy))
            value = copy
        return value.reshape(()) if value.dim() else value

    def _register(
        self,
        store: MetricStore | None,
        hook: str | None,
        name: str,
        value: Any,
        given: LogOptions,
        metric_attribute: str | None,
    ) -> LoggedValue:
        """Check the options of a name that is logged for the first time, and create its entry."""
        run = self._run
        if store is None:
            raise MisconfigurationException(
                "You are trying to `self.log()` but the loop's result collection is not registered"
                " yet. This is most likely because you are trying to log in a `predict` hook,"
                " but it doesn't support logging"
            )
        if hook is None:
            raise MisconfigurationException(
                "You are trying to `self.log()` but it is not managed by the `Trainer` control flow"
            )
        if isinstance(value, dict):
            raise ValueError(f"`self.log({name}, {value})` was called, but `dict` values cannot be logged")
        on_step, on_epoch = _FxValidator.check_logging_and_get_default_levels(
            hook, on_step=given.on_step, on_epoch=given.on_epoch
        )
        if given.add_dataloader_idx and "/dataloader_idx_" in name:
            raise MisconfigurationException(
                f"You called `self.log` with the key `{name}`"
                " but it should not contain information about `dataloader_idx` when `add_dataloader_idx=True`"
            )
        reduce_fx: Any = given.reduce_fx  # a function, or its name
        checked = _Metadata(hook, name, on_step=on_step, on_epoch=on_epoch, reduce_fx=reduce_fx)
        if isinstance(value, Metric) and metric_attribute is None:
            _find_attribute(self._module, name, value)
        if given.logger and not run.loggers:
            rank_zero_warn(
                f"You called `self.log({name!r}, ..., logger=True)` but have no logger configured. You can enable one"
                " by doing `Trainer(logger=ALogger(...))`"
            )
        is_shared = given.sync_dist or given.rank_zero_only or hook in store.shared_hooks
        if run.world_size > 1 and on_epoch and not isinstance(value, Metric) and not is_shared:
            rank_zero_warn(
                f"It is recommended to use `self.log({name!r}, ..., sync_dist=True)`"
                " when logging on epoch level in distributed setting to accumulate the metric across"
                " devices.",
                category=PossibleUserWarning,
            )
        if isinstance(value, Tensor) and not value.is_floating_point():
            rank_zero_warn(
                f"You called `self.log({name!r}, ...)` in your `{hook}` but the value needs to"
                f" be floating to be reduced. Converting it to {_lossless_dtype(value)}."
                " You can silence this warning by converting the value to floating point yourself."
            )
        options = given._replace(
            logger=given.logger is None or given.logger,
            on_step=on_step,
            on_epoch=on_epoch,
            reduce_fx=checked.reduce_fx.__name__,
            sync_dist=given.sync_dist and run.world_size > 1,
        )
        dataloader_idx = store.dataloader_idx if given.add_dataloader_idx else None
        entry = LoggedValue(hook, name, options, store.dataloader_idx, run.collectives.reduce)
        entry.first_options = given
        entry.shares_steps &= store.shares_steps
        store.entries[hook, name, dataloader_idx] = entry
        return entry

    def _check_batch_size(self, store: MetricStore, options: LogOptions) -> None:
        """Warn once if a mean infers a size of the first batch of a pass that is not that of its dataloader."""
        is_inferred = options.on_epoch and options.reduce_fx == "mean" and store.batch is not None
        if self._has_warned or not is_inferred or (self._draws and store.training):
            return
        size = self._run.first_batch_size(store.dataloader_idx or 0)
        if size is not None and size != (inferred := _batch_size(store)):
            self._has_warned = True
            rank_zero_warn(
                f"`self.log` inferred a batch size of {inferred} from a batch of a dataloader with batch_size={size}."
                " Means over an epoch are weighted by this number, so they may be wrong. Use"
                " `self.log(..., batch_size=...)`."
            )


keep_out_of_graphs(ModuleLog.__call__)


class _DetachedLog:
    """The ``log`` of a copied module, which has no Trainer."""

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        rank_zero_warn(
            "You are trying to `self.log()` but the `self.trainer` reference is not registered on the model yet."
            " This is most likely because the model hasn't been passed to the `Trainer`"
        )


class ResultView(_ResultMetric):
    """One value of ``trainer._results``: logged under one name from one hook.

    It has Lightning's type, but no metric states.

    Args:
        entry: its values.
        module: the module that is searched for the attribute name of a metric object.
    """

    def __init__(self, entry: LoggedValue, module: Any) -> None:
        self._entry = entry
        self._module = module
        self.is_tensor = entry.metric is None

    @property
    def value(self) -> Any:
        """The metric object; or the sum over the epoch, in this process; or the last value."""
        entry = self._entry
        if entry.metric is not None:
            return entry.metric
        return entry.accumulated()[0] if entry.options.on_epoch else entry.step_value

    @property
    def cumulated_batch_size(self) -> Any:  # type: ignore[override]
        """The number of samples in the epoch so far, in this process."""
        return self._entry.accumulated()[1]

    @property
    def meta(self) -> SimpleNamespace:  # type: ignore[override]
        """The options it was logged with."""
        entry = self._entry
        return SimpleNamespace(
            **entry.options._asdict(),
            fx=entry.hook,
            name=entry.name,
            dataloader_idx=entry.dataloader_idx,
            sync=SimpleNamespace(should=entry.options.sync_dist),
            metric_attribute=_attributes_of(self._module).get(id(entry.metric)),
        )

    def compute(self) -> Any:
        """Return the reduction over the epoch."""
        return self._entry.epoch_value()


class ResultsView(Mapping[str, ResultView]):
    """``trainer._results``: the logged values of the running stage, by hook and name (``training_step.loss``).

    Lightning's ``log`` writes here if a module overrides ``log`` and calls ``super().log()``.

    Args:
        run: the state of the run.
        store: the metrics of its running stage.
    """

    def __init__(self, run: LoggedRun, store: MetricStore) -> None:
        self._run = run
        self._store = store

    def __getitem__(self, key: str) -> ResultView:
        return ResultView(self._by_key()[key], self._run.module)

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_key())

    def __len__(self) -> int:
        return len(self._store.entries)

    def _by_key(self) -> dict[str, LoggedValue]:
        entries = self._store.entries.items()
        return {".".join(str(word) for word in key if word is not None): entry for key, entry in entries}

    @property
    def result_metrics(self) -> list[ResultView]:
        """A list of all values."""
        return list(self.values())

    @property
    def dataloader_idx(self) -> int | None:
        """The index of the current dataloader, if there are several."""
        return self._store.dataloader_idx

    @property
    def batch(self) -> Any:
        """The current batch."""
        return self._store.batch

    def metrics(self, on_step: bool) -> dict[str, dict[str, Any]]:
        """Return the values of the step or of the epoch for callbacks, loggers and the progress bar."""
        metrics = self._store.current(on_step)
        return {"callback": metrics.callback, "log": metrics.logger, "pbar": to_scalars(metrics.progress_bar)}

    def log(self, fx: str, name: str, value: Any, *, sync_dist_fn: Any = None, **options: Any) -> None:
        """Log a value. Lightning has filled in the options that were not given: ``logger=None`` has become True."""
        options["logger"] = None if options.get("logger") else False
        log = ModuleLog(SimpleNamespace(_current_fx_name=fx), self._run)
        log(name, value, **options)

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Do nothing: the loops reset their metrics when an epoch starts."""


class LoggerConnector(_LoggerConnector):
    """``trainer._logger_connector``: Lightning's, for the metrics that our loops publish."""

    def __init__(self, trainer: pl.Trainer, run: LoggedRun) -> None:
        super().__init__(trainer)
        self._run = run

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """All metrics logged so far, for callbacks to monitor; 0-dim tensors. One live dict."""
        return self._fresh().callback

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """All metrics logged so far for loggers; 0-dim tensors or numbers."""
        return self._fresh().logged

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        """All metrics logged so far for the progress bar; numbers. Reading it is a host-device synchronization."""
        return self._fresh().read_progress_bar()

    def _fresh(self) -> PublishedMetrics:
        """Return the published metrics, updated with those that the running stage has logged since."""
        store, published = self._run.active_metrics, self._run.published
        if store is not None and store.entries:
            published.take(store.current())
        return published

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Send a row to the loggers."""
        run = self._run
        at = run.progress.updates if step is None else step
        run.published.send(metrics, at, exact_step=step is not None)


def attach_log(module: LightningModule, run: LoggedRun, session: Session, *, barebones: bool) -> Callable[..., None]:
    """Replace ``module.log`` by a :class:`ModuleLog`, unless it is overridden in a class or on an instance.

    Callbacks get the module's ``log`` and ``log_dict``; ours use ``trainer.log_metric``, which bypasses overrides and
    does not copy values. With ``barebones`` the module keeps Lightning's ``log``, which warns that nothing is logged.
    """
    log = ModuleLog(module, run)
    for submodule in () if barebones else module.modules():
        if not isinstance(submodule, LightningModule):
            continue
        if type(submodule).log is _LOG and isinstance(vars(submodule).get("log", log), (ModuleLog, _DetachedLog)):
            session.replace(submodule, "log", log)  # a child module logs through its parent's trainer
        for method in (submodule.log, submodule.log_dict):
            function = getattr(method, "__func__", method)
            if isinstance(function, FunctionType):
                keep_out_of_graphs(function)
    for callback in run.callbacks:
        session.replace(callback, "log", module.log)
        session.replace(callback, "log_dict", module.log_dict)
    return no_log if barebones else ModuleLog(module, run, copies=False)


def no_log(name: str, value: Any, **options: Any) -> None:
    """Do nothing: the ``log_metric`` of a Trainer that has no run yet, or has ``barebones=True``."""


def _lossless_dtype(value: Tensor) -> torch.dtype:
    """Return the dtype that a logged tensor is converted to: integers to float64, except on MPS."""
    if value.is_floating_point() or value.device.type == "mps":  # MPS has no double precision
        return accumulation_dtype()
    return torch.float64


def _batch_size(store: MetricStore) -> int:
    """Return the number of samples in the current batch, determined once per batch and only if a mean needs it."""
    size = store.batch_size
    if size is None:
        batch = store.batch
        if batch is None:
            return 1
        items = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else (batch,)
        sizes = {len(item) if isinstance(item, Tensor) and item.dim() else None for item in items}
        # the usual case, tensors of one size, in a tenth of the time of Lightning's function
        size = store.batch_size = (sizes.pop() if len(sizes) == 1 else None) or extract_batch_size(batch)
    return size


def _attributes_of(module: Any) -> dict[int, str]:
    """Return the attribute names of a module's metric objects, by ``id``."""
    return {id(metric): name for name, metric in module.named_modules() if isinstance(metric, Metric)}


def _find_attribute(module: LightningModule, name: str, metric: Metric) -> None:
    """Refuse a metric that is not an attribute of the module, because it would not be moved to the device or saved."""
    attributes = _attributes_of(module)
    if not attributes:
        raise MisconfigurationException(
            "Could not find the `LightningModule` attribute for the `torchmetrics.Metric` logged. You can fix this by"
            " setting an attribute for the metric in your `LightningModule`."
        )
    if id(metric) not in attributes:
        raise MisconfigurationException(
            "Could not find the `LightningModule` attribute for the `torchmetrics.Metric` logged."
            f" You can fix this by calling `self.log({name}, ..., metric_attribute=name)` where `name` is one"
            f" of {list(attributes.values())}"
        )
