"""An optimizer step has the same samples with any number of ranks: compared to torch's samplers without processes.

Resumed runs of real ranks are in ``tests/distributed/test_elastic.py``.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import islice

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from trainer.data.elastic_sampling import ElasticSampler, SampleOrder, not_ordered
from trainer.data.resumable import MapStyleLoader
from trainer.state import random_states


@dataclass(frozen=True)
class Layout:
    """The division of samples in a run."""

    processes: int
    batch_size: int
    accumulate: int

    @property
    def together(self):
        return self.processes * self.batch_size


@dataclass(frozen=True)
class Data:
    """The dataset."""

    samples: int
    shuffle: bool
    drop_last: bool
    own_generator: bool = False


def loaders_of(data, layout):
    """Return the dataloader of each rank, as built by a user and Lightning."""
    dataset, made = range(data.samples), []
    for rank in range(layout.processes):
        generator = torch.Generator().manual_seed(3) if data.own_generator else None
        sampler = RandomSampler(dataset, generator=generator) if data.shuffle else SequentialSampler(dataset)
        if layout.processes > 1:
            sampler = DistributedSampler(dataset, layout.processes, rank, shuffle=data.shuffle, seed=5)
        made.append(
            DataLoader(dataset, layout.batch_size, sampler=sampler, drop_last=data.drop_last, generator=generator)
        )
    return made


def ordered(data, layout, order):
    """Return the dataloader of each rank of a resumed run."""
    made = []
    for rank in range(layout.processes):
        (own,) = loaders_of(data, Layout(1, layout.batch_size, 1))
        sampler = ElasticSampler(
            order, own.sampler, own.dataset, layout.processes, rank, layout.batch_size, lambda state: state
        )
        made.append(DataLoader(own.dataset, layout.batch_size, sampler=sampler, generator=own.generator))
    return made


def order_of(data, layout):
    return SampleOrder.of(loaders_of(data, layout)[0], layout.accumulate, layout.processes)


class Run:
    """The ranks of a run in one process; each draws the random numbers of the first one."""

    def __init__(self, loaders, layout):
        self.loaders, self.layout = [MapStyleLoader(loader) for loader in loaders], layout

    def updates(self, epoch, batches=0, start=0):
        """Return the remaining optimizer steps of an epoch, with the same number of batches on each rank.

        Args:
            epoch: the epoch.
            batches: number of batches to stop after; 0 for all.
            start: number of batches already trained.
        """
        passes, before, after = [], random_states.capture(), {}
        for loader in self.loaders:
            random_states.restore(before)
            if hasattr(loader.loader.sampler, "set_epoch"):
                loader.loader.sampler.set_epoch(epoch)
            passes.append([batch.tolist() for batch in islice(loader, batches or len(loader) - start)])
            after = after or random_states.capture()
        random_states.restore(after)
        assert len({len(batches) for batches in passes}) == 1, "each process has as many batches"
        for first in range(0, len(passes[0]), self.layout.accumulate):
            update = []
            for loader, own in zip(self.loaders, passes, strict=True):
                for number, batch in enumerate(own[first : first + self.layout.accumulate], start + first):
                    sampler = loader.loader.sampler
                    weight = sampler.weight_of(number) if isinstance(sampler, ElasticSampler) else None
                    update.append((batch, 1.0 if weight is None else weight))
            total = sum(weight for _, weight in update)
            yield [(index, w / total / len(batch)) for batch, w in update if w for index in batch]


def counted(updates):
    return [Counter(index for index, _ in update) for update in updates]


def layouts(size):
    """Draw layouts with ``size`` samples per optimizer step."""
    divisors = [one for one in range(1, size + 1) if size % one == 0]
    pairs = [(p, b) for p in divisors for b in divisors if p <= 5 and size % (p * b) == 0]
    return st.sampled_from([Layout(p, b, size // (p * b)) for p, b in pairs])


@st.composite
def changes(draw):
    """Draw data, the layouts of successive runs, the steps after which each was interrupted, and the step's size."""
    size = draw(st.sampled_from([1, 2, 4, 6, 8, 12]))
    data = Data(draw(st.integers(1, 60)), draw(st.booleans()), draw(st.booleans()), draw(st.booleans()))
    chain = draw(st.lists(layouts(size), min_size=2, max_size=4))
    return data, chain, draw(st.lists(st.integers(0, 9), min_size=3, max_size=3)), size


def whole_run(data, layout, epochs):
    torch.manual_seed(11)
    run = Run(loaders_of(data, layout), layout)
    return [list(run.updates(epoch)) for epoch in range(epochs)]


@settings(deadline=None, max_examples=60)
@given(changes())
def test_each_update_gets_the_samples_that_it_would_have_got(change):
    data, chain, stops, size = change
    whole = whole_run(data, chain[0], 3)
    if not whole[0]:  # drop_last, and too few
        return
    torch.manual_seed(11)
    loaders = loaders_of(data, chain[0])
    order = order_of(data, chain[0])
    run, done, seen = Run(loaders, chain[0]), 0, []
    for layout, more in zip(chain[1:], stops, strict=False):
        full = sum(len(update) == size for update in whole[0])
        stop = min(done + more, full - (full == len(whole[0])))  # inside the epoch
        if stop <= done:
            continue
        batches = (stop - done) * run.layout.accumulate
        seen += run.updates(0, batches, done * run.layout.accumulate)
        done = stop
        states, here = [loader.state_dict() for loader in run.loaders], random_states.capture()
        for state in states:
            state["batches"] = done * run.layout.accumulate
        run = Run(ordered(data, layout, order), layout)
        for loader in run.loaders:
            loader.loader.sampler.set_epoch(0)
            trained = done * layout.accumulate
            assert loader.load_state_dict(loader.convert_state(states[0], trained, here)) == []
        random_states.restore(here)
        note(f"after {done} updates on {layout}")
    seen += run.updates(0, 0, done * run.layout.accumulate)
    found = [seen, *(list(run.updates(epoch)) for epoch in (1, 2))]
    for mine, theirs in zip(found, whole, strict=True):
        assert counted(mine) == counted(theirs)
    if isinstance(run.loaders[0].loader.sampler, ElasticSampler):
        for update in found[1] + found[2]:
            assert [share for _, share in update] == pytest.approx([1 / len(update)] * len(update))


def test_samples_of_a_short_last_step_have_the_same_weight():
    data, layout = Data(14, False, False), Layout(1, 4, 2)  # the last step has batches of 4 and 2
    (loader,) = ordered(data, layout, order_of(data, Layout(1, 8, 1)))
    weights = [loader.sampler.weight_of(number) for number in range(4)]
    assert weights == [None, None, pytest.approx(4 / 3), pytest.approx(2 / 3)]


def test_rank_without_a_sample_of_the_last_step_repeats_one_with_weight_zero():
    data, first, second = Data(14, False, False), Layout(2, 6, 1), Layout(3, 4, 1)
    loaders = ordered(data, second, order_of(data, first))
    assert [[batch.tolist() for batch in loader][-1] for loader in loaders] == [[12], [13], [13]]
    assert [loader.sampler.weight_of(1) for loader in loaders] == [1.5, 1.5, 0.0]
    assert [loader.sampler.weight_of(0) for loader in loaders] == [None] * 3


def test_other_number_of_samples_is_noticed():
    data, first, second = Data(40, True, False), Layout(1, 4, 1), Layout(2, 2, 1)
    run = Run(loaders_of(data, first), first)
    list(run.updates(0, 3))
    (state,) = (loader.state_dict() for loader in run.loaders)
    state["set_up"]["samples"] = 41
    loader = MapStyleLoader(ordered(data, second, order_of(data, first))[0])
    found = loader.load_state_dict(loader.convert_state(state, 3, random_states.capture()))
    assert any("of samples was 41 and is 40" in one for one in found)


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        ([1, 2], "a list, not a DataLoader"),
        (DataLoader(range(4), batch_size=None), "makes no batches"),
        (DataLoader(range(4), sampler=[3, 1]), "the DataLoader's sampler is a list"),
        (
            DataLoader(range(4), batch_sampler=type("Own", (BatchSampler,), {})(range(4), 2, False)),
            "the DataLoader's batch sampler is a Own",
        ),
    ],
)
def test_unsupported_divisions(loader, reason):
    assert reason in str(not_ordered(loader))
    assert reason in str(SampleOrder.of(loader, 1, 1))
    loader = DataLoader(range(8), shuffle=True)
    assert SampleOrder.of(loader, 1, 2) == "each of 2 processes has a RandomSampler over all samples"
