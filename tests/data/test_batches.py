from __future__ import annotations

from collections import deque
from itertools import islice

import pytest
import torch

from trainer.data.batches import LookAhead, TrainingBatches, Transfer

CPU, META = torch.device("cpu"), torch.device("meta")


class Counted:
    """Loaders with a source that counts its batches; those without a length fetch one batch ahead."""

    is_sequential = False

    def __init__(self, length, *, limit=None, known=True, made_in=0):
        self.length, self.limit, self.has_length, self.made_in = length, limit, known, made_in
        self.drawn, self.begins_at, self.epochs, self.opened = 0, 0, [], 0
        self.reasons, self.loaded = [], []

    def num_batches(self):
        known = self.length if self.has_length else float("inf")
        return known if self.limit is None else min(self.limit, known)

    def first_empty(self):
        return "`train_dataloader`"

    def start_epoch(self, epoch):
        self.epochs.append(epoch)

    def open(self):
        self.opened += 1
        self.begins_at = 0

    def source(self):
        for i in range(self.begins_at, self.length):
            self.drawn += 1
            yield f"batch {i}"

    def __iter__(self):
        left = self.num_batches() - self.begins_at
        source = islice(self.source(), None if left == float("inf") else left)
        self.look_ahead = source if self.has_length else LookAhead(source, eager=False)
        return self.look_ahead

    @property
    def is_exhausted(self):
        return self.look_ahead.is_exhausted

    def state_dict(self):
        return {"loaders": [self.drawn]}

    def load_state_dict(self, state):
        torch.rand(3)
        self.loaded.append(state)
        self.begins_at = 0 if state["is_over"] else state["batches"]
        return self.reasons


def numbered(*indices, last):
    return [(f"batch {i}", i, i == last) for i in indices]


@pytest.mark.parametrize("known", [True, False])
def test_limit_draws_no_batch_too_many(known):
    loaders = Counted(5, limit=2, known=known)
    batches = TrainingBatches(loaders)
    assert (batches.num_batches, batches.has_length) == (2, known)
    batches.start_epoch(0, skip=0)
    assert list(batches) == numbered(0, 1, last=1)
    assert (loaders.drawn, loaders.epochs) == (2, [0])
    batches = TrainingBatches(Counted(4, known=known, limit=10))
    batches.start_epoch(0, skip=2)
    assert batches.state_dict()["batches"] == 2
    assert list(batches) == numbered(2, 3, last=3)


@pytest.mark.parametrize("known", [True, False])
def test_last_of_an_unknown_number_is_known_by_looking_one_ahead(known):
    """If the number is known, this would change the order of random numbers relative to a plain loop."""
    loaders = Counted(3, known=known)
    batches = TrainingBatches(loaders)
    batches.start_epoch(0, skip=0)
    iterator = iter(batches)
    for i in range(3):
        assert next(iterator) == (f"batch {i}", i, i == 2)
        assert loaders.drawn == min(i + 2 - known, 3)
    with pytest.raises(StopIteration):
        next(iterator)


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


def after(count):
    """Return the batches of epoch 3 after the first ``count``."""
    batches = TrainingBatches(Counted(5))
    batches.start_epoch(3, 0)
    deque(islice(batches, count), maxlen=0)
    return batches


def test_states_of_replaced_dataloaders_are_not_used():
    batches = TrainingBatches(loaders := Counted(2, made_in=4))
    batches.load_state_dict(after(5).state_dict())
    batches.start_epoch(4, skip=0)
    assert loaders.loaded == []
    renewed = Counted(2, made_in=4)
    batches = TrainingBatches(Counted(2), lambda: renewed)
    batches.load_state_dict(after(5).state_dict())
    batches.start_epoch(4, skip=0)
    assert renewed.loaded == []


def test_rest_of_a_pass_can_be_skipped():
    batches = TrainingBatches(loaders := Counted(5))
    batches.load_state_dict(after(2).state_dict())
    batches.start_epoch(3, skip=2)
    batches.end()
    assert list(batches) == []
    assert [one["is_over"] for one in loaders.loaded] == [False, True]
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
