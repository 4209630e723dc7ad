"""Samplers that divide the data among processes in the order of a single process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DistributedSampler, SequentialSampler

from trainer.errors import ConfigurationError
from trainer.state import random_states


class Span(NamedTuple):
    """The smallest and largest number of batches of a dataloader on any rank; (0, inf) if unknown."""

    fewest: float
    most: float


class SampleShare(DistributedSampler[int]):
    """Every ``num_replicas``-th index of a sampler, from the ``rank``-th on.

    Unless it is padded, nothing is repeated or left out: processes may have different numbers of samples, or none.

    Args:
        sampler: the sampler for a single process; it has a length. The process's generators are seeded from ``seed``
            and the epoch while it is iterated, so that all processes divide the same order. Its own generators must
            have the same state on all processes.
        num_replicas: the number of processes.
        rank: the rank of this process.
        seed: the same on all processes. Default: 0.
        padded: whether to repeat the first samples until all processes have the same number. Default: False.

    Attributes:
        shift: added to the seed. Differs between the passes of an epoch if they must not have the same order.

    Raises:
        ConfigurationError: if the sampler has no length.
    """

    def __init__(self, sampler: Any, num_replicas: int, rank: int, seed: int = 0, *, padded: bool = False) -> None:
        if not isinstance(sampler, Sized):
            raise ConfigurationError(
                f"Got a {type(sampler).__name__} without a length as the sampler of a DataLoader: it cannot be divided"
                " among processes. Give it a `__len__`; or divide the data yourself, with"
                " Trainer(use_distributed_sampler=False)."
            )
        super().__init__(sampler, num_replicas, rank, shuffle=False, seed=seed)  # type: ignore[arg-type]
        self.sampler: Any = sampler
        self.shift, self._padded = 0, padded
        if not padded:  # torch counts repeated samples
            self.num_samples, self.total_size = len(range(rank, len(sampler), num_replicas)), len(sampler)

    def __iter__(self) -> Iterator[int]:
        if type(self.sampler) is SequentialSampler and not self._padded:
            return iter(range(self.rank, self.total_size, self.num_replicas))
        with random_states.isolated():
            seed = self.seed + self.epoch + self.shift
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)  # not those of devices, which are not restored
            drawn = list(self.sampler)
        row = islice(cycle(drawn), self.total_size) if self._padded else drawn
        return islice(row, self.rank, None, self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also of the sampler if it has ``set_epoch``."""
        super().set_epoch(epoch)
        if callable(set_inner := getattr(self.sampler, "set_epoch", None)):
            set_inner(epoch)


class BatchShare:
    """The batches of one process: every ``num_replicas``-th batch of indices, from the ``rank``-th on.

    Args:
        batches: lists of indices, as a ``DataLoader`` takes them for ``batch_sampler``. Several processes need a
            sequence, so that all of them divide the same batches.
        num_replicas: the number of processes. Default: 1.
        rank: the rank of this process. Default: 0.
        padded: whether to repeat the first batches until all processes have the same number. Default: False.
    """

    def __init__(self, batches: Any, num_replicas: int = 1, rank: int = 0, *, padded: bool = False) -> None:
        self.batches, self._num_replicas, self._rank, self._padded = batches, num_replicas, rank, padded

    def __len__(self) -> int:
        count = len(self.batches)
        if self._padded and count:
            return -(-count // self._num_replicas)
        return len(range(self._rank, count, self._num_replicas))

    def __iter__(self) -> Iterator[Any]:
        stop = len(self) * self._num_replicas if self._padded else None
        source = cycle(self.batches) if self._padded else self.batches
        return islice(source, self._rank, stop, self._num_replicas)
