"""The order of a run's samples, so that each update has the same samples after a resume with another world size.

The samples of an epoch form one row for all processes. Of W processes, process r takes the samples r, r + W, r + 2W and
so on, in batches of B. Thus batch k of all processes together has the samples from kWB to (k+1)WB, and an update over A
batches has WBA of them. A run with the same product WBA and the same row has the same samples in each update. The
original run determines the row (how it is shuffled and padded): a :class:`SampleOrder` describes it, and is stored
in checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data import DistributedSampler as Distributed

from trainer.state import random_states
from trainer.state.random_states import State


@dataclass(frozen=True)
class SampleOrder:
    """The order of an epoch's samples in the original run, and their division into updates.

    Attributes:
        sampler: ``"RandomSampler"``, ``"SequentialSampler"`` or ``"DistributedSampler"``.
        processes: number of processes that share the samples.
        batch_size: samples in a batch of one process.
        drop_last: whether the dataloader drops an incomplete last batch.
        accumulate: ``accumulate_grad_batches``.
        shuffle, seed: settings of a DistributedSampler, which shuffles by seed and epoch.
    """

    sampler: str
    processes: int
    batch_size: int
    drop_last: bool
    accumulate: int
    shuffle: bool = False
    seed: int = 0

    @classmethod
    def of(cls, loader: Any, accumulate: int, processes: int) -> SampleOrder | str:
        """Return the order of a run with this dataloader and number of processes, or the reason why it has none."""
        if (reason := not_ordered(loader)) is not None:
            return reason
        sampler = loader.batch_sampler.sampler
        if isinstance(sampler, ElasticSampler):
            return sampler.order
        shared = type(sampler) is Distributed
        if (sampler.num_replicas if shared else 1) != processes:
            return f"each of {processes} processes has a {type(sampler).__name__} over all samples"
        if shared and sampler.drop_last:
            return "the DistributedSampler drops samples (drop_last=True)"
        shuffling = {"shuffle": sampler.shuffle, "seed": sampler.seed} if shared else {}
        return cls(type(sampler).__name__, processes, loader.batch_size, loader.drop_last, accumulate, **shuffling)

    @property
    def update_size(self) -> int:
        """The number of samples of all processes in an update."""
        return self.processes * self.batch_size * self.accumulate

    def batches(self, samples: int) -> int:
        """Return the number of batches of one process in an epoch of ``samples`` samples."""
        share = self._row(samples) // self.processes
        return share // self.batch_size if self.drop_last else math.ceil(share / self.batch_size)

    def total(self, samples: int) -> int:
        """Return the number of samples that all processes train in an epoch, including repeated ones."""
        return min(self._row(samples), self.batches(samples) * self.batch_size * self.processes)

    def _row(self, samples: int) -> int:
        """Return the number of samples in a row: padded to a multiple of the number of processes."""
        return math.ceil(samples / self.processes) * self.processes


def not_ordered(loader: Any) -> str | None:
    """Return the reason why the batches of a dataloader cannot be divided differently; None if they can."""
    if not isinstance(loader, DataLoader):
        return f"the training data is a {type(loader).__name__}, not a DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return "the DataLoader has an iterable dataset"
    batches: Any = loader.batch_sampler
    if batches is None:
        return "the DataLoader makes no batches"
    if type(batches) is not BatchSampler:
        return f"the DataLoader's batch sampler is a {type(batches).__name__}"
    known = (RandomSampler, SequentialSampler, Distributed, ElasticSampler)
    if type(batches.sampler) not in known:
        return f"the DataLoader's sampler is a {type(batches.sampler).__name__}"
    return None


@dataclass
class ElasticState:
    """The state that a run takes from the run that it resumes, which had another number of processes.

    Attributes:
        order: the order of the training samples.
        given: the settings that are counted in batches, as they were given to this run.
        interval: the number of batches of this run between two validations, and whether each epoch ends with a
            validation. Default: None, ``val_check_interval`` applies.
    """

    order: SampleOrder
    given: dict[str, Any]
    interval: tuple[int, bool] | None = None


class ElasticSampler(Sampler[int]):
    """Yields the samples of one process from the row that a :class:`SampleOrder` describes.

    All processes have the same number of batches. A process without a last batch gets the last sample of the row again,
    with a weight of 0 (:meth:`weight_of`).

    Args:
        order: the order of the original run.
        source: the sampler to draw from if the original run had a RandomSampler.
        dataset: the dataset of the samples.
        processes, rank: the current number of processes, and the rank of this one.
        batch_size: samples in a batch of one process now.
        share: broadcasts its argument from the first process.

    Attributes:
        epoch: the epoch, which determines the order of a DistributedSampler.
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
        self._source = source
        self._dataset = dataset
        self._share = share

    @property
    def samples(self) -> int:
        """The number of samples in an epoch, before padding or cutting."""
        return len(self._source if self.order.sampler == "RandomSampler" else self._dataset)

    @property
    def total(self) -> int:
        """The number of samples that all processes train in an epoch."""
        return self.order.total(self.samples)

    @property
    def batches(self) -> int:
        """The number of batches of each process in an epoch."""
        return math.ceil(self.total / (self.num_replicas * self.batch_size))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        share = len(range(self.rank, self.total, self.num_replicas))
        return max(share, (self.batches - 1) * self.batch_size + 1) if self.total else 0

    def __iter__(self) -> Iterator[int]:
        row, count = self._next_row(), len(self)
        share = row[self.rank :: self.num_replicas]
        return iter([*share.tolist(), *row[-1:].tolist() * (count - len(share))])

    @property
    def last_update(self) -> int:
        """The number of samples in an epoch's last update if that update is incomplete, otherwise 0."""
        return self.total % self.order.update_size

    def weight_of(self, number: int) -> float | None:
        """Return the weight of batch ``number`` of this process in its update; None for 1.

        In an incomplete last update, all samples have the same weight, also if batches have different sizes.
        """
        first = number * self.num_replicas * self.batch_size
        start = self.total - self.last_update
        if first < start:
            return None
        end = min(first + self.num_replicas * self.batch_size, self.total)
        share = range(first + self.rank, end, self.num_replicas)
        batches = self.batches - start // (self.num_replicas * self.batch_size)
        return len(share) * self.num_replicas * batches / self.last_update  # 1 on average

    def _next_row(self) -> Tensor:
        order, samples = self.order, self.samples
        if order.sampler == "RandomSampler":
            return torch.tensor(self._draw_together(), dtype=torch.int64)
        if order.shuffle:
            row = torch.randperm(samples, generator=torch.Generator().manual_seed(order.seed + self.epoch))
        else:
            row = torch.arange(samples)
        return row[torch.arange(self.total) % max(samples, 1)]

    def _draw_together(self) -> list[int]:
        """Draw the order on the first process, and repeat this on the others without changing their random states."""
        generators = random_states.find(self._source)
        state = self._share(random_states.capture(objects=generators))
        if self.rank == 0:
            return list(self._source)[: self.total]
        with random_states.isolated():
            random_states.restore(state, objects=generators)
            return list(self._source)[: self.total]
