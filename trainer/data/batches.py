"""The batches of a stage: their number, their source, and the position in a pass.

With uneven inputs, a process gets None for each batch that only others have. Cutting all processes to the shortest
would lose data, and torch's ``Join`` does not support FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.data.unpadded import Span
from trainer.errors import ConfigurationError, rank_zero_warn, refuse_inexact, warn
from trainer.state import random_states
from trainer.state.random_states import State

Batch = Any
IDLE: Any = object()
"""Replaces a batch if other ranks have more of them: this rank takes part in the step with None."""


_AN_ITERATOR = (
    "An iterator (such as a generator) can be iterated only once: pass an object that can be iterated repeatedly."
)
NO_BATCHES = (
    " There is nothing to train on. Check its data set, its sampler, and `batch_size` with `drop_last=True`."
    f" {_AN_ITERATOR} To skip training, set Trainer(limit_train_batches=0)."
)
"""Follows the name of an empty dataloader in an error message."""


def identity(value: Any = None, *_: Any) -> Any:
    """Return ``value`` unchanged, or None without one."""
    return value


class EndOfPass(Exception):  # noqa: N818 - no error
    """Raised if a step that draws its own batches finds no more of them."""


@dataclass(frozen=True)
class LoaderPlan:
    """The numbers of batches of the dataloaders of a stage, by their current lengths.

    Args:
        limits: the number of batches to run of each dataloader; inf for one without a length.
        has_length: whether the lengths of all are known. If not, a limit may exceed the number of batches.
        most: the limits of the process with the most batches, equal on all processes.
        spans: the smallest and largest number of batches on any rank, for each dataloader. A single entry if the
            dataloaders are combined, as usual in training. Empty in training if a length is unknown, or the dataloaders
            run one after the other.
        idle: the number of batches in a training pass that other processes have and this one lacks; each is replaced by
            ``IDLE``. Default: 0.
        announce: called with the index of each training batch before it is returned. Default: None, no call.
        any_rank_on_host: :meth:`Collectives.any_rank_on_host` for several processes with inexact lengths, to give
            them equal numbers of batches and a common end. Default: None.
    """

    limits: list[float]
    has_length: bool
    most: Sequence[float] = ()
    spans: Sequence[Span] = ()
    idle: int = 0
    announce: Callable[[int], None] | None = None
    any_rank_on_host: Callable[..., list[bool]] | None = None


@dataclass(frozen=True)
class Origin:
    """How dataloaders were created, so that a resumed run can create the same ones.

    Args:
        made_in: the epoch.
        made_from: the random states before; {} if no random numbers were used.
        made_with: the state of the user's objects, from ``Snapshot.read``; {} before ``on_train_start``.
    """

    made_in: int = 0
    made_from: random_states.State = field(default_factory=dict)
    made_with: dict[str, Any] = field(default_factory=dict)


class Loaders(Protocol):
    """The dataloaders of a stage: a ``trainer.lightning.loaders.LoaderSet``."""

    plan: LoaderPlan
    origin: Origin

    @property
    def limits(self) -> list[float]: ...
    @property
    def is_sequential(self) -> bool: ...
    @property
    def is_exhausted(self) -> bool: ...
    def __iter__(self) -> Iterator[Batch]: ...
    def num_batches(self) -> float: ...
    def first_empty(self) -> str: ...
    def start_epoch(self, epoch: int, shift: int = 0) -> None: ...
    def open(self, done: int = 0) -> None: ...
    def batches(self, limit: float = float("inf")) -> Iterator[tuple[Batch, int, int]]: ...
    def state_dict(self) -> State: ...
    def load_state_dict(self, state: State) -> list[str]: ...


class TrainingBatches:
    """The training data for the fit loop. Iterating it yields (batch, batch_idx, is_last).

    Args:
        loaders: the training dataloaders. None if the run has no training data.
        renew: returns new dataloaders before each epoch that does not resume in its middle, or None to keep them.
            Default: None, they are kept.
        watch: wraps the batches of an epoch, for a profiler. Default: None.
        opened_for: the epoch of a pass that was opened when the dataloaders were created. Default: -1, no pass.
        resized: called if the number of batches differs from that of the previous epoch. Default: a no-op.

    Attributes:
        num_batches: batches in one pass, by the length of the dataloaders; inf if unknown. The pass has fewer if the
            data ends earlier, and never more. SWA overwrites it, which does not change the batches that the loop gets.
        is_over: whether the pass has had its last batch.
        first: index of the first batch of the prepared or current pass, above 0 if the run was resumed inside it. None
            before the first pass.
    """

    def __init__(
        self,
        loaders: Loaders | None,
        renew: Callable[[], Loaders | None] | None = None,
        watch: Callable[[Iterable[Batch]], Iterable[Batch]] | None = None,
        opened_for: int = -1,
        resized: Callable[[], Any] = identity,
    ) -> None:
        self.loaders = loaders
        self.num_batches: float = loaders.num_batches() if loaders is not None else 0
        self._length, self._resized = self.num_batches, resized
        self._renew = renew
        self._watch = watch
        # the current or last pass
        self._epoch, self._batches, self.is_over = opened_for, 0, False
        self._is_open = opened_for >= 0
        # the next pass
        self._next_epoch, self._is_empty = -1, False
        self.first: int | None = None
        self._loaded: State = {}
        self._exact = True
        self._has_batches = False  # in the previous pass

    def __bool__(self) -> bool:
        return self.num_batches > 0

    def state_dict(self) -> State:
        """Return the position in the current or last pass, after its last yielded batch; {} before the first pass.

        It consists of tensors and plain containers.
        """
        if self._loaded or self._epoch < 0 or self.loaders is None:
            return self._loaded
        position = {"epoch": self._epoch, "batches": self._batches, "is_over": self.is_over}
        return {**position, **self.loaders.state_dict()}

    def load_state_dict(self, state: State, *, exact: bool = True) -> None:
        """Continue with the next epoch from the position that ``state_dict`` returned.

        Args:
            state: its return value.
            exact: whether to raise if the batches may differ from those of an uninterrupted run. Default: True. If
                False, warn and continue as well as possible.
        """
        self._loaded, self._exact = state, exact
        self._epoch, self._is_open = -1, False

    def start_epoch(self, epoch: int, skip: int) -> None:
        """Prepare the pass of ``epoch`` without its first ``skip`` batches.

        A loaded state of this epoch, or of the previous one, is restored here. Otherwise these batches are skipped, or
        loaded and dropped if the dataloaders do not support skipping.

        Raises:
            ConfigurationError: if the dataloaders run one after the other.
            ResumeError: if the batches may differ from those of an uninterrupted run, and the resume must be exact.
        """
        state, self._loaded = self._loaded, {}
        renewed = self._renew() if self._renew is not None and not skip else None
        if renewed is not None:
            self.loaders, self.num_batches = renewed, renewed.num_batches()
        assert self.loaders is not None
        if self.loaders.is_sequential:
            raise ConfigurationError(
                '`FitLoop` does not support the `CombinedLoader(mode="sequential")` mode. Training takes one batch of'
                ' each dataloader at a time: choose "max_size_cycle", "max_size" or "min_size".'
            )
        self._next_epoch, self.first, self._is_empty = epoch, skip, False
        made_in = self.loaders.origin.made_in
        if state.get("made_in", made_in) != made_in:
            state = {}  # of dataloaders that have been replaced since
        is_its_epoch = bool(state) and state["epoch"] == epoch
        if state and state["epoch"] + 1 == epoch and not skip:
            self._resume({**state, "is_over": True}, state["batches"])  # restores the epoch's number, too
        if renewed is None and not (self._is_open and self._epoch == epoch):  # otherwise it is already set
            self.loaders.start_epoch(epoch)
        if (length := self.loaders.num_batches()) != self._length:
            self.num_batches = self._length = length
            self._resized()
        if is_its_epoch and skip != state["batches"]:
            rank_zero_warn(
                f"The checkpoint was written inside a batch, batch_idx {skip} of epoch {epoch}. The batch is repeated"
                " (left out with several dataloaders, or one that saves its own position), and gradients of earlier"
                " batches of its accumulation window may be lost, so the result differs from an uninterrupted run. Save"
                " in on_train_batch_end instead."
            )
        if is_its_epoch and (skip or not state["batches"]):
            self._resume(state, skip)
        elif skip:
            self._resume({"epoch": epoch, "batches": skip, "is_over": False}, skip)

    def _resume(self, state: State, batches: int) -> None:
        """Continue after the first ``batches`` of the pass in ``state``."""
        assert self.loaders is not None
        inside = batches != state["batches"]  # saved inside a batch, which is repeated: not exact
        is_over = state["is_over"] and not inside
        self._epoch, self._batches, self.is_over = state["epoch"], batches, is_over
        self._is_empty, self._is_open = is_over and state["epoch"] == self._next_epoch, not is_over
        with random_states.isolated() if "loaders" in state else nullcontext():
            reasons = self.loaders.load_state_dict({**state, "batches": batches, "inside": inside, "is_over": is_over})
        if reasons:
            refuse_inexact(
                f"The batches after batch {batches} of epoch {state['epoch']} are not those that would have followed:"
                f" {'; '.join(reasons)}.",
                "Resume with the original settings.",
                exact=self._exact and not inside,
            )

    def end(self) -> None:
        """End the pass that :meth:`start_epoch` has prepared: none of its batches is trained."""
        assert self.loaders is not None
        self._is_empty, self._is_open = True, False
        with random_states.isolated():
            self.loaders.load_state_dict({**self.loaders.state_dict(), "batches": self.first, "is_over": True})

    def discard_batch(self) -> None:
        """End the pass before the last yielded batch, because a step that draws its own batches found no more."""
        self._batches -= 1
        self.is_over = True

    def __iter__(self) -> Iterator[tuple[Batch, int, bool]]:
        loaders = self.loaders
        assert loaders is not None
        if self._is_empty:
            return iter(())
        if not self._is_open:
            loaders.open()
        self._is_open = False
        source: Iterable[Batch] = iter(loaders)
        if self._watch is not None:
            source = self._watch(source)
        self._epoch, self._batches, self.is_over = self._next_epoch, self.first or 0, False
        count = loaders.num_batches() if loaders.plan.has_length else None  # callbacks may change `num_batches`
        return chain(map(partial(self._number_batches, loaders, count), source), self._end())

    def _end(self) -> Iterator[tuple[Batch, int, bool]]:
        """Record that no batch is left. Yields nothing.

        Raises:
            ConfigurationError: if the first pass had no batch, or two in succession had none.
        """
        self.is_over, had_batches, self._has_batches = True, self._has_batches, self._batches > 0
        if not self._batches:
            assert self.loaders is not None
            text = f"{self.loaders.first_empty()} yielded no batch in epoch {self._epoch}."
            if not had_batches:
                raise ConfigurationError(text + NO_BATCHES)
            warn(f"{text} The epoch ends without training. {_AN_ITERATOR}")
        yield from ()

    def _number_batches(self, loaders: Loaders, count: float | None, batch: Batch) -> tuple[Batch, int, bool]:
        """Count a yielded batch. Keeps no reference to it, because it may be in GPU memory."""
        self._batches += 1
        self.is_over = loaders.is_exhausted if count is None else self._batches == count
        return batch, self._batches - 1, self.is_over


class LookAhead:
    """An iterator that fetches one item ahead, so that the last item is known to be the last.

    Args:
        source: the items.
        before: called before an item is fetched. Default: None.
        eager: whether to fetch the first item immediately. Default: True.

    Attributes:
        is_exhausted: whether no item is left.
    """

    def __init__(self, source: Iterator[Any], before: Callable[[], None] | None = None, *, eager: bool = True) -> None:
        self._source = source
        self._before = before
        self._items: list[Any] = []
        self._is_fetched = self.is_exhausted = False
        if eager:
            self.fetch_first()

    def fetch_first(self) -> None:
        """Fetch the first item, unless it was fetched."""
        if not self._is_fetched:
            self._fetch()

    def _fetch(self) -> None:
        if self._before is not None:
            self._before()
        self._items += islice(self._source, 1)
        self._is_fetched, self.is_exhausted = True, not self._items

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.fetch_first()
        if self.is_exhausted:
            raise StopIteration
        item = self._items.pop()
        self._fetch()
        return item


@dataclass(eq=False)
class Transfer:
    """Moves batches to the device, through the user's transfer hooks if there are any.

    Args:
        device: the target device.
        convert: conversion by the precision before the move (``Precision.convert_batch``). None for no conversion.
        move: moves any collection of tensors: (batch, device).
        before, transfer, after: the user's ``on_before_batch_transfer(batch, dataloader_idx)``,
            ``transfer_batch_to_device(batch, device, dataloader_idx)`` and ``on_after_batch_transfer``; each None
            if it is not overridden.
    """

    device: torch.device
    convert: Callable[[Batch], Batch] | None
    move: Callable[[Batch, torch.device], Batch]
    before: Callable[..., Batch] | None = None
    transfer: Callable[..., Batch] | None = None
    after: Callable[..., Batch] | None = None

    def __call__(self, batch: Batch, dataloader_idx: int = 0) -> Batch:
        """Return the batch for the step function, on the device; None for ``IDLE``."""
        if batch is IDLE:
            return None
        if self.convert is not None:
            batch = self.convert(batch)
        if self.before is not None:
            batch = self.before(batch, dataloader_idx)
        if self.transfer is not None:
            batch = self.transfer(batch, self.device, dataloader_idx)
        elif not _is_on(batch, self.device):
            batch = self.move(batch, self.device)
        if self.after is not None:
            batch = self.after(batch, dataloader_idx)
        return batch


def _is_on(batch: Batch, device: torch.device) -> bool:
    """Return whether a tensor, or a list or tuple of tensors, is on the device; False for other batches."""
    if type(batch) is Tensor:
        return bool(batch.device == device)
    if type(batch) not in (list, tuple):
        return False
    for item in batch:  # not all(...): a generator costs more than the checks
        if type(item) is not Tensor or item.device != device:
            return False
    return True
