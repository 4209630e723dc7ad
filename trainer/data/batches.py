"""Batches: how many there are, where they come from, and how they get to the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.errors import ConfigurationError, ResumeError
from trainer.state import random_states

Batch = Any


class Loaders(Protocol):
    """The dataloaders of one stage, ready to run: samplers distributed, limits applied."""

    @property
    def limits(self) -> list[float]:
        """Batches to run of each dataloader; inf where it has no length."""

    @property
    def is_sequential(self) -> bool:
        """Whether the dataloaders run one after the other, not side by side."""

    @property
    def has_length(self) -> bool:
        """Whether their lengths are known; if not, a limit may be more than there is."""

    def num_batches(self) -> float:
        """Batches in one pass over all of them; inf where nobody knows."""

    def start_epoch(self, epoch: int) -> None:
        """Tell the samplers which epoch it is: they shuffle by it."""

    def batches(self, limit: float = float("inf")) -> Iterator[tuple[Batch, int, int]]:
        """Begin a pass: (batch, batch_idx, dataloader_idx); of each dataloader, at most ``limit`` batches."""

    def open(self) -> None:
        """Begin a pass of training: that draws random numbers, and fetches a batch where their number is not known."""

    def training_pass(self) -> Iterator[Batch]:
        """The pass that was opened, or one that begins now: of each batch, what a step gets.

        Where it stands is known, and can be taken up again.
        """

    def position(self) -> dict[str, Any]:
        """Where the pass of training is: tensors and plain containers. {} before the first.

        Where there is no length, and so batches are fetched one ahead, it is that before the last one was fetched.
        """

    def recall(self, position: dict[str, Any], epoch: int) -> bool:
        """Learn from a position when the dataloaders were made, and so, when they are due to be made anew.

        Returns:
            Whether they would not be due in ``epoch``: what they were in then counts.
        """

    def begin_after(self, position: dict[str, Any]) -> None:
        """Take over from a pass that was over what the next one depends on."""

    def take_up(self, position: dict[str, Any], consumed: int | None) -> list[str]:
        """Have the next pass be what is left of that one. Changes the random states of this process.

        Args:
            position: where it was.
            consumed: batches that were trained, where it is not those of ``position``; None where it is.

        Returns:
            Why what follows may not be what would have followed; empty where it is.
        """

    def skip(self, count: int) -> int:
        """Have the next pass begin after its first ``count`` batches, as well as can be done without a position.

        Returns:
            How many are still to be dropped.
        """


class EndOfPass(Exception):  # noqa: N818 - no error
    """A step that draws its own batches has come to their end."""


class DrawnLoaders(Loaders, Protocol):
    """Loaders whose batches a step draws itself (``dataloader_iter``): a pass says only that there is a step to do."""

    @property
    def is_done(self) -> bool:
        """Whether the last batch of the pass has been drawn, as far as is known."""

    @property
    def last(self) -> tuple[Batch, int, int]:
        """The batch drawn last, its index, and its dataloader's."""

    def iterator(self) -> Iterator[tuple[Batch, int, int]]:
        """What a step draws from."""


class TrainingBatches:
    """The training data as the fit loop sees it: iterate for (batch, batch_idx, is_last).

    Args:
        loaders: the training dataloaders; None for none.
        renew: asked before each epoch for dataloaders to go on with; None where the first ones stay.
        watch: put around the batches of an epoch, by a profiler; None for nothing.
        opened_for: the epoch whose pass was opened when the dataloaders were made; -1 for none. That of another epoch
            is opened when it is iterated.

    Attributes:
        num_batches: batches in one pass; inf where nobody knows. SWA writes it; who iterates gets what there is.
    """

    def __init__(
        self,
        loaders: Loaders | None,
        renew: Callable[[], Loaders | None] | None = None,
        watch: Callable[[Iterable[Batch]], Iterable[Batch]] | None = None,
        opened_for: int = -1,
    ) -> None:
        self.loaders = loaders
        self.num_batches: float = loaders.num_batches() if loaders is not None else 0
        self.has_length = loaders is None or loaders.has_length
        self._renew = renew
        self._watch = watch
        self._opened_for = opened_for
        self._first = self._skip = 0
        self._epoch = self._next_epoch = -1
        self._yielded = 0
        self._is_over = self._ended = False
        self._loaded: dict[str, Any] = {}
        self._exact = True
        self._has_begun_after = False

    def __bool__(self) -> bool:
        return self.num_batches > 0

    def state_dict(self) -> dict[str, Any]:
        """Where the pass is that is under way, or was last: tensors and plain containers. {} before the first.

        It is that after the batch which was handed out last.
        """
        if self._epoch < 0 or self.loaders is None:
            if self._has_begun_after and self.loaders is not None:
                return {**self._loaded, "position": {**self._loaded["position"], **self.loaders.position()}}
            if self._opened_for >= 0 and self.loaders is not None:
                first = {"epoch": self._opened_for, "batches": 0, "is_over": False}
                return {**first, "position": self.loaders.position()}
            return self._loaded
        position = self.loaders.position()
        return {"epoch": self._epoch, "batches": self._yielded, "is_over": self._is_over, "position": position}

    def load_state_dict(self, state: dict[str, Any], *, exact: bool = True) -> None:
        """Have the next epoch begin, or go on, as it would have where ``state_dict`` returned ``state``.

        Args:
            state: what it returned.
            exact: refuse where that cannot be shown; otherwise go on as well as possible, with a warning.
        """
        self._loaded, self._exact, self._has_begun_after = state, exact, False
        self._opened_for = -1

    def start_epoch(self, epoch: int, skip: int) -> None:
        """The next pass is that of ``epoch``, without its first ``skip`` batches.

        Where a state has been loaded that speaks of it, it is taken up there. Otherwise the samples of these batches
        are skipped, or loaded and dropped, where the dataloaders cannot do better.

        Raises:
            ConfigurationError: the dataloaders run one after the other.
            ResumeError: what follows could not be shown to be what would have followed.
        """
        state = self._loaded
        if state and self.loaders is not None and not self.loaders.recall(state["position"], epoch):
            state = {}
        renewed = self._renew() if self._renew is not None else None
        if renewed is not None:
            self.loaders, self.num_batches, self.has_length = renewed, renewed.num_batches(), renewed.has_length
        assert self.loaders is not None
        if self.loaders.is_sequential:
            raise ConfigurationError(
                '`FitLoop` does not support the `CombinedLoader(mode="sequential")` mode. Training takes one batch of'
                ' each dataloader at a time: choose "max_size_cycle", "max_size" or "min_size".'
            )
        self.loaders.start_epoch(epoch)
        self._next_epoch, self._first, self._skip, self._ended = epoch, skip, 0, False
        is_its_epoch = bool(state) and state["epoch"] == epoch
        if is_its_epoch and skip == state["batches"] and state["is_over"]:
            self.end()
        elif is_its_epoch and (skip or not state["batches"]):
            self._take_up(state)
        elif skip:
            self._skip = self.loaders.skip(skip)
        elif state and state["epoch"] + 1 == epoch and renewed is None:
            self._begin_after(state)
        elif is_its_epoch and state["batches"]:
            warnings.warn(
                f"The checkpoint was written inside the first batch of epoch {epoch}, which begins again: what follows"
                " is not what would have followed.",
                stacklevel=2,
            )

    def _begin_after(self, state: dict[str, Any]) -> None:
        assert self.loaders is not None
        if not self._has_begun_after:
            self.loaders.begin_after(state["position"])
        self._has_begun_after = True

    def _take_up(self, state: dict[str, Any]) -> None:
        assert self.loaders is not None
        skip, position = self._first, state["position"]
        was_between_batches = skip == state["batches"]  # an exception inside of one may have written it, as it could
        with random_states.isolated():
            reasons = self.loaders.take_up(position, None if was_between_batches else skip)
        if reasons and self._exact and was_between_batches:
            raise ResumeError(
                f"Resuming after batch {skip} of epoch {state['epoch']} would not be exact: {'; '.join(reasons)}."
                " Resume with what the checkpoint was made with, or go on all the same, as well as possible:"
                " Trainer(exact_resume=False)."
            )
        if reasons:
            warnings.warn(
                f"The batches after batch {skip} of epoch {state['epoch']} are not those that would have followed:"
                f" {'; '.join(reasons)}.",
                stacklevel=2,
            )

    def end(self) -> None:
        """Nothing is left of the pass that was about to go on. What was loaded speaks of the next epoch, too."""
        self._ended = True
        if self._loaded:
            self._begin_after(self._loaded)

    def __iter__(self) -> Iterator[tuple[Batch, int, bool]]:
        assert self.loaders is not None
        if self._ended:
            return iter(())
        length = self.loaders.num_batches()  # not what callbacks have made of `num_batches`
        start = self._first - self._skip
        count = None if length == float("inf") else int(length)
        left = None if count is None else max(count - start, 0)  # below 0 where a resumed run is given fewer
        if self._opened_for != self._next_epoch:
            self.loaders.open()
        source: Iterator[Batch] = islice(self.loaders.training_pass(), left)
        if self._watch is not None:
            source = iter(self._watch(source))
        self._epoch, self._yielded, self._is_over, self._loaded = self._next_epoch, self._first, False, {}
        return self._known(source, start, count) if self.has_length else self._unknown(source, start)

    def _known(self, source: Iterator[Batch], start: int, count: int | None) -> Iterator[tuple[Batch, int, bool]]:
        for i, batch in enumerate(source, start):
            if i >= self._first:
                self._yielded, self._is_over = i + 1, i + 1 == count
                yield batch, i, self._is_over

    def _unknown(self, source: Iterator[Batch], start: int) -> Iterator[tuple[Batch, int, bool]]:
        for i, (batch, is_last) in enumerate(_with_last(source), start):
            if i >= self._first:
                self._yielded, self._is_over = i + 1, is_last
                yield batch, i, is_last


def _with_last(source: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Each batch with whether it is the last; known by looking one ahead, so only for loaders without a length."""
    iterator = iter(source)
    try:
        batch = next(iterator)
    except StopIteration:
        return
    for following in iterator:
        yield batch, False
        batch = following
    yield batch, True


def as_it_is(value: Any = None, *_: Any) -> Any:
    """Stands where a loop has nothing to do."""
    return value


class Transfer:
    """Moves batches to the device, through the user's hooks where there are any.

    Args:
        device: where to.
        convert: what the precision does to a batch beforehand (``Precision.convert_batch``); None for nothing.
        move: moves any collection of tensors: (batch, device).
        before, transfer, after: the user's ``on_before_batch_transfer(batch, dataloader_idx)``,
            ``transfer_batch_to_device(batch, device, dataloader_idx)`` and ``on_after_batch_transfer``; each None
            where it is not overridden.
    """

    def __init__(
        self,
        device: torch.device,
        convert: Callable[[Batch], Batch] | None,
        move: Callable[[Batch, torch.device], Batch],
        before: Callable[..., Batch] | None = None,
        transfer: Callable[..., Batch] | None = None,
        after: Callable[..., Batch] | None = None,
    ) -> None:
        self._device = device
        self._convert = convert
        self._move = move
        self._before = before
        self._transfer = transfer
        self._after = after

    def __call__(self, batch: Batch, dataloader_idx: int = 0) -> Batch:
        """``batch`` as the step function gets it."""
        if self._convert is not None:
            batch = self._convert(batch)
        if self._before is not None:
            batch = self._before(batch, dataloader_idx)
        if self._transfer is not None:
            batch = self._transfer(batch, self._device, dataloader_idx)
        elif not _is_on(batch, self._device):
            batch = self._move(batch, self._device)
        if self._after is not None:
            batch = self._after(batch, dataloader_idx)
        return batch


def _is_on(batch: Batch, device: torch.device) -> bool:
    """Whether a batch of the commonest kinds (a tensor, a list or tuple of tensors) is on the device already."""
    if type(batch) is Tensor:
        return bool(batch.device == device)
    if type(batch) not in (list, tuple):
        return False
    for item in batch:  # not all(...): a generator costs more than the look
        if type(item) is not Tensor or item.device != device:
            return False
    return True
