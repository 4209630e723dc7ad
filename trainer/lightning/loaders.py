"""The dataloaders of one stage, ready to run, around Lightning's CombinedLoader."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities._pytree import _is_leaf_or_primitive_container
from lightning.pytorch.utilities.combined_loader import CombinedLoader, _MaxSizeCycle
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch.utils.data import DataLoader, SequentialSampler

from trainer.data.batches import IDLE, Batch, LoaderPlan, LookAhead, Origin, identity
from trainer.data.loader_parts import has_exact_length, objects_with_set_epoch
from trainer.data.resumable import MapStyleLoader, ResumableLoader, StatefulLoader, length_of, resumable
from trainer.data.unpadded import SampleShare
from trainer.errors import rank_zero_warn
from trainer.lightning.profiling import records
from trainer.state import random_states

_FETCHING = {
    RunningStage.TRAINING: "[_TrainingEpochLoop].train_dataloader_next",
    RunningStage.VALIDATING: "[_EvaluationLoop].val_next",
    RunningStage.TESTING: "[_EvaluationLoop].test_next",
    RunningStage.PREDICTING: "[_PredictionLoop].predict_next",
}
"""The names of the action "fetch a batch" in Lightning's profilers."""


class LoaderSet:
    """The dataloaders of one stage, ready to run: samplers distributed, limits applied.

    Training dataloaders can be resumed, by torchdata's convention: ``state_dict`` returns the position in the pass.
    After ``load_state_dict``, the next iteration yields the rest of that pass, or the following pass if it was over.

    Args:
        combined: the dataloaders, prepared.
        plan: their numbers of batches.
        origin: how they were created. Default: in the first epoch, without random numbers.
        is_outdated: whether they must be created again before the next pass. Default: False.
        replan: returns the plan for an epoch that begins. Default: None, the plan stays the same.
        watch: wraps a source of batches, so that a profiler times the fetching of each batch. Default: a no-op.
        trains: whether a ``state_dict`` of a dataloader is used, because a pass may be resumed inside. Default: True.

    Attributes:
        on_batch: called before each training batch if the lengths are not exact, with whether all ranks have a batch.
            It may raise. Default: a no-op.
    """

    def __init__(
        self,
        combined: CombinedLoader,
        plan: LoaderPlan,
        origin: Origin | None = None,
        *,
        is_outdated: bool = False,
        replan: Callable[[], LoaderPlan] | None = None,
        watch: Callable[..., Any] = identity,
        trains: bool = True,
    ) -> None:
        self.combined = combined
        self.plan = plan
        self.origin = origin or Origin()
        self.is_outdated = is_outdated
        self._replan, self._watch, self._trains = replan, watch, trains
        self.on_batch: Callable[[bool], Any] = identity
        self._epoch = 0
        self._loaders: list[ResumableLoader] = []
        self._limited = combined
        self._pass: Iterator[Any] | None = None
        self._look_ahead: LookAhead | None = None
        self._ahead: dict[str, Any] = {}
        self._resumed: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the current pass, for a copy of a Trainer."""
        limited = copy(self._limited)
        limited._iterator = None
        return vars(self) | {"_pass": None, "_look_ahead": None, "_limited": limited}

    @property
    def is_sequential(self) -> bool:
        """Whether the dataloaders run one after the other instead of combined."""
        return bool(self.combined._mode == "sequential")

    @property
    def limits(self) -> list[float]:
        """The number of batches to run of each dataloader; inf for one without a length."""
        return self.plan.limits

    def num_batches(self) -> float:
        """Return the number of batches in one pass; inf if unknown."""
        return count_batches(self.combined, self.limits) + self.plan.idle

    def start_epoch(self, epoch: int, shift: int = 0) -> None:
        """Call ``set_epoch`` once for each sampler, batch sampler and dataset that has it.

        Args:
            epoch: the epoch.
            shift: a number that differs between the passes of an epoch, so that each one is shuffled again. Default: 0.
        """
        for loader in self._loaders:
            loader.warn_of_stale_copies()
        for holder in objects_with_set_epoch(*self.combined.flattened):
            holder.set_epoch(epoch)
            if isinstance(holder, SampleShare):
                holder.shift = shift
        if self._replan is not None:
            self.plan = self._replan()
            self._limited.limits = self.limits
        self._epoch = epoch
        for loader in self._loaders:
            loader.start_epoch(epoch)

    @property
    def _is_plain(self) -> bool:
        """Whether there is a single dataloader, which is iterated without CombinedLoader (saves 10 microseconds)."""
        flattened = self.combined.flattened
        return len(flattened) == 1 and self.combined.iterables is flattened[0]

    def full_batch_size(self, index: int) -> int | None:
        """Return the number of samples in the first batch of a dataloader; None if it is not known."""
        loader = self.combined.flattened[index]
        return loader.batch_size if has_exact_length(loader) and len(loader) > 1 else None

    def first_empty(self) -> str:
        """Return the name of the first dataloader without a batch. "" if there is no dataloader at all (``[]``)."""
        iterables, limits = self.combined.iterables, self.limits
        if isinstance(iterables, (list, tuple, dict)) and not iterables:
            return ""
        places, _ = tree_flatten_with_path(iterables, is_leaf=_is_leaf_or_primitive_container)
        for at, (path, loader) in enumerate(places):
            if not limits[at] if 0 in limits else not self.loaders[at].has_begun:
                return f"`train_dataloader{keystr(path)}`, a {type(loader).__name__}{_describe_contents(loader)},"
        return ""

    def batches(self, limit: float = float("inf")) -> Iterator[tuple[Batch, int, int]]:
        """Begin an evaluation pass: yield (batch, batch_idx, dataloader_idx), at most ``limit`` of each dataloader."""
        loaders, limits = self.loaders, [min(own_limit, limit) for own_limit in self.limits]
        self._limited.limits, count = limits, count_batches(self.combined, limits)
        source = iter(loaders[0]) if self._is_plain else _begin_combined(self._limited)
        batches = _take(iter(self._watch(LookAhead(source) if count == float("inf") else source)), count)
        return ((batch, index, 0) for index, batch in enumerate(batches)) if self._is_plain else batches

    def evaluation_state(self) -> dict[str, Any]:
        """Return the state between two passes of evaluation: tensors and plain containers."""
        generators = [random_states.states_of(loader.generators) for loader in self.loaders]
        workers = [loader.state_dict() if loader.persists else {} for loader in self.loaders]
        return {**self._origin(), "own": generators, "loaders": workers}

    def load_evaluation_state(self, state: dict[str, Any]) -> None:
        """Restore a state of :meth:`evaluation_state` for the next pass. Changes the random states of this process.

        A no-op if the number of dataloaders has changed.
        """
        if len(self.loaders) != len(state["own"]):
            return
        self.origin = replace(self.origin, made_in=state["made_in"])
        self.is_outdated = state.get("is_outdated", False)
        self.close()  # the workers of a sanity check
        for loader, workers, generators in zip(self.loaders, state["loaders"], state["own"], strict=True):
            loader.load_state_dict({**workers, "is_over": True} if workers else {})
            random_states.set_states(loader.generators, generators)

    # --- training, with passes that can be resumed ---

    @property
    def loaders(self) -> list[ResumableLoader]:
        """The dataloaders in resumable form."""
        if not self._loaders:
            self._loaders = [
                resumable(loader, self._epoch, uses_state=self._trains) for loader in self.combined.flattened
            ]
            self._limited = copy(self.combined)
            self._limited.limits, self._limited.flattened = self.limits, list(self._loaders)
        return self._loaders

    def open(self, done: int = 0) -> None:
        """Begin a training pass, or the rest of a resumed one with ``done`` completed batches.

        This draws random numbers, and fetches a batch if the number of batches is unknown.
        """
        plan, self._pass, self._ahead = self.plan, None, {}  # ends the workers of the previous pass
        source, count = iter(self._watch(self._begin(self.loaders))), count_batches(self.combined, plan.limits)
        self._pass = left = _take(source, max(count - done, 0))  # below 0 if a resumed run has a lower limit
        nothing, number = IDLE if self._is_plain else (IDLE,), max(self.num_batches() - done, 0)
        if plan.any_rank_on_host is not None:
            self._pass = left = _take(_synchronized(left, plan.any_rank_on_host, nothing), number)
        elif plan.idle:
            self._pass = left = chain(left, repeat(nothing, int(min(number, plan.idle))))
        if plan.announce is not None:
            self._pass = _announce_each(left, done, plan.announce)
        if not plan.has_length:
            self._pass = self._look_ahead = LookAhead(left, self._mark, eager=count == float("inf"))
        if plan.any_rank_on_host is not None:
            self._pass = map(self._yield_batch, self._pass)

    def _yield_batch(self, item: tuple[Any, bool]) -> Any:
        self.on_batch(item[1])
        return item[0]

    def _begin(self, loaders: list[ResumableLoader]) -> Iterator[Any]:
        if self._is_plain:
            self._resumed = {}
            return iter(loaders[0])
        iter(self._limited)
        self._move_to_resumed()
        return iter(self._limited.__next__, object())

    def _move_to_resumed(self) -> None:
        resumed, self._resumed = self._resumed, {}
        iterator = self._limited._iterator
        assert iterator is not None
        iterator._idx = resumed.get("index", 0)
        if isinstance(iterator, _MaxSizeCycle) and "exhausted" in resumed:
            iterator._consumed = list(resumed["exhausted"])

    def _mark(self) -> None:
        """Record the position of the pass and the random states before a batch is fetched ahead."""
        self._ahead = {**self._position_state(), "random": random_states.capture()}

    def __iter__(self) -> Iterator[Batch]:
        """Iterate the training pass that was opened, or else a new one."""
        if self._pass is None:
            self.open()
        assert self._pass is not None
        opened, self._pass = self._pass, None
        return opened if self._is_plain else (batch for batch, *_ in opened)

    @property
    def is_exhausted(self) -> bool:
        """Whether the last batch of the pass was returned, for loaders without a length."""
        return self._look_ahead is not None and self._look_ahead.is_exhausted

    def close(self) -> None:
        """Drop the pass, and shut down the workers. The position in the pass can still be read."""
        for loader in self._loaders:
            loader.close()
        self._pass = self._look_ahead = None
        self._limited.reset()
        self.combined.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training pass; ``ahead`` is the position before a batch was fetched ahead."""
        return {**self._origin(), **self._position_state(), "ahead": self._ahead}

    def _origin(self) -> dict[str, Any]:
        """Return how the dataloaders were created, so that a resumed run can create the same ones."""
        return {**vars(self.origin), "is_outdated": self.is_outdated}

    def _position_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"loaders": [loader.state_dict() for loader in self.loaders]}
        if (iterator := self._limited._iterator) is not None:
            state["index"], state["exhausted"] = iterator._idx, list(getattr(iterator, "_consumed", ()))
        return state

    def convert_state(self, first: dict[str, Any], batches: int, random: random_states.State) -> dict[str, Any]:
        """Return the state of a pass that other processes have begun, for :meth:`load_state_dict`.

        Args:
            first: the ``TrainingBatches`` state of the first of these processes, with one map-style dataloader.
            batches: the number of batches that this process would have trained.
            random: the random states that workers start from.
        """
        (loader,) = self.loaders
        assert isinstance(loader, MapStyleLoader)
        (saved,) = first["loaders"]
        if saved:  # if the pass is over, workers of the next one start from the beginning
            between = {"own": saved["own"], "workers": None} if first["is_over"] else {}
            saved = {**loader.convert_state(saved, batches, random), **between}
        return {**first, "batches": batches, "loaders": [saved], "ahead": {}}

    def loader_states(self) -> list[dict[str, Any]]:
        """Return the states of loaders that have a ``state_dict``, in Lightning's format."""
        states = self._ahead["loaders"] if self._ahead else [loader.state_dict() for loader in self._loaders]
        # empty before a pass, because reading a state would begin one
        return [state["state"] for state in states if "state" in state]

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Make the next pass the rest of the pass in ``state``, or the one that follows it.

        This changes the process's random states.

        Args:
            state: the return value of :meth:`state_dict` with additional keys: ``batches``, the number of trained
                batches; ``is_over``, whether the pass was over; ``inside``, whether the state was saved in the middle
                of the next batch. If a state contains only ``batches``, this number of batches is skipped.

        Returns:
            The reasons why the following batches may differ from those of an uninterrupted run; [] if they do not.
        """
        self.close()
        self._ahead, self._resumed, batches, loaders = {}, {}, state["batches"], self.loaders
        if "combined_loader" in state:  # a checkpoint of Lightning's
            self.combined._load_state_dicts(state["combined_loader"])
            self._resumed = {"index": batches, "drawn": batches}
            self.open(batches)
            return []
        if "loaders" not in state:
            if batches < self.num_batches() and not all(map(_is_repeatable, loaders)):
                _warn_of_skipping()
            self._skip(batches)
            return []
        states = state["loaders"]
        if len(states) != len(loaders):
            if not state["is_over"]:
                self._skip(batches)
            return [] if state["is_over"] else [f"the number of dataloaders was {len(states)} and is {len(loaders)}"]
        if not state["is_over"]:
            return self._resume(state, state["ahead"] or state)
        reasons = []
        for loader, saved in zip(loaders, states, strict=True):
            reasons += loader.load_state_dict({**saved, "is_over": True} if saved else {})
        return reasons

    def _resume(self, state: dict[str, Any], position: dict[str, Any]) -> list[str]:
        reasons, batches, is_one = [], state["batches"], len(self.loaders) == 1
        for loader, saved in zip(self.loaders, position["loaders"], strict=True):
            if saved and saved["kind"] == loader.kind and loader.replays(saved):
                _warn_of_replaying(loader, saved["batches"])
            inside = {"batches": batches, "exhausted": False, "own": [], "last": ""}
            reasons += loader.load_state_dict({**saved, **inside} if saved and state["inside"] and is_one else saved)
        self._resumed = position
        if "random" not in position:
            self.open(batches)
            return reasons
        with random_states.isolated():
            random_states.restore(position["random"])
            self.open(batches)
            if self._look_ahead is not None:
                self._look_ahead.fetch_first()
        for loader, saved in zip(self.loaders, state["loaders"], strict=True):
            random_states.set_states(loader.generators, saved["own"])
        return reasons

    def _skip(self, batches: int) -> None:
        if len(self.loaders) == 1:
            self.loaders[0].load_state_dict({"kind": "", "batches": batches})
            self._resumed = {"index": batches, "drawn": batches}
            self.open(batches)
        else:  # a shorter loader may have started again in between
            self.open()
            self._drop(batches)

    def _drop(self, batches: int) -> None:
        assert self._pass is not None
        deque(islice(self._pass, batches), maxlen=0)


class DrawnLoaderSet(LoaderSet):
    """Dataloaders for a step that draws its own batches (``dataloader_iter``): a pass yields one item for each step.

    Args:
        combined: the dataloaders, prepared.
        plan, origin, is_outdated, replan: as in :class:`LoaderSet`.
        fetcher: counts the drawn batches.
        profiler: times the fetching of each batch.
        stage: determines the name in the profiler.
    """

    def __init__(
        self,
        combined: CombinedLoader,
        plan: LoaderPlan,
        origin: Origin,
        *,
        is_outdated: bool,
        replan: Callable[[], LoaderPlan] | None,
        fetcher: _DataLoaderIterDataFetcher,
        profiler: Profiler,
        stage: RunningStage,
    ) -> None:
        super().__init__(combined, plan, origin, is_outdated=is_outdated, replan=replan)
        self.fetcher = fetcher
        fetcher._start_profiler = partial(profiler.start, _FETCHING[stage])
        fetcher._stop_profiler = partial(profiler.stop, _FETCHING[stage])

    @property
    def is_done(self) -> bool:
        """Whether the last batch of the pass has been drawn, as far as is known."""
        return self.fetcher.done

    @property
    def last(self) -> tuple[Batch, int, int]:
        """The batch drawn last, its index, and the index of its dataloader; (None, 0, 0) before the first."""
        return self.fetcher._batch, self.fetcher._batch_idx, self.fetcher._dataloader_idx

    def iterator(self) -> Iterator[tuple[Batch, int, int]]:
        """Return the iterator that a step draws from."""
        return next(self.fetcher)  # type: ignore[arg-type]

    def batches(self, limit: float = float("inf")) -> Iterator[tuple[Batch, int, int]]:
        """Begin a pass that yields, for each step, the batch that the previous step drew last."""
        assert len(self.loaders) == len(self.limits)
        self._limited.limits = [min(own_limit, limit) for own_limit in self.limits]
        self.fetcher.setup(self._limited)
        iter(self.fetcher)
        return self._steps()

    @property
    def _is_plain(self) -> bool:
        return False  # the fetcher counts the batches

    def _begin(self, loaders: list[ResumableLoader]) -> Iterator[Any]:
        fetcher, drawn = self.fetcher, int(self._resumed.get("drawn", 0))
        fetcher.setup(self._limited)
        iter(fetcher)
        self._move_to_resumed()
        fetcher.fetched = drawn
        fetcher.done = fetcher.length is not None and drawn >= fetcher.length
        # a loop would take None for a missing batch
        return (((), *indices) if batch is None else (batch, *indices) for batch, *indices in self._steps())

    def _position_state(self) -> dict[str, Any]:
        return {**super()._position_state(), "drawn": self.fetcher.fetched}

    def _resume(self, state: dict[str, Any], position: dict[str, Any]) -> list[str]:
        return super()._resume({**state, "inside": False}, position)

    def _drop(self, batches: int) -> None:
        deque(islice(self.iterator(), batches), maxlen=0)

    def _steps(self) -> Iterator[tuple[Batch, int, int]]:
        while not self.is_done:
            yield self.last


def _begin_combined(combined: CombinedLoader) -> Iterator[tuple[Batch, int, int]]:
    """Return an iterator over ``combined``, which has begun its pass. Calling ``iter(combined)`` would restart it."""
    iter(combined)
    return iter(combined.__next__, object())


def _describe_contents(loader: Any) -> str:
    """Return the number of samples and the batch size of a dataloader, as far as they are known."""
    if not isinstance(loader, DataLoader) or (samples := length_of(loader.dataset)) is None:
        return ""
    return f" of {samples} samples with batch_size={loader.batch_size} and drop_last={loader.drop_last}"


def _take(source: Iterator[Any], count: float) -> Iterator[Any]:
    """Return at most ``count`` items of ``source``."""
    return islice(source, None if count == float("inf") else int(count))


def _synchronized(
    source: Iterator[Any], any_rank_on_host: Callable[..., list[bool]], nothing: Any
) -> Iterator[tuple[Any, bool]]:
    """Yield the items of ``source``, then ``nothing`` while another process has items.

    Each item is paired with whether all processes have one.
    """
    end = object()
    while True:
        item = next(source, end)
        any_has, any_lacks = any_rank_on_host(item is not end, item is end)
        if not any_has:
            return
        yield nothing if item is end else item, not any_lacks


def _announce_each(source: Iterator[Any], first: int, announce: Callable[[int], None]) -> Iterator[Any]:
    """Yield the items of ``source``, and call ``announce`` with the index of each before it, counted from ``first``."""
    for index, item in enumerate(source, first):
        announce(index)
        yield item


def _is_repeatable(loader: ResumableLoader) -> bool:
    """Return whether the number of batches suffices to resume a pass: the loader has a state, or a fixed order."""
    return isinstance(loader, StatefulLoader) or isinstance(getattr(loader.loader, "sampler", None), SequentialSampler)


def _warn_of_skipping() -> None:
    rank_zero_warn(
        "You're resuming from a checkpoint that ended before the epoch ended and your dataloader is not"
        " resumable. As many batches are skipped as were trained; these are other batches if the order has"
        " changed."
        " Consider using an end-of-epoch checkpoint or make your dataloader"
        " resumable by implementing the `state_dict` / `load_state_dict` interface.",
        category=PossibleUserWarning,
    )


def _warn_of_replaying(loader: ResumableLoader, count: int) -> None:
    rank_zero_warn(
        f"Resuming inside an epoch: a {type(loader.loader).__name__} cannot skip batches, so the first {count} are"
        " loaded and dropped. The resume is exact if it yields the same batches in the same order again. Skipping costs"
        " nothing with a map-style dataset, or with a dataloader that has `state_dict` and `load_state_dict`"
        " (torchdata's StatefulDataLoader).",
        category=PossibleUserWarning,
    )


def count_batches(combined: CombinedLoader, limits: list[float]) -> float:
    """Return the number of batches in a pass, from the number of each dataloader."""
    if combined._mode == "sequential":
        return sum(limits)
    ends_first = combined._mode == "min_size" or (combined._mode == "max_size_cycle" and 0 in limits)
    return min(limits, default=0) if ends_first else max(limits, default=0)


def watch_of(profiler: Profiler, stage: RunningStage) -> Callable[..., Any]:
    """Return a function that times the fetching of a stage's batches; a no-op if the profiler records nothing."""
    return partial(_profile_each, profiler, _FETCHING[stage]) if records(profiler) else identity


def _profile_each(profiler: Profiler, name: str, source: Iterable[Any]) -> Iterator[Any]:
    """Yield the items of ``source``, and record the time to fetch each in the profiler."""
    iterator, end = iter(source), object()
    while True:
        with profiler.profile(name):
            item = next(iterator, end)
        if item is end:
            return
        yield item
