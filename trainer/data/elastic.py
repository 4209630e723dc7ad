"""The order of a run's samples, so that a resume on another number of processes gives each update the same ones.

The samples of an epoch stand in one row for all processes. Of W processes, process r takes the samples r, r + W,
r + 2W and so on of the row, in batches of B; so batch k of all processes together has the samples from kWB to (k+1)WB,
and an update over A batches has WBA of them. Another run with the same product WBA that reads the same row gives each
update the same samples, however they are divided. How the row comes about (shuffled by whom, padded to a multiple of
what, cut off where) is decided by the run that has begun: a :class:`SampleOrder` says it, and is in the checkpoints.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data import DistributedSampler as Distributed

from trainer.state import random_states
from trainer.state.random_states import State


@dataclass(frozen=True)
class SampleOrder:
    """How the run that was begun orders the samples of an epoch, and divides them into updates.

    Attributes:
        sampler: ``"RandomSampler"``, ``"SequentialSampler"`` or ``"DistributedSampler"``.
        processes: that share the samples.
        batch_size: samples in a batch of one process.
        drop_last: whether the dataloader leaves out a last batch that is not full.
        limit: ``limit_train_batches``: batches of one process (int), or their share of an epoch (float).
        accumulate: ``accumulate_grad_batches`` from each of some epochs on: pairs.
        has_workers: whether the dataloader has worker processes.
        shuffle, seed, cuts: of a DistributedSampler, which shuffles by seed and epoch; ``cuts``: it leaves out the
            samples that do not divide, in the place of repeating some.
    """

    sampler: str
    processes: int
    batch_size: int
    drop_last: bool
    limit: int | float
    accumulate: tuple[tuple[int, int], ...]
    has_workers: bool = False
    shuffle: bool = False
    seed: int = 0
    cuts: bool = False

    @classmethod
    def of(cls, loader: Any, limit: int | float, accumulate: Mapping[int, int], processes: int) -> SampleOrder | str:
        """The order of a run with this dataloader, on so many processes; or why there is none."""
        if (reason := not_ordered(loader)) is not None:
            return reason
        sampler = loader.batch_sampler.sampler
        if isinstance(sampler, ElasticSampler):
            return sampler.order
        shared = type(sampler) is Distributed
        if (sampler.num_replicas if shared else 1) != processes:
            return f"each of {processes} processes has a {type(sampler).__name__} over all samples"
        own = {"shuffle": sampler.shuffle, "seed": sampler.seed, "cuts": sampler.drop_last} if shared else {}
        return cls(
            type(sampler).__name__,
            processes,
            loader.batch_size,
            loader.drop_last,
            limit,
            tuple(sorted(accumulate.items())),
            loader.num_workers > 0,
            **own,
        )

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> SampleOrder:
        """The inverse of :meth:`state_dict`."""
        return cls(**{**state, "accumulate": tuple(map(tuple, state["accumulate"]))})

    def state_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "accumulate": [list(pair) for pair in self.accumulate]}

    def accumulated(self, epoch: int) -> int:
        """Batches of one process in an update of ``epoch``."""
        return next((batches for first, batches in reversed(self.accumulate) if first <= epoch), 1)

    def update_size(self, epoch: int) -> int:
        """Samples of all processes in an update of ``epoch``."""
        return self.processes * self.batch_size * self.accumulated(epoch)

    def batches(self, samples: int) -> int:
        """Batches of one process in an epoch of ``samples`` samples, the limit applied."""
        own = self._row(samples) // self.processes
        count = own // self.batch_size if self.drop_last else math.ceil(own / self.batch_size)
        return min(count, self.limit) if isinstance(self.limit, int) else int(count * self.limit)

    def total(self, samples: int) -> int:
        """Samples that all processes together train in an epoch: repeated ones count again."""
        return min(self._row(samples), self.batches(samples) * self.batch_size * self.processes)

    def is_read_to_the_end(self, samples: int) -> bool:
        """Whether the sampler is asked for more than there is. A RandomSampler draws once more for that."""
        is_limited = self.drop_last or self.total(samples) < samples
        return self.has_workers or (samples % self.batch_size > 0 and not is_limited)

    def shares(self, samples: int, epoch: int) -> list[float]:
        """How much each sample of an epoch's last, short update counts in it; [] where the last one is full.

        Each batch's loss is a mean, and an update is the mean over its batches: a sample in a short batch counts more.
        """
        total, size = self.total(samples), self.update_size(epoch)
        start = total - total % size
        own, batches = total // self.processes, self.batches(samples) - start // (self.processes * self.batch_size)

        def share(place: int) -> float:
            first = place // self.processes // self.batch_size * self.batch_size
            return 1 / (self.processes * batches * min(self.batch_size, own - first))

        return [share(place) for place in range(start, total)]

    def _row(self, samples: int) -> int:
        """The samples of an epoch before batches are made: padded, or cut, to a multiple of the processes."""
        if self.cuts:
            return samples // self.processes * self.processes
        return math.ceil(samples / self.processes) * self.processes


def not_ordered(loader: Any) -> str | None:
    """Why the batches of a dataloader cannot be divided in another way; None where they can."""
    if not isinstance(loader, DataLoader):
        return f"the training data is a {type(loader).__name__}, no DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return "the DataLoader has an iterable dataset"
    batches: Any = loader.batch_sampler
    if batches is None:
        return "the DataLoader makes no batches"
    if type(batches) is not BatchSampler:
        return f"its batch sampler is a {type(batches).__name__}"
    known = (RandomSampler, SequentialSampler, Distributed, ElasticSampler)
    if type(batches.sampler) not in known:
        return f"its sampler is a {type(batches.sampler).__name__}"
    return None


class ElasticSampler(Sampler[int]):
    """One process's samples of the row that a :class:`SampleOrder` describes.

    All processes have as many batches. One that would lack an epoch's last gets the last sample of the row once more,
    with a weight of 0 (:meth:`weight_of`).

    Args:
        order: of the run that was begun.
        source: what that run's RandomSampler is now; of no use to the other kinds of an order.
        dataset: whose samples.
        processes, rank: how many processes share the samples now, and which one this is.
        batch_size: samples in a batch of one process now.
        share: returns on all processes what the first one was called with.

    Attributes:
        epoch: a DistributedSampler shuffles by it.
        row: the epoch's samples, of all processes.
    """

    def __init__(
        self,
        order: SampleOrder,
        source: Any,
        dataset: Any,
        processes: int,
        rank: int,
        batch_size: int,
        share: Callable[[State], State],
    ) -> None:
        self.order = order
        self.num_replicas, self.rank, self.batch_size = processes, rank, batch_size
        self.epoch = 0
        self.row = torch.empty(0, dtype=torch.int64)
        self._source = source
        self._dataset = dataset
        self._share = share

    @property
    def samples(self) -> int:
        """How many there are in an epoch of one process, before any is repeated or left out."""
        return len(self._source if self.order.sampler == "RandomSampler" else self._dataset)

    @property
    def total(self) -> int:
        """Samples that all processes together train in an epoch."""
        return self.order.total(self.samples)

    @property
    def batches(self) -> int:
        """Batches of each process in an epoch."""
        return math.ceil(self.total / (self.num_replicas * self.batch_size))

    def set_epoch(self, epoch: int) -> None:
        """The next pass is that of ``epoch``."""
        self.epoch = epoch

    def __len__(self) -> int:
        own = len(range(self.rank, self.total, self.num_replicas))
        return max(own, (self.batches - 1) * self.batch_size + 1) if self.total else 0

    def __iter__(self) -> Iterator[int]:
        row, count = self._next_row(), len(self)
        own = row[self.rank :: self.num_replicas]
        self.row = row
        return iter([*own.tolist(), *row[-1:].tolist() * (count - len(own))])

    def batch_of(self, number: int, rank: int, processes: int, batch_size: int) -> list[int]:
        """Batch ``number`` of this epoch on process ``rank`` of so many, with batches of that size."""
        own = self.row[rank::processes]
        batch: list[int] = own[number * batch_size : (number + 1) * batch_size].tolist()
        return batch

    def weight_of(self, number: int) -> float | None:
        """What batch ``number`` of this process counts in its update; None for 1.

        In an epoch's last update, if it is a short one, each sample counts as much as it would have done where the run
        was begun: as far as that is the same for the samples of one batch.
        """
        total, size = self.total, self.order.update_size(self.epoch)
        together = self.num_replicas * self.batch_size
        if number * together < (start := total - total % size):
            return None
        shares = self.order.shares(self.samples, self.epoch)
        own = shares[number * together - start : (number + 1) * together - start][self.rank :: self.num_replicas]
        return sum(own, 0.0) * self.num_replicas * (self.batches - start // together)  # 1 in the mean over the update

    def keeps_shares(self, epoch: int) -> bool:
        """Whether each sample of the epoch's last update counts as much as where the run was begun."""
        shares, together = self.order.shares(self.samples, epoch), self.num_replicas * self.batch_size
        for first in range(0, len(shares), together):
            for rank in range(self.num_replicas):
                own = shares[first : first + together][rank :: self.num_replicas]
                if own and max(own) > min(own) * (1 + 1e-9):
                    return False
        return True

    def _next_row(self) -> Tensor:
        order, samples = self.order, self.samples
        if order.sampler == "RandomSampler":
            return torch.tensor(self._drawn(samples), dtype=torch.int64)
        if order.shuffle:
            row = torch.randperm(samples, generator=torch.Generator().manual_seed(order.seed + self.epoch))
        else:
            row = torch.arange(samples)
        return row[torch.arange(self.total) % max(samples, 1)]

    def _drawn(self, samples: int) -> list[int]:
        """What the first process's RandomSampler draws: on the others, without a change to their random states."""
        generators = random_states.find(self._source)
        state = self._share(random_states.capture(own=generators))
        if self.rank == 0:
            return self._draw(samples)
        with random_states.isolated():
            random_states.restore(state, own=generators)
            return self._draw(samples)

    def _draw(self, samples: int) -> list[int]:
        indices = iter(self._source)
        drawn = list(islice(indices, self.total))
        if self.order.is_read_to_the_end(samples):
            deque(indices, maxlen=0)
        return drawn
