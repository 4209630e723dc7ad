"""Dataloaders: request them, distribute them over processes, and limit them, through Lightning's data connector.

Dataloaders are opened at the same points as in Lightning, because opening them draws random numbers.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.utilities import _select_data_fetcher
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer.connectors.data_connector import (
    _check_dataloader_iterable,
    _DataConnector,
    _DataHookSelector,
    _DataLoaderSource,
    _parse_num_batches,
    _process_dataloader,
    _request_dataloader,
    _resolve_overfit_batches,
)
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import _is_dataloader_shuffled, has_len_all_ranks
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from trainer.data.batches import LoaderPlan, Origin
from trainer.data.elastic_sampling import ElasticSampler, not_ordered
from trainer.data.loader_parts import has_exact_length, is_trusted, objects_with_set_epoch
from trainer.data.prefetching import Prefetching
from trainer.data.resumable import length_of
from trainer.data.unpadded import BatchShare, SampleShare, Span
from trainer.data.workers import guard_workers
from trainer.errors import ConfigurationError, ResumeError, rank_zero_warn
from trainer.lightning.loaders import DrawnLoaderSet, LoaderSet, count_batches, watch_of
from trainer.lightning.modules import snapshot_of
from trainer.loop.accumulation import WeightedMean
from trainer.loop.overrides import overrides
from trainer.loop.run_state import RunState
from trainer.metrics.metrics import MetricStore
from trainer.state import random_states
from trainer.state.snapshot import Snapshot

_STAGES = RunningStage.TRAINING, RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.PREDICTING


class _Connector(_DataConnector):
    """Lightning's data connector, which passes attached data to our source of dataloaders.

    Args:
        run: the state of the run.
        source: our source of dataloaders.
    """

    trainer: pl.Trainer

    def __init__(self, run: RunState, source: DataSource) -> None:
        super().__init__(run.trainer)
        self._run = run
        self._source = source

    def attach_data(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        test_dataloaders: Any = None,
        predict_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
    ) -> None:
        """Attach the data of a later run, so that the number of batches can be read before the run."""
        given = train_dataloaders, val_dataloaders, test_dataloaders, predict_dataloaders
        model.trainer = self.trainer
        self._source.attach(model, dict(zip(_STAGES, given, strict=True)), datamodule)

    def _prepare_dataloader(self, dataloader: Any, shuffle: bool, mode: RunningStage) -> Any:
        """Distribute the data over the processes. In a prediction, also record the indices.

        Raises:
            ConfigurationError: if a prediction on several processes uses a batch sampler that is neither a list nor
                like torch's ``BatchSampler``, because each process would predict everything.
        """
        batches = getattr(dataloader, "batch_sampler", None)
        if not isinstance(dataloader, DataLoader) or batches is None:
            return super()._prepare_dataloader(dataloader, shuffle, mode)
        predicts = mode is RunningStage.PREDICTING
        divides, is_list = self._requires_distributed_sampler(dataloader), isinstance(batches, (list, tuple))
        if divides and predicts and not is_list and not _takes_sampler(batches):
            raise ConfigurationError(
                f"Got a batch sampler of the class {type(batches).__name__} for predict on several processes: it cannot"
                " be divided among them. Pass a list of batches, derive the class from torch.utils.data.BatchSampler,"
                " or divide the batches in it and set Trainer(use_distributed_sampler=False)."
            )
        if divides and type(batches) is BatchSampler and dataloader.batch_size is None:
            dataloader = _with_batch_size(dataloader, batches)
            shuffle = mode is RunningStage.TRAINING and _is_dataloader_shuffled(dataloader)
        if not is_list and (hasattr(batches, "__dict__") or not predicts):
            return super()._prepare_dataloader(dataloader, shuffle, mode)
        padded = mode is not RunningStage.TRAINING and not predicts and self._run.pad_evaluation
        share = BatchShare(batches, **(self.trainer.distributed_sampler_kwargs or {}) if divides else {}, padded=padded)
        view = copy(dataloader)  # changed through `vars`, because a dataloader refuses another batch sampler
        vars(view).update(batch_sampler=_IndexBatchSamplerWrapper(share) if predicts else share, _iterator=None)
        return view

    def _resolve_sampler(self, dataloader: Any, shuffle: bool, mode: RunningStage | None = None) -> Any:
        """Divide the samples among the processes: in an evaluation each once; in training equally many for each.

        With ``shuffle=True``, training uses torch's ``DistributedSampler``, as in Lightning. Otherwise, the samples of
        all processes have the order of a single process.
        """
        sampler, trains = dataloader.sampler, mode is RunningStage.TRAINING
        as_in_lightning = self._run.pad_evaluation and mode is not RunningStage.PREDICTING
        if trains:
            sampler = getattr(dataloader.batch_sampler, "sampler", None)
            if isinstance(sampler, DistributedSampler):
                return sampler  # of a batch sampler, which has divided its samples itself
            shuffle, as_in_lightning = _order_of(sampler, dataloader.dataset)
        if as_in_lightning or not self._requires_distributed_sampler(dataloader):
            return super()._resolve_sampler(dataloader, shuffle, mode)
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        return SampleShare(sampler, **(self.trainer.distributed_sampler_kwargs or {}), seed=seed, padded=trains)

    def attach_dataloaders(self, model: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Attach dataloaders, without a datamodule."""
        self.attach_data(model, *args, **kwargs)

    def attach_datamodule(self, model: LightningModule, datamodule: LightningDataModule | None = None) -> None:
        """Attach a datamodule, without dataloaders."""
        self.attach_data(model, datamodule=datamodule)


def _order_of(sampler: Any, dataset: Any) -> tuple[bool, bool]:
    """Return whether a sampler shuffles, and whether a ``DistributedSampler`` can replace it.

    That is if it yields each sample of the dataset once, or if a custom batch sampler does not reveal its sampler.
    """
    if type(sampler) not in (RandomSampler, SequentialSampler):
        return True, sampler is None
    is_whole = len(sampler) == length_of(dataset) and not getattr(sampler, "replacement", False)
    return type(sampler) is RandomSampler, is_whole


def _name_saved_arguments(dataloader: Any) -> None:
    """Change the positional arguments of a dataloader, except for its dataset, to keyword arguments.

    Lightning saves the arguments of dataloaders that are created in a hook. It repeats them, with a new sampler and
    batch size as keywords.
    """
    saved = getattr(dataloader, "__dict__", {})
    values, names = saved.get("__pl_saved_args", ()), saved.get("__pl_saved_arg_names", ())
    if len(values) == len(names) > 1:  # fewer names if the class has `*args`
        named = dict(zip(names[1:], values[1:], strict=True))
        saved["__pl_saved_args"], saved["__pl_saved_arg_names"] = values[:1], names[:1]
        saved["__pl_saved_kwargs"] = {**named, **saved["__pl_saved_kwargs"]}


def _with_batch_size(dataloader: DataLoader[Any], batches: BatchSampler) -> DataLoader[Any]:
    """Return a view of a ``DataLoader(batch_sampler=BatchSampler(...))`` with the sampler and the size of its batches.

    Lightning divides ``dataloader.sampler`` and keeps ``dataloader.batch_size``, which the batch sampler does not use.
    """
    view, sizes = copy(dataloader), {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
    vars(view).update(sizes, sampler=batches.sampler)
    saved = "__pl_saved_kwargs"  # the arguments of a dataloader that was created in a hook of the module
    if saved in vars(view):
        vars(view)[saved] = {**vars(view)[saved], **sizes}
    return view


class DataSource:
    """The source of a run's dataloaders: arguments, the methods of the module, or those of a datamodule.

    Args:
        run: the state of the run; Lightning's connector reads ranks and strategy from it.

    Attributes:
        resumed: the position of the training data in the checkpoint, for ``TrainingBatches.load_state_dict``; {} if it
            is unknown, None if nothing is resumed.
        resumed_validation: the state of the validation dataloaders in the checkpoint; {} if there were none, None if
            nothing is resumed or the state is unknown.
        prefetching: copies batches to a GPU while the previous step runs. None if batches are not prefetched.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._trainer = run.trainer
        self.connector = _Connector(run, self)
        self.datamodule: LightningDataModule | None = None
        self._sources: dict[RunningStage, _DataLoaderSource] = {}
        self._ready: dict[RunningStage, LoaderSet | None] = {}
        self.resumed: dict[str, Any] | None = None
        self.resumed_validation: dict[str, Any] | None = None
        self.prefetching: Prefetching | None = None

    def attach(self, module: LightningModule, given: dict[RunningStage, Any], datamodule: Any) -> None:
        """Set the source of the dataloaders of each stage.

        Args:
            module: the module; its ``*_dataloader`` methods are used if nothing else is given.
            given: dataloaders by stage. None for a stage without dataloaders.
            datamodule: a datamodule with methods that are used instead of the module's. None to use the module's.
                As in Lightning, the one of an earlier run then stays attached, and is set up and torn down.
        """
        self.connector._datahook_selector = _DataHookSelector(module, datamodule)
        self._ready.clear()
        self.resumed = self.resumed_validation = self._run.elastic_state = self.prefetching = None
        for stage in _STAGES:
            loaders = given.get(stage)
            instance = datamodule if datamodule is not None else module if loaders is None else loaders
            self._sources[stage] = _DataLoaderSource(instance, f"{stage.dataloader_prefix}_dataloader")
        if datamodule is not None:
            self.datamodule = datamodule
            datamodule.trainer = self._trainer

    def source(self, stage: RunningStage) -> _DataLoaderSource:
        """Return the source of the dataloaders of ``stage``."""
        return self._sources.get(stage) or _DataLoaderSource(None, f"{stage.dataloader_prefix}_dataloader")

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the training dataloaders that have one, in the format of Lightning's fit loop."""
        ready = self._ready.get(RunningStage.TRAINING)
        states = [] if ready is None else ready.loader_states()
        return {"combined_loader": states} if states else {}

    def drop_sample_order(self) -> None:
        """Make the training dataloaders order their samples as in a new run."""
        self._run.elastic_state = self.resumed = None
        self.forget(RunningStage.TRAINING)

    def forget(self, stage: RunningStage) -> None:
        """Drop the dataloaders of ``stage``, so that they are created again when they are requested next."""
        old = self._ready.pop(stage, None)
        if old is not None:
            old.close()

    def ready(self, stage: RunningStage) -> LoaderSet | None:
        """Return the dataloaders of ``stage`` if they were created already, otherwise None."""
        return self._ready.get(stage)

    def is_due(self, stage: RunningStage) -> bool:
        """Return whether the dataloaders of ``stage`` must be created before its next pass, or created again."""
        if (ready := self._ready.get(stage)) is None:
            return stage not in self._ready
        interval = self._run.reload_dataloaders_every_n_epochs
        return ready.is_outdated or (bool(interval) and self._trainer.current_epoch - ready.origin.made_in >= interval)

    def invalidate(self, stage: RunningStage) -> None:
        """Create the dataloaders of ``stage`` again before its next pass; those for training before the next epoch."""
        if (ready := self._ready.get(stage)) is None:
            self.forget(stage)
        else:
            ready.is_outdated = True

    def loaders(self, stage: RunningStage, recreate: bool = False) -> LoaderSet | None:
        """Return the dataloaders of ``stage``, created at the first call; None without any, or if their limit is 0.

        A resumed run creates them in the epoch, from the random states and with the attributes with which the saved run
        created its own.

        Args:
            stage: the stage.
            recreate: whether to create them again if they exist. Default: False.
        """
        run, trainer, old = self._run, self._trainer, self._ready.get(stage)
        training = stage is RunningStage.TRAINING
        resumed = self.resumed if training else self.resumed_validation if stage is RunningStage.VALIDATING else None
        saved = resumed if resumed and resumed.get("made_in", -1) >= 0 else None
        if old is not None and saved is not None:  # `estimated_stepping_batches` created them before the resume
            before = saved["made_in"], saved.get("made_from", {})
            recreate |= (old.origin.made_in, old.origin.made_from) != before or bool(saved.get("made_with"))
        if stage in self._ready and not recreate:
            return old
        made_with = run.program.read(attributes_only=True) if saved is None else saved.get("made_with", {})
        timed = run.profiler.profile(f"setup_{stage.dataloader_prefix}_dataloader")
        with timed, warnings.catch_warnings(), self._created_as(saved) as made_from:
            # Lightning 2.6.6 calls torch's pytree in a way that torch 2.15 deprecates
            warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
            if (make := self._prepare_loaders(stage)) is None:
                self._ready[stage] = None
            made_from = {} if random_states.capture() == made_from else made_from
        if old is not None:
            old.close()
        if make is None:
            return None
        if saved is not None:
            made_in, is_outdated = saved["made_in"], saved.get("is_outdated", False)
        else:
            # the validation of this epoch reuses the dataloaders of the sanity check; without one, they are recreated
            is_extra = trainer.sanity_checking and not run.limits.epoch_validates()
            made_in, is_outdated = trainer.current_epoch, is_extra and bool(run.reload_dataloaders_every_n_epochs)
        loader_set = self._ready[stage] = make(origin=Origin(made_in, made_from, made_with), is_outdated=is_outdated)
        if training and resumed is None:
            loader_set.start_epoch(run.progress.epochs_trained)
            loader_set.open()  # as early as in Lightning, because opening draws random numbers
        return loader_set

    @contextmanager
    def _created_as(self, origin: dict[str, Any] | None) -> Iterator[random_states.State]:
        """Return a context with the epoch, the random states and the attributes of ``origin``, and these random states.

        If ``origin`` is None, it changes nothing.
        """
        progress = self._run.progress
        if origin is None:
            yield random_states.capture()
            return
        epoch = progress.epoch
        made_with = origin.get("made_with", {})
        program = snapshot_of(self._run) if made_with else Snapshot()
        with random_states.isolated(), program.as_in(made_with):
            random_states.restore(origin.get("made_from", {}))
            progress.epoch = origin["made_in"]
            try:
                yield random_states.capture()
            finally:
                progress.epoch = epoch

    def evaluation_state(self) -> dict[str, Any]:
        """Return the state of the validation dataloaders, if they exist."""
        ready = self._ready.get(RunningStage.VALIDATING)
        return {} if ready is None else {"validation": ready.evaluation_state()}

    def load_evaluation_state(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`evaluation_state`. Changes the random states of this process."""
        ready = self._ready.get(RunningStage.VALIDATING)
        if ready is not None and "validation" in state:
            ready.load_evaluation_state(state["validation"])

    def release(self) -> None:
        """Shut down the worker processes at the end of a run."""
        for ready in self._ready.values():
            if ready is not None:
                ready.close()

    def transfer_hook(self, name: str) -> Any:
        """Return the transfer hook ``name``, such as ``on_before_batch_transfer``, of the datamodule or the module.

        None if it is not overridden.
        """
        selector = self.connector._datahook_selector
        assert selector is not None
        owner = selector.get_instance(name)
        return getattr(owner, name) if overrides(owner, name) else None

    def _prepare_loaders(self, stage: RunningStage) -> Callable[..., LoaderSet] | None:
        """Request the dataloaders and prepare them. Return the constructor of the set, for the remaining arguments."""
        trainer, source = self._trainer, self._sources[stage]
        limit = getattr(trainer, f"limit_{stage.dataloader_prefix}_batches")
        training = stage is RunningStage.TRAINING
        fitting = training or self._run.fits
        optional = fitting and not training
        if limit == 0 or (optional and not source.is_defined()):
            return None  # a required loader is requested even if undefined, because the error names the missing method
        given = _request_dataloader(source)
        trainer.strategy.barrier(f"{stage.dataloader_prefix}_dataloader()")
        mode: Literal["max_size_cycle", "sequential"] = "max_size_cycle" if training else "sequential"
        combined = given if isinstance(given, CombinedLoader) else CombinedLoader(given, mode)
        if stage is RunningStage.PREDICTING and combined._mode != "sequential":
            raise ConfigurationError(
                '`trainer.predict()` only supports the `CombinedLoader(mode="sequential")` mode.'
                f" Got {combined._mode!r}."
            )
        for loader in combined.flattened:
            _name_saved_arguments(loader)
            if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
                rank_zero_warn(
                    f"Got a {type(loader).__name__} as {stage.dataloader_prefix}_dataloader: each of its samples is one"
                    " batch. For batches of several samples, use `DataLoader(dataset, batch_size=...)`."
                )
        if fitting and self._run.overfit_batches > 0:
            _resolve_overfit_batches(combined, stage)
        function = self._run.fn or TrainerFn.FITTING  # None outside a run
        for loader in combined.flattened:
            if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
                _check_dataloader_iterable(loader, source, function)  # raises; it would begin a pass of other loaders
        unprepared = combined.flattened
        combined.flattened = [self._prepare(loader, stage) for loader in unprepared]
        samplers = self._put_in_order(combined, unprepared) if training and self._run.elastic_state is not None else []
        fetcher = _select_data_fetcher(trainer, stage)
        draws = isinstance(fetcher, _DataLoaderIterDataFetcher)
        plan = partial(self._plan, stage, combined, samplers, draws)
        is_constant = all(map(is_trusted, objects_with_set_epoch(*combined.flattened)))
        arguments: dict[str, Any] = {"combined": combined, "plan": plan(), "replan": None if is_constant else plan}
        if isinstance(fetcher, _DataLoaderIterDataFetcher):
            return partial(DrawnLoaderSet, **arguments, fetcher=fetcher, profiler=self._run.profiler, stage=stage)
        return partial(LoaderSet, **arguments, watch=watch_of(self._run.profiler, stage), trains=training)

    def _plan(
        self, stage: RunningStage, combined: CombinedLoader, samplers: list[ElasticSampler], draws: bool
    ) -> LoaderPlan:
        """Limit the dataloaders by their current lengths. Takes collectives.

        Args:
            stage: the stage.
            combined: its dataloaders.
            samplers: the sampler of an elastic order, if there is one.
            draws: whether the step draws its own batches.
        """
        run, trainer, loop, training = self._run, self._trainer, self._run.loop, stage is RunningStage.TRAINING
        limit = getattr(trainer, f"limit_{stage.dataloader_prefix}_batches")
        with warnings.catch_warnings():
            if training and combined._mode != "max_size":  # an empty dataloader raises an error later, except `[]`
                warnings.filterwarnings("ignore", message="Total length of `(?!list`)")
            lengths = self._lengths(combined, training)
        is_exact = not training or all(map(has_exact_length, combined.flattened))
        *longest, exact = self._spans_over_ranks([*lengths, float(is_exact)])
        are_exact = exact.fewest > 0 or run.world_size == 1
        most = [_parse_num_batches(stage, span.most, limit) for span in longest]
        limits = [min(pair) for pair in zip(lengths, most, strict=True)]
        number, is_sequential = count_batches(combined, limits), combined._mode == "sequential"
        unknown = [span.most == float("inf") for span in longest]  # unknown, whatever the limit
        spans = self._spans_over_ranks(limits if is_sequential else [number])
        unknown = unknown if is_sequential else [any(unknown)]
        idle, announce = 0, None
        if not training:
            spans = [Span(0, span.most) if is_open else span for span, is_open in zip(spans, unknown, strict=True)]
        elif any(unknown) or is_sequential:
            spans = []
        else:
            idle = int(spans[0].most - number)
            if spans[0].fewest < spans[0].most and are_exact:
                announce = partial(_share_steps, loop.metrics, spans[0].fewest)
        if samplers and not draws:
            announce = partial(_set_batch_weight, loop.mean, samplers[0])
        return LoaderPlan(
            limits,
            draws or float("inf") not in lengths,  # no look-ahead if the step draws the batches itself
            most,
            spans,
            idle,
            announce,
            run.collectives.any_rank_on_host if training and not are_exact and not draws else None,
        )

    def _lengths(self, combined: CombinedLoader, training: bool) -> list[float]:
        """Return the number of batches of each dataloader in this process; inf for one without a length.

        Raises:
            RuntimeError: if a training or padded dataloader has no batches in this process, but some in others.
        """
        may_be_empty = not (training or self._run.pad_evaluation) or self.may_be_empty
        return [
            len(loader) if has_len_all_ranks(loader, self._trainer.strategy, may_be_empty) else float("inf")
            for loader in combined.flattened
        ]

    @property
    def may_be_empty(self) -> bool:
        """Whether the module or the datamodule allows that a process has no training batch at all."""
        owners = self._run.module, self.datamodule
        return any(getattr(owner, "allow_zero_length_dataloader_with_multiple_devices", False) for owner in owners)

    def _spans_over_ranks(self, batches: list[float]) -> list[Span]:
        """Return the smallest and largest of these numbers over the processes. Takes one collective."""
        engine = self._run.engine
        if engine.world_size == 1:
            return [Span(number, number) for number in batches]
        bounds = torch.tensor([*batches, *(-number for number in batches)], dtype=torch.float64)
        largest = engine.collectives.reduce(bounds, "max").tolist()
        return [
            Span(0, most) if most == float("inf") else Span(-fewest, most)
            for most, fewest in zip(largest[: len(batches)], largest[len(batches) :], strict=True)
        ]

    def _put_in_order(self, combined: CombinedLoader, unprepared: list[Any]) -> list[ElasticSampler]:
        """Make the training dataloader read its share of the samples in the order of the resumed run.

        Return its sampler in a list.

        Args:
            combined: the dataloader, prepared.
            unprepared: the dataloaders as the user created them.

        Raises:
            ResumeError: if there is not exactly one dataloader, or its samples cannot be divided among the processes.
        """
        elastic = self._run.elastic_state
        assert elastic is not None
        if len(combined.flattened) != 1:
            raise ResumeError(f"there are {len(combined.flattened)} training dataloaders, expected one")
        given, loader = unprepared[0], combined.flattened[0]
        if (reason := not_ordered(given) or not_ordered(loader)) is not None:
            raise ResumeError(reason)
        before, now = elastic.order.sampler, type(given.batch_sampler.sampler).__name__
        if before != now and "RandomSampler" in (before, now) and before != "DistributedSampler":
            raise ResumeError(f"the DataLoader's sampler was a {before} and is a {now}")
        replicas = self._trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        if replicas["num_replicas"] > 1 and type(loader.batch_sampler.sampler) is not DistributedSampler:
            raise ResumeError("use_distributed_sampler=False makes each process read all samples")
        engine = self._run.engine
        sampler = ElasticSampler(
            elastic.order,
            given.batch_sampler.sampler,
            given.dataset,
            replicas["num_replicas"],
            replicas["rank"],
            loader.batch_size,
            # not the bound method: the search for generators in the attributes of samplers would enter the engine
            lambda value: engine.collectives.broadcast(value),
        )
        ordered = copy(loader)  # changed through `vars`, because a dataloader refuses another sampler
        batches = BatchSampler(sampler, loader.batch_size, drop_last=False)
        vars(ordered).update(sampler=sampler, batch_sampler=batches, drop_last=False, _iterator=None)
        combined.flattened = [ordered]
        return [sampler]

    def _prepare(self, loader: Any, stage: RunningStage) -> Any:
        # as in a fit, because all passes set the epochs of samplers when they start
        loader = _process_dataloader(self._trainer, TrainerFn.FITTING, stage, loader)
        guard_workers(self._run.session, loader, self._run.dataloader_timeout)
        return loader


def _takes_sampler(batches: Any) -> bool:
    """Return whether Lightning can create a batch sampler of the same kind over the samples of a process."""
    return hasattr(batches, "__pl_saved_args") or all(hasattr(batches, name) for name in ("batch_size", "drop_last"))


def _share_steps(metrics: MetricStore, fewest: float, batch_idx: int) -> None:
    """Reduce values of single batches over the processes only while each process has such a batch."""
    if metrics.shares_steps is not (batch_idx < fewest):
        metrics.share_steps(batch_idx < fewest)


def _set_batch_weight(mean: WeightedMean, sampler: ElasticSampler, batch_idx: int) -> None:
    mean.batch_weight = sampler.weight_of(batch_idx)


def move_training_batch(batch: Any, device: torch.device) -> Any:
    """Move ``batch`` to ``device``. Warn about a batch that is None; it is not trained on."""
    if batch is None:
        rank_zero_warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
    return move_data_to_device(batch, device)
