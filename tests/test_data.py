from __future__ import annotations

import pytest
import torch

from trainer.data import TrainingBatches, Transfer

CPU, META = torch.device("cpu"), torch.device("meta")


class Counted:
    """Loaders whose source counts how many batches were drawn."""

    is_sequential = goes_on = False

    def __init__(self, length, *, limit=None, known=True, single=True):
        self.length, self.limit, self.has_length, self.single = length, limit, known, single
        self.drawn, self.epochs = 0, []

    def num_batches(self):
        known = self.length if self.has_length else float("inf")
        return known if self.limit is None else min(self.limit, known)

    def start_epoch(self, epoch):
        self.epochs.append(epoch)

    def draw(self):
        for i in range(self.length):
            self.drawn += 1
            yield f"batch {i}"

    def only(self):
        return self.draw() if self.single else None

    def batches(self):
        return ((batch, i, 0) for i, batch in enumerate(self.draw()))


def numbered(*indices, last):
    return [(f"batch {i}", i, i == last) for i in indices]


@pytest.mark.parametrize("single", [True, False])
def test_a_pass_over_batches_of_known_number(single):
    loaders = Counted(3, single=single)
    batches = TrainingBatches(loaders)
    assert batches
    assert (batches.num_batches, batches.has_length) == (3, True)
    batches.start_epoch(7, skip=0)
    assert list(batches) == numbered(0, 1, 2, last=2)
    assert loaders.epochs == [7]


def test_a_limit_draws_no_batch_too_many():
    loaders = Counted(5, limit=2)
    batches = TrainingBatches(loaders)
    batches.start_epoch(0, skip=0)
    assert list(batches) == numbered(0, 1, last=1)
    assert loaders.drawn == 2


@pytest.mark.parametrize("known", [True, False])
def test_skipped_batches_are_drawn_and_dropped(known):
    loaders = Counted(4, known=known)
    batches = TrainingBatches(loaders)
    batches.start_epoch(0, skip=2)
    assert list(batches) == numbered(2, 3, last=3)
    assert loaders.drawn == 4


def test_batches_are_drawn_one_by_one_where_their_number_is_known():
    """Drawing one ahead would change the order of random numbers against a plain loop."""
    loaders = Counted(3)
    batches = TrainingBatches(loaders)
    batches.start_epoch(0, skip=0)
    iterator = iter(batches)
    for drawn in (1, 2, 3):
        next(iterator)
        assert loaders.drawn == drawn


@pytest.mark.parametrize("length", [1, 2, 5])
def test_the_last_of_an_unknown_number_is_known_by_looking_one_ahead(length):
    loaders = Counted(length, known=False)
    batches = TrainingBatches(loaders)
    assert batches.num_batches == float("inf")
    batches.start_epoch(0, skip=0)
    iterator = iter(batches)
    for i in range(length):
        assert next(iterator) == (f"batch {i}", i, i == length - 1)
        assert loaders.drawn == min(i + 2, length)
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.parametrize(("limit", "last"), [(2, 1), (3, 2), (10, 2)])
def test_a_limit_on_an_unknown_number(limit, last):
    batches = TrainingBatches(Counted(3, known=False, limit=limit))
    assert batches.num_batches == limit
    batches.start_epoch(0, skip=0)
    assert list(batches) == numbered(*range(last + 1), last=last)


def test_nothing_to_train_on():
    assert not TrainingBatches(None)
    assert not TrainingBatches(Counted(3, limit=0))
    empty = TrainingBatches(Counted(0, known=False))
    empty.start_epoch(0, skip=0)
    assert list(empty) == []


def unmoved(batch, device):
    raise AssertionError(f"{batch} was on the device already")


def test_what_is_on_the_device_already_is_not_moved():
    transfer, tensor = Transfer(CPU, lambda batch: batch, unmoved), torch.ones(1)
    for batch in (tensor, [tensor, tensor], (tensor,)):
        assert transfer(batch) is batch


@pytest.mark.parametrize(
    "batch",
    [torch.ones(1), [torch.ones(1)], {"x": torch.ones(1)}, [torch.ones(1), "text"], [[torch.ones(1)]], "text"],
)
def test_everything_else_is_moved(batch):
    moved = []
    transfer = Transfer(META, lambda batch: batch, lambda *args: moved.append(args) or "moved")
    assert transfer(batch) == "moved"
    assert moved == [(batch, META)]


def test_the_users_hooks_and_their_order():
    calls = []

    def note(name, result):
        def hook(*args):
            calls.append((name, *args))
            return result

        return hook

    transfer = Transfer(
        META,
        note("convert", "converted"),
        note("move", "moved"),
        note("before", "prepared"),
        note("transfer", "transferred"),
        note("after", "done"),
    )
    assert transfer("batch", 3) == "done"
    assert calls == [
        ("convert", "batch"),
        ("before", "converted", 3),
        ("transfer", "prepared", META, 3),
        ("after", "transferred", 3),
    ]
