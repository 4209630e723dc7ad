"""Division of the samples of an evaluation among ranks."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from trainer.data.unpadded import SampleShare
from trainer.errors import ConfigurationError
from trainer.state import random_states


def shares(sampler, processes, epoch=0):
    samplers = [SampleShare(sampler, processes, rank) for rank in range(processes)]
    found = []
    for one in samplers:
        one.set_epoch(epoch)
        found.append(list(one))
        assert len(one) == len(found[-1])
    return found


@pytest.mark.parametrize("count", [0, 2, 7])
def test_each_sample_is_one_process_s(count):
    found = shares(SequentialSampler(range(count)), 3)
    assert found == [list(range(rank, count, 3)) for rank in range(3)]


def test_all_ranks_divide_the_same_order():
    sampler = RandomSampler(range(7))
    first = list(SampleShare(sampler, 2, 0))
    torch.rand(3)
    assert sorted(first + list(SampleShare(sampler, 2, 1))) == list(range(7))
    assert shares(sampler, 2) == shares(sampler, 2)
    assert shares(sampler, 2, epoch=0) != shares(sampler, 2, epoch=1)


class Everywhere(Sampler):
    """Draws from all of a process's generators, and asks for the epoch."""

    def __init__(self):
        self.epoch = -1

    def __len__(self):
        return 3

    def __iter__(self):
        return iter([random.randrange(10**6), int(np.random.randint(10**6)), int(torch.randint(10**6, ()))])

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_generators_of_the_process_are_restored():
    sampler = Everywhere()
    expected = shares(sampler, 3, epoch=2)
    assert sampler.epoch == 2
    states = random_states.capture()
    assert shares(sampler, 3, epoch=2) == expected
    assert random_states.capture() == states
    assert [list(SampleShare(sampler, 3, 0, seed=9))] != [expected[0]]


def test_sampler_without_a_length_is_refused():
    class Endless(Sampler):
        def __iter__(self):
            return iter(range(9))

    with pytest.raises(ConfigurationError, match=r"Endless without a length.*use_distributed_sampler=False"):
        SampleShare(Endless(), 2, 0)
