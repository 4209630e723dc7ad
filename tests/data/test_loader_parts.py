"""Which dataloaders have a length that is certain."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from trainer.data.loader_parts import has_exact_length

DATA = TensorDataset(torch.ones(6, 1))


class Stream(IterableDataset):
    __iter__ = None

    def __len__(self):
        return 6


class Own(SequentialSampler):
    pass


class OwnBatches(BatchSampler):
    pass


class OwnLoader(DataLoader):
    pass


@pytest.mark.parametrize(
    ("loader", "exact"),
    [
        (DataLoader(DATA, batch_size=None), True),
        (DataLoader(DATA, batch_size=4, shuffle=True, drop_last=True), True),
        (DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)), True),
        (DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 2, False)), True),
        (DataLoader(Stream()), False),
        (DataLoader(DATA, sampler=Own(DATA)), False),
        (DataLoader(DATA, batch_sampler=OwnBatches(SequentialSampler(DATA), 2, False)), False),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2]]), False),
        (OwnLoader(DATA), False),
        (Stream(), False),
    ],
)
def test_exact_lengths(loader, exact):
    assert has_exact_length(loader) is exact
