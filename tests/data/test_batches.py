from collections import deque
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader

from tests.data.test_resumable import Bookmarked, Noisy, Stream, batches_of
from trainer.data.batches import LookAhead, Origin, TrainingBatches, Transfer

CPU, META = torch.device("cpu"), torch.device("meta")


class Drawing(Stream):
    """Counts the drawn samples."""

    def __init__(self, length, known):
        super().__init__(length)
        self.known, self.drawn = known, 0

    def __len__(self):
        if not self.known:
            raise TypeError
        return self.length

    def numbers(self):
        for number in range(self.length):
            self.drawn += 1
            yield number


@pytest.mark.parametrize("known", [True, False])
def test_limit_draws_no_batch_too_many(known):
    stream = Drawing(5, known)
    batches = batches_of(DataLoader(stream, None), limit=2)
    assert (batches.num_batches, batches.loaders.plan.has_length) == (2, known)
    batches.start_epoch(0, skip=0)
    assert [(int(sample[0]), *more) for sample, *more in batches] == [(0, 0, False), (1, 1, True)]
    assert stream.drawn == 2


@pytest.mark.parametrize("known", [True, False])
def test_last_of_an_unknown_number_is_known_by_looking_one_ahead(known):
    """If the number is known, this would change the order of random numbers relative to a plain loop."""
    stream = Drawing(3, known)
    batches = batches_of(DataLoader(stream, None))
    batches.start_epoch(0, skip=0)
    seen = [(int(sample[0]), *more, stream.drawn) for sample, *more in batches]
    assert seen == [(i, i, i == 2, min(i + 2 - known, 3)) for i in range(3)]


@pytest.mark.parametrize("eager", [True, False])
def test_fetching_ahead_reports_the_time(eager):
    fetched = []
    ahead = LookAhead(iter("ab"), lambda: fetched.append(len(fetched)), eager=eager)
    assert len(fetched) == eager
    assert next(ahead) == "a"
    assert (len(fetched), ahead.is_exhausted) == (2, False)
    assert next(ahead) == "b"
    assert ahead.is_exhausted
    assert list(ahead) == []


# --- the state of a pass ------------------------------------------------------------------------------------------


def test_states_of_replaced_dataloaders_are_not_used():
    before = batches_of(Bookmarked(5))
    before.start_epoch(3, 0)
    next(iter(before))
    replaced, renewed = batches_of(Bookmarked(5)), batches_of(Bookmarked(5))
    replaced.loaders.origin = renewed.loaders.origin = Origin(4)
    renews = TrainingBatches(batches_of(Bookmarked(5)).loaders, lambda: renewed.loaders)
    for batches in (replaced, renews):
        batches.load_state_dict(before.state_dict())
        batches.start_epoch(4, skip=0)
        assert len(list(batches)) == 5


def test_rest_of_a_pass_can_be_skipped():
    before, batches = (batches_of(DataLoader(Noisy(5), None)) for _ in range(2))
    before.start_epoch(3, 0)
    deque(islice(before, 2), maxlen=0)
    batches.load_state_dict(before.state_dict())
    batches.start_epoch(3, skip=2)
    batches.end()
    assert list(batches) == []
    batches.start_epoch(4, skip=0)
    assert len(list(batches)) == 5


def unmoved(batch, device):
    raise AssertionError(f"{batch} was on the device already")


def test_batches_are_moved_unless_their_tensors_are_on_the_device():
    tensor, moved = torch.ones(1), []
    stays = Transfer(CPU, lambda batch: batch, unmoved)
    for batch in (tensor, [tensor, tensor], (tensor,)):
        assert stays(batch) is batch
    for device, batch in ((META, tensor), (META, [tensor]), (CPU, {"x": tensor}), (CPU, [tensor, "a"]), (CPU, "text")):
        transfer = Transfer(device, lambda batch: batch, lambda *args: moved.append(args) or "moved")
        assert transfer(batch) == "moved"
        assert moved.pop() == (batch, device)
