"""A pass over the data resumed in another process equals the uninterrupted pass bit for bit."""

import io
import random
import warnings
from functools import partial
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.data.drawn import Drawn
from trainer.data.batches import LoaderPlan, TrainingBatches
from trainer.data.resumable import resumable
from trainer.errors import ResumeError
from trainer.lightning.loaders import LoaderSet
from trainer.state import random_states

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:Resuming (inside|after) an epoch"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


def noise():
    """Return a random number of each generator."""
    return [random.random(), float(np.random.rand()), float(torch.rand((), dtype=torch.float64))]


COUNT = torch.zeros(1, dtype=torch.int64).share_memory_()
"""Number of samples loaded by all processes, outside of dataset attributes, which a resume restores."""


class Noisy(Dataset):
    """Randomly augmented samples with their index and their worker's seed."""

    def __init__(self, length=7):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        COUNT.add_(1)
        info = get_worker_info()
        return torch.tensor([index, *noise(), info.seed % 997 if info else 0], dtype=torch.float64)


class Carries(Noisy):
    """Has its own generators for augmentation."""

    def __init__(self):
        super().__init__()
        self.transforms = [np.random.default_rng(1), random.Random(2), torch.Generator().manual_seed(3)]
        self.transforms.append(np.random.RandomState(4))

    def __getitem__(self, index):
        numbers, python, tensors, old = self.transforms
        own = [numbers.random(), python.random(), torch.rand((), generator=tensors).item(), old.rand()]
        return torch.cat([super().__getitem__(index), torch.tensor(own)])


class Numbers(IterableDataset):
    """Yields ``numbers`` with random ones."""

    def __iter__(self):
        for number in self.numbers():
            yield torch.tensor([number, *noise()], dtype=torch.float64)

    def numbers(self):
        raise NotImplementedError


class Stream(Numbers):
    def __init__(self, length):
        self.length = length

    def numbers(self):
        return iter(range(self.length))


class Bookmarked(Stream):
    """Restores its position."""

    at = 0

    def numbers(self):
        while self.at < self.length:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


PLACES = WeakKeyDictionary()


class Hidden(Bookmarked):
    """Has its position in its state only, in no attribute."""

    at: Any = property(lambda self: PLACES.get(self, 0), lambda self, at: PLACES.update({self: at}))


class CountsPasses(Numbers):
    """Shuffles by its own count of passes."""

    def __init__(self):
        self.passes = 0

    def numbers(self):
        self.passes += 1
        return iter(order(self.passes, 6))


class CountsSamples(Noisy):
    """Yields samples that depend on the number of earlier samples."""

    def __init__(self):
        super().__init__()
        self.counts = {"samples": 0}

    def __getitem__(self, index):
        self.counts["samples"] += 1
        return torch.cat([super().__getitem__(index), torch.tensor([self.counts["samples"]])])


class Seven(Sampler):
    def __len__(self):
        return 7


class CountsEpochs(Seven):
    """Has no ``set_epoch``, and counts epochs itself."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        return iter(order(self.epoch, 7))


class CountsEpochsAfterwards(CountsEpochs):
    """Counts an epoch after its last sample."""

    def __iter__(self):
        yield from order(self.epoch, 7)
        self.epoch += 1


class CountingLoader(DataLoader):
    """Counts its passes."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return (batch * self.passes for batch in super().__iter__())


class Epochal(Noisy):
    """Yields samples that begin with the epoch."""

    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return torch.cat([torch.tensor([self.epoch]), super().__getitem__(index)])


class EpochalStream(Numbers):
    """Yields samples that begin with the epoch."""

    def set_epoch(self, epoch):
        self.epochs = [epoch] * 6

    def numbers(self):
        return iter(self.epochs)


class EagerlyShuffled(Seven):
    """Is its own iterator, which draws whenever it is iterated."""

    def __iter__(self):
        self.left = random.sample(range(7), 7)
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop()


class Restless(Seven):
    """Draws again for each sample."""

    def __iter__(self):
        return (random.randrange(7) for _ in range(7))


class NoLength(BatchSampler):
    __len__ = None


def seeded(seed=5):
    return torch.Generator().manual_seed(seed)


def order(seed, length):
    return torch.randperm(length, generator=seeded(seed)).tolist()


def batches_of(loaders, limit=inf):
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
    lengths = []
    for loader in combined.flattened:
        try:
            lengths.append(float(len(loader)))
        except TypeError:
            lengths.append(inf)
    return TrainingBatches(
        LoaderSet(combined, LoaderPlan([min(length, limit) for length in lengths], inf not in lengths))
    )


def step(epoch, batch_idx, batch):
    leaves = [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(batch)]
    return epoch, batch_idx, leaves, noise()


def seed_everything():
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def by_hand(make, epochs, limit=inf):
    """Run a plain loop."""
    seed_everything()
    loader, steps = make(), []
    for epoch in range(epochs):
        for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        for batch_idx, batch in enumerate(loader):
            steps.append(step(epoch, batch_idx, batch))
            if batch_idx + 1 == limit:
                break
    return steps


def saved(batches, epoch, trained):
    file = io.BytesIO()
    torch.save([epoch, trained, batches.state_dict(), random_states.capture()], file)
    return file.getvalue()


def trained(make, epochs, limit=inf):
    """Train without interruption. Returns the steps, and the checkpoints after each step and between epochs."""
    seed_everything()
    batches, steps, checkpoints = batches_of(make(), limit), [], []
    for epoch in range(epochs):
        batches.start_epoch(epoch, 0)
        for batch, batch_idx, _ in batches:
            steps.append(step(epoch, batch_idx, batch))
            checkpoints.append((len(steps), saved(batches, epoch, batch_idx + 1)))
        checkpoints.append((len(steps), saved(batches, epoch + 1, 0)))
    batches.loaders.close()
    return steps, checkpoints


def resumed(loaders, checkpoint, epochs, limit=inf, **exact):
    """Resume from a checkpoint in a new process."""
    first, trained, state, random_state = torch.load(io.BytesIO(checkpoint), weights_only=True)
    batches, steps = batches_of(loaders, limit), []
    batches.load_state_dict(state, **exact)
    random_states.restore(random_state)
    for epoch in range(first, epochs):
        batches.start_epoch(epoch, trained if epoch == first else 0)
        for batch, batch_idx, _ in batches:
            steps.append(step(epoch, batch_idx, batch))
    batches.loaders.close()
    return steps


def check(make, *, epochs=2, limit=inf, only=slice(None)):
    """Compare the steps after each checkpoint with those of the uninterrupted run."""
    steps, checkpoints = trained(make, epochs, limit)
    assert len(steps) > epochs
    for number, checkpoint in checkpoints[only]:
        assert resumed(make(), checkpoint, epochs, limit) == steps[number:]
    return steps


SAMPLED = {
    "shuffled": lambda **how: DataLoader(Noisy(), 2, shuffle=True, **how),
    "unbatched": lambda **how: DataLoader(Noisy(5), None, shuffle=True, **how),
    "own generator": lambda **how: DataLoader(Noisy(), 2, shuffle=True, generator=seeded(), **how),
    "full batches": lambda **how: DataLoader(Noisy(6), 2, shuffle=True, generator=seeded(), **how),
    "counting sampler": lambda **how: DataLoader(Noisy(), None, sampler=CountsEpochsAfterwards(), **how),
    "with replacement": lambda **how: DataLoader(
        Noisy(), 8, sampler=RandomSampler(range(7), True, 40, generator=seeded()), **how
    ),
    "batch sampler": lambda **how: DataLoader(
        Noisy(), batch_sampler=BatchSampler(RandomSampler(range(7)), 2, True), **how
    ),
    "eager sampler": lambda **how: DataLoader(Noisy(), None, sampler=EagerlyShuffled(), **how),
    "distributed": lambda **how: DataLoader(Noisy(9), 2, sampler=DistributedSampler(range(9), 2, 1, seed=4), **how),
    "own augmentation": lambda **how: DataLoader(Carries(), 2, shuffle=True, **how),
    "stateful": lambda **how: StatefulDataLoader(Noisy(), 2, shuffle=True, generator=seeded(), **how),
}


@pytest.mark.parametrize(("kind", "limit"), [*((kind, inf) for kind in SAMPLED), ("own generator", 3)])
def test_map_style_loader(kind, limit):
    assert check(SAMPLED[kind], epochs=3, limit=limit) == by_hand(SAMPLED[kind], 3, limit)


@pytest.mark.parametrize("kind", ["unbatched", "eager sampler", "own augmentation"])
def test_workers_and_samplers(kind):
    make = lambda: SAMPLED[kind](num_workers=1, in_order=kind == "unbatched")  # noqa: E731  # has no effect on one
    assert check(make, only=slice(1, 4, 2)) == by_hand(make, 2)


@pytest.mark.whole
@pytest.mark.usefixtures("spawn_is_warm")
def test_workers_that_are_spawned():
    make = lambda: DataLoader(Drawn(), 2, shuffle=True, num_workers=1, multiprocessing_context="spawn")  # noqa: E731
    check(make, epochs=1, only=slice(1, 2))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("kind", "limit", "stay"), [("eager sampler", inf, True), ("shuffled", 3, True), ("shuffled", inf, False)]
)
def test_persistent_workers_keep_their_random_states_between_epochs(kind, limit, stay):
    """Includes numbers drawn for batches beyond a limit."""
    make = partial(SAMPLED[kind], num_workers=2, persistent_workers=stay, prefetch_factor=1)
    assert check(make, epochs=3, limit=limit, only=slice(2, 12, 5)) == by_hand(make, 3, limit)


# --- several, unknown length, own state ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_several_loaders(mode):
    def make():
        generator = seeded()
        generators = {4: None, 9: generator, 6: generator}
        return CombinedLoader([shuffled(Noisy(n), generator=own) for n, own in generators.items()], mode)

    check(make, epochs=3)


UNSIZED = {
    "iterable": lambda: DataLoader(Stream(7), 2),
    "batch sampler": lambda: DataLoader(Noisy(), batch_sampler=NoLength(RandomSampler(range(7)), 2, False)),
    "several": lambda: [DataLoader(Stream(7), 2), DataLoader(Stream(3), 2), DataLoader(Noisy(5), 2, shuffle=True)],
    "own state": lambda: StatefulDataLoader(Hidden(7), 2),
    "own place": lambda: Bookmarked(5),
}


@pytest.mark.parametrize("limit", [inf, 2])
@pytest.mark.parametrize("kind", UNSIZED)
def test_loaders_without_a_length_are_read_one_ahead(kind, limit):
    check(UNSIZED[kind], epochs=3, limit=limit)


@pytest.mark.parametrize(
    "make",
    [
        lambda: StatefulDataLoader(Noisy(), 2, shuffle=True, num_workers=2),
        lambda: StatefulDataLoader(Bookmarked(4), 2, num_workers=2),
        lambda: DataLoader(Stream(8), 2, num_workers=2),
    ],
)
def test_workers_of_other_loaders(make):
    check(make, only=slice(2, 3))  # the next batch is not that of the first worker


FIXED = TensorDataset(torch.arange(8))
STAY = {"num_workers": 2, "persistent_workers": True}


def test_persistent_workers_continue_in_every_epoch():
    """With their random states and the attributes of their datasets."""
    make = lambda: DataLoader(CountsSamples(), 2, shuffle=True, **STAY)  # noqa: E731
    steps, checkpoints = trained(make, 3, 2)
    number, checkpoint = checkpoints[2]  # between the first two epochs
    assert resumed(make(), checkpoint, 3, 2) == steps[number:]


class Constant(Numbers):
    """Yields the same numbers in each pass, without random ones."""

    def __iter__(self):
        return iter([1, 2, 3, 4])


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Constant(), 1, **STAY),
        lambda: StatefulDataLoader(TensorDataset(torch.arange(7)), 2, sampler=RandomSampler(range(7)), **STAY),
    ],
)
def test_persistent_workers_that_never_change_continue_between_epochs(make):
    check(make, only=slice(4, 5))


class EndsLate(Constant):
    """Changes after its last sample."""

    first = 1

    def __iter__(self):
        yield from range(self.first, 5)
        self.first += 1


@pytest.mark.parametrize(
    ("make", "at"),
    [
        (lambda: DataLoader(Stream(4), 1, num_workers=1, persistent_workers=True), -2),
        (lambda: DataLoader(EndsLate(), 1, num_workers=1, persistent_workers=True), 4),
        (lambda: StatefulDataLoader(Noisy(), 2, num_workers=1, persistent_workers=True), 4),
        (lambda: StatefulDataLoader(FIXED, 2, num_workers=1, persistent_workers=True), 6),
    ],
)
def test_states_of_persistent_workers_that_are_not_saved_are_refused(make, at):
    checkpoint = trained(make, 2)[1][at][1]
    with pytest.raises(ResumeError, match=r"persistent.*use persistent_workers=False.*exact_resume"):
        resumed(make(), checkpoint, 2)
    with pytest.warns(UserWarning, match="use persistent_workers=False"):
        resumed(make(), checkpoint, 2, exact=False)


class Streamed(IterableDataset):
    """Shuffles by the epoch, and has a state that needs arguments, as litdata's ``StreamingDataset``."""

    epoch = skipped = 0

    def __len__(self):
        return 6

    def __iter__(self):
        return iter(order(self.epoch, 6)[self.skipped :])

    def state_dict(self, num_samples_yielded):
        return {"epoch": self.epoch, "skipped": num_samples_yielded}

    def load_state_dict(self, state):
        self.epoch, self.skipped = state.values()


class StreamedLoader(DataLoader):
    """Counts its passes and samples, and is iterated by a generator, as litdata's ``StreamingDataLoader``."""

    restores, yielded = False, 0

    def __iter__(self):
        if not self.restores:
            self.yielded = self.dataset.skipped = 0
            self.dataset.epoch += 1
        for batch in super().__iter__():
            self.yielded += len(batch)
            yield batch
        self.restores = False

    def state_dict(self):
        return {"dataset": self.dataset.state_dict(self.yielded)}

    def load_state_dict(self, state):
        self.dataset.load_state_dict(state["dataset"])
        self.yielded, self.restores = self.dataset.skipped, True


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_with_a_state_and_a_generator(workers):
    check(lambda: StreamedLoader(Streamed(), 2, num_workers=workers), epochs=3)


class Grain:
    """Has a position in its iterators only, as a ``DataLoader`` of grain."""

    def __iter__(self):
        return GrainIterator()


class GrainIterator:
    at = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == 5:
            raise StopIteration
        COUNT.add_(1)
        self.at += 1
        return torch.tensor(self.at)

    def get_state(self):
        return str(self.at).encode()

    def set_state(self, state):
        self.at = int(state)


def test_iterator_with_a_state():
    check(Grain)
    _, checkpoints = trained(Grain, 1)
    COUNT.zero_()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Resuming inside")  # nothing is loaded again
        assert [batch_idx for _, batch_idx, *_ in resumed(Grain(), checkpoints[3][1], 1)] == [4]
    assert COUNT == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Noisy(), batch_sampler=BatchSampler(CountsEpochs(), 2, False)),
        lambda: DataLoader(CountsSamples(), 2, shuffle=True),
        lambda: DataLoader(CountsSamples(), 2, shuffle=True, num_workers=1),
        lambda: DataLoader(CountsPasses(), 2),
        lambda: StatefulDataLoader(CountsPasses(), 2),
        lambda: CountingLoader(Noisy(), 2, shuffle=True),
    ],
)
def test_attributes_that_change(make):
    every = 4 * (1 + make().num_workers)  # starting workers takes long
    check(make, epochs=3, only=slice(0, None, every))
    if not isinstance(make().dataset, IterableDataset):
        check(make, epochs=3, limit=2, only=slice(1, None, every))


class Changes(Noisy):
    """Creates a generator at the first sample, and replaces one in each epoch."""

    def __init__(self):
        super().__init__()
        self.late = None
        self.of_the_epoch = np.random.default_rng(0)

    def set_epoch(self, epoch):
        self.of_the_epoch = np.random.default_rng(epoch)

    def __getitem__(self, index):
        if self.late is None:
            self.late = random.Random(1)
        own = [self.late.random(), self.of_the_epoch.random()]
        return torch.cat([super().__getitem__(index), torch.tensor(own, dtype=torch.float64)])


@pytest.mark.parametrize("how", [{}, {"num_workers": 1}, STAY])
def test_generators_that_are_created_or_replaced(how):
    check(lambda: DataLoader(Changes(), 2, shuffle=True, **how), epochs=3, only=slice(1, None, 5))


class Begins(Bookmarked):
    """Starts at the position set by ``load_state_dict`` once."""

    start = 0

    def __len__(self):
        return self.length

    def numbers(self):
        first, self.start = self.start, 0
        for number in range(first, self.length):
            self.at = number + 1
            yield number
        self.at = 0

    def load_state_dict(self, state):
        self.start = state["at"]


class BeginsSampler(Begins):
    __iter__ = Begins.numbers


@pytest.mark.parametrize(
    "make",
    [
        lambda: Begins(6),
        lambda: StatefulDataLoader(Begins(6), 2),
        lambda: StatefulDataLoader(Begins(6), 2, num_workers=1),
        lambda: StatefulDataLoader(Noisy(6), 2, sampler=BeginsSampler(6)),
    ],
)
def test_attributes_that_load_state_dict_sets_for_the_next_pass_are_kept(make):
    check(make)


def test_sampler_iterated_too_often_by_a_stateful_dataloader_is_refused_inside_an_epoch():
    make = lambda: StatefulDataLoader(Noisy(), 2, sampler=CountsEpochs())  # noqa: E731
    _, checkpoints = trained(make, 1)
    with pytest.raises(ResumeError, match="the sampler changes whenever it is iterated"):
        resumed(make(), checkpoints[1][1], 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Epochal(), 2, shuffle=True),
        lambda: DataLoader(Subset(Epochal(), range(6)), 2, num_workers=1),
        lambda: DataLoader(Epochal(), 2, shuffle=True, **STAY),
        lambda: DataLoader(EpochalStream(), 2),
        lambda: DataLoader(EpochalStream(), 2, num_workers=1),
    ],
)
def test_epochs_reach_datasets_in_workers_and_after_a_resume(make):
    steps, checkpoints = trained(make, 3)
    assert [rows[0][0] for _, _, (rows,), _ in steps] == [epoch for epoch, *_ in steps]
    for number, checkpoint in checkpoints[3::4]:
        assert resumed(make(), checkpoint, 3) == steps[number:]


def test_reading_the_state_before_a_pass_starts_no_workers():
    """Lightning reads states for its part of a checkpoint; workers started then would not send their random states."""
    make = lambda: StatefulDataLoader(Noisy(), 2, shuffle=True, num_workers=2)  # noqa: E731
    steps, checkpoints = trained(make, 2)
    number, checkpoint = checkpoints[len(steps) // 2 - 1]  # of the last batch of the first epoch
    state = torch.load(io.BytesIO(checkpoint), weights_only=True)[2]
    assert state["is_over"]
    loader = make()
    batches = batches_of(loader)
    batches.start_epoch(0, 0)
    assert batches.loaders.loader_states() == []
    batches.load_state_dict(state)
    batches.start_epoch(1, 0)
    assert batches.loaders.loader_states() == [state["loaders"][0]["state"]]
    assert loader._iterator is None
    assert [step(1, batch_idx, batch)[:2] for batch, batch_idx, _ in batches] == [one[:2] for one in steps[number:]]


# --- skipped samples, unchanged and unpicklable objects
# ----------------------------------------------------------------


def test_samples_that_are_skipped_are_not_loaded_in_workers():
    make = lambda: DataLoader(Noisy(8), 2, shuffle=True, num_workers=1)  # noqa: E731
    _, checkpoints = trained(make, 1)
    COUNT.zero_()
    resumed(make(), checkpoints[2][1], 1)
    assert COUNT == 2


def test_iteration_of_a_loader_with_persistent_workers_yields_plain_batches():
    loader = DataLoader(TensorDataset(torch.arange(4)), 2, num_workers=1, persistent_workers=True, worker_init_fn=int)
    before = vars(loader) | {"_iterator": None}
    place = resumable(loader)
    list(place)
    assert vars(loader) | {"_iterator": None} == before
    assert [batch[0].tolist() for batch in loader] == [[0, 1], [2, 3]]
    del place
    assert [batch[0].tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_persistent_workers_started_by_the_user_are_not_used():
    def make():
        loader = SAMPLED["shuffled"](num_workers=1, persistent_workers=True)
        list(loader)
        return loader

    check(make, epochs=1, only=slice(1, 2))


@pytest.mark.parametrize("workers", [0, 1])
def test_without_a_position_samples_are_skipped_all_the_same(workers):
    loader = DataLoader(Noisy(), 2, num_workers=workers)
    batches = batches_of(loader)
    COUNT.zero_()
    with warnings.catch_warnings(action="error"):  # its order is fixed
        batches.start_epoch(0, skip=2)
    assert [(i, batch[:, 0].tolist()) for batch, i, _ in batches] == [(2, [4, 5]), (3, [6])]
    assert COUNT == 3


# --- errors -----------------------------------------------------------------------------------------------------------


def shuffled(dataset=None, **how):
    return DataLoader(Noisy() if dataset is None else dataset, **{"batch_size": 2, "shuffle": True, **how})


def sampled(sampler, length=8):
    return DataLoader(list(range(length)), 2, sampler=sampler)


REFUSED = {
    "num_workers": (shuffled, lambda: shuffled(num_workers=1), "num_workers was 0 and is 1"),
    "batch_size": (shuffled, lambda: shuffled(batch_size=3), "batch_size was 2 and is 3; the last .* samples"),
    "drop_last": (shuffled, lambda: shuffled(drop_last=True), "drop_last was False and is True"),
    "samples": (shuffled, lambda: shuffled(Noisy(8)), "the number of samples was 7 and is 8"),
    "order": (shuffled, lambda: shuffled(shuffle=False), r"last .* had the samples \[.*this batch has \[2, 3\]"),
    "later order": (
        lambda: sampled(range(8)), lambda: sampled([0, 1, 3, 2, 4, 5]),
        r"the last trained batch .* \[2, 3\]; .*, but now this batch has \[3, 2\]",
    ),
    "world size": (
        shuffled, lambda: shuffled(shuffle=False, sampler=DistributedSampler(range(7), 2, 0)),
        "the world size was 1 and is 2",
    ),
    "kind": (shuffled, lambda: Bookmarked(9), "of another kind .* now a Bookmarked"),
    "number": (shuffled, lambda: [shuffled(), shuffled()], "the number of dataloaders was 1 and is 2"),
    "batch_size of a stream": (
        lambda: DataLoader(Bookmarked(8), 2), lambda: DataLoader(Bookmarked(8), 3), "batch_size was 2 and is 3"
    ),
    "generators": (SAMPLED["own augmentation"], SAMPLED["shuffled"], "Random, .*RandomState of the data had changed"),
    "attributes": (
        lambda: sampled(CountsEpochs()), lambda: sampled(order(1, 7)), "CountsEpochs of the data had changed"
    ),
    "lazy sampler": (
        lambda: sampled(Restless()), lambda: sampled(Restless()), "draws from the global random state"
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", REFUSED)
def test_inexact_loaders_are_refused_inside_an_epoch_only(change):
    first, make, reason = REFUSED[change]
    _, checkpoints = trained(first, 1)
    with pytest.raises(ResumeError, match=rf"after batch 2 of epoch 0 are not those .*: .*{reason}.*exact_resume"):
        resumed(make(), checkpoints[1][1], 1)
    with pytest.warns(UserWarning, match=reason):
        rest = resumed(make(), checkpoints[1][1], 1, exact=False)
    assert [batch_idx for _, batch_idx, *_ in rest][:1] == ([] if change == "world size" else [2])
    if first is shuffled:
        assert resumed(make(), checkpoints[-1][1], 2)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (1, 0)])
def test_another_number_of_workers_is_exact_if_they_draw_no_random_numbers(before, after):
    dataset = [torch.tensor(number) for number in range(8)]
    steps, checkpoints = trained(lambda: shuffled(dataset, num_workers=before), 2)
    number, checkpoint = checkpoints[1]
    assert resumed(shuffled(dataset, num_workers=after), checkpoint, 2) == steps[number:]


def test_checkpoint_from_inside_a_batch():
    def resumed_inside(dataset, number):
        make = lambda: shuffled(dataset, generator=seeded())  # noqa: E731
        _, checkpoints = trained(make, 2)
        epoch, done, state, random_state = torch.load(io.BytesIO(checkpoints[number][1]), weights_only=True)
        file = io.BytesIO()
        torch.save([epoch, done - 1, state, random_state], file)
        with pytest.warns(UserWarning, match=f"written inside a batch, batch_idx {number} of epoch 0"):
            return [batch for _, _, batch, _ in resumed(make(), file.getvalue(), 2)]

    expected = [batch for _, _, batch, _ in by_hand(lambda: shuffled(FIXED, generator=seeded()), 2)]
    assert resumed_inside(FIXED, 2) == expected[2:]
    assert resumed_inside(FIXED, 3)[0] == expected[3]
    assert len(resumed_inside(Noisy(), 2)) == 6


def test_workers_that_need_not_keep_the_order_are_refused():
    make = lambda: shuffled(Noisy(20), num_workers=2, in_order=False)  # noqa: E731
    _, checkpoints = trained(make, 1)
    with pytest.raises(ResumeError, match="in_order=False"):
        resumed(make(), checkpoints[2][1], 1)


class Blur:
    """A transform."""

    strength = 0


class Mosaic(Dataset):
    """Joins samples until ``mosaic`` is set to False."""

    def __init__(self):
        self.mosaic, self.blur, self.epoch = True, Blur(), 0
        self.level = torch.zeros(()).share_memory_()

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return index

    def close(self, what):
        if what == "attribute":
            self.mosaic = False
        elif what == "transform":
            self.blur.strength = 3
        else:
            self.level += 1  # workers see this


class Follows(Mosaic):
    """Follows the epoch, in the workers, too."""

    def set_epoch(self, epoch):
        self.epoch, self.mosaic = epoch, epoch < 1


@pytest.mark.parametrize("moment", ["between epochs", "before a pass"])
@pytest.mark.parametrize(("make", "what", "name"), [
    (Mosaic, "attribute", "Mosaic.mosaic"), (Mosaic, "transform", "Blur.strength"), (Mosaic, "shared memory", None),
    (Follows, "shared memory", None), (Follows, "transform", "Blur.strength"),
])  # fmt: skip
def test_changes_that_persistent_workers_never_see_are_named_once(make, moment, what, name):
    dataset = make()
    loaders = LoaderSet(
        CombinedLoader(DataLoader(dataset, None, num_workers=1, persistent_workers=True)), LoaderPlan([2], True)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(4):
            if epoch == 1 and moment == "between epochs":
                dataset.close(what)
            loaders.start_epoch(epoch)
            if epoch == 1 and moment == "before a pass":
                dataset.close(what)
            list(loaders)
    loaders.close()
    found = [str(one.message).partition(" changed")[0] for one in caught if "never see the change" in str(one.message)]
    assert found == ([] if name is None else [name])
