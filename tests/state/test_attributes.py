"""Attributes of datasets and samplers, stored as plain data and restored in another process."""

import io
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

from tests.state.test_generators import KINDS, draw
from tests.support import assert_identical, nested_tensor
from trainer.state.attributes import AttributeChanges, is_watched


class Thing(Dataset):
    def __init__(self):
        self.number = 1
        self.items = [1, 2]
        self.shared = self.items
        self.tensor = torch.zeros(2, dtype=torch.bfloat16)
        self.array = np.zeros((2, 2), dtype=np.float32)
        self.handle = None


def two(*things):
    """Return two things of a class, and the recorders of their attributes."""
    thing, other = things or (Thing(), Thing())
    return thing, other, AttributeChanges([thing]), AttributeChanges([other])


class Stored(Thing):
    def state_dict(self):
        return {"at": 7, "rest": torch.ones(2)}

    def load_state_dict(self, state):
        self.loaded = state


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("number", 2), ("number", None), ("number", "text"), ("number", (1, {"a": [2.5, {3}]})),
        ("number", np.float32(1.5)), ("items", [3]), ("new", 5), ("array", np.eye(2, dtype=np.float32)),
        ("tensor", torch.tensor([1.5, 2], dtype=torch.bfloat16)), ("tensor", torch.ones(3, dtype=torch.bool)),
        ("tensor", torch.tensor([1 + 2j]).conj()), ("tensor", torch.arange(3.0)[1::2]),
    ],
    ids=str,
)  # fmt: skip
def test_plain_values_are_restored(name, value):
    thing, other, watched, restored = two()
    setattr(thing, name, value)
    state = watched.read()
    assert [[kind, list(changes)] for kind, changes in state] == [["Thing", [name]]]
    restored.write(through_a_file(state))
    got = getattr(other, name)
    assert type(got) is type(value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        assert (got.dtype, got.tolist()) == (value.dtype, value.tolist())
    else:
        assert got == value
    assert other.shared == [1, 2]
    assert restored.read() == state


class Weighted(Sampler):
    def __init__(self):
        self.weights, self.losses = torch.zeros(100_000), dict.fromkeys(range(5000), 0.0)


def test_weights_of_samplers_may_be_large():
    sampler, other, watched, restored = two(Weighted(), Weighted())
    sampler.weights[70_000] = 1.5  # in place
    sampler.losses[4000] = 2.5
    restored.write(through_a_file(watched.read()))
    assert (other.weights[70_000].item(), other.weights.sum().item(), other.losses[4000]) == (1.5, 1.5, 2.5)


def test_containers_are_restored_in_place():
    thing, _, watched, _ = two()
    before = watched.read()
    assert before == [["Thing", {}]]
    thing.items.append(3)
    thing.tensor += 1
    after = watched.read()
    for state, items, tensor in ((before, [1, 2], [0, 0]), (after, [1, 2, 3], [1, 1])):
        watched.write(state)
        assert thing.items is thing.shared
        assert (thing.items, thing.tensor.tolist()) == (items, tensor)


@pytest.mark.parametrize(
    "value", [object(), iter([1]), [object()], list(range(1000)), torch.ones(10_000), nested_tensor()], ids=type
)
def test_other_values_are_not_restored(value):
    thing, other, watched, restored = two()
    thing.handle, thing.number = value, 2
    state = watched.read()
    assert AttributeChanges.lost(state) == ["Thing.handle"]
    restored.write(through_a_file(state))
    assert (other.handle, other.number) == (None, 2)


def test_attribute_that_was_another_kind_of_value_is_restored():
    thing = Thing()
    thing.handle = handle = object()
    watched = AttributeChanges([thing])
    before = watched.read()
    thing.handle = 3
    watched.write(before)
    assert thing.handle is handle


@pytest.mark.parametrize("kind", KINDS)
def test_generators_that_were_created_later_are_restored(kind):
    (thing, first), (other, second) = (Thing(), Thing()), (Thing(), Thing())
    make = KINDS[kind]
    thing.number, other.number = make(), make()  # saved elsewhere, until it is replaced
    watched, restored = AttributeChanges([thing, first]), AttributeChanges([other, second])
    draw(thing.number, 1)
    assert watched.read() == [["Thing", {}], ["Thing", {}]]
    thing.number = thing.handle = first.handle = make()
    draw(thing.number, 1)
    restored.write(through_a_file(watched.read()))
    assert other.number is other.handle is second.handle
    assert type(other.number) is type(thing.number)
    assert draw(other.number, 3) == draw(thing.number, 3)


def test_only_generators_of_holders_are_watched():
    thing, other = Thing(), Thing()
    thing.handle, other.handle = random.Random(1), random.Random(1)
    watched, restored = AttributeChanges([], [thing]), AttributeChanges([], [other])
    thing.handle, thing.number = random.Random(2), 5
    restored.write(through_a_file(watched.read()))
    assert (other.handle.random(), other.number) == (random.Random(2).random(), 1)


def test_state_dict_is_used_if_there_is_one():
    thing, other, watched, restored = two(Stored(), Stored())
    thing.handle = object()
    state = through_a_file(watched.read())
    assert AttributeChanges.lost(state) == []
    restored.write(state)
    assert_identical(other.loaded, thing.state_dict())


def test_objects_are_matched_by_class_and_number():
    thing, stored = Thing(), Stored()
    watched = AttributeChanges([thing, stored])
    state = [["Thing", {"number": 3}], ["Thing", {}], ["Gone", {"at": 1}], ["Stored", {"handle": 4}]]
    watched.write(state)
    assert (thing.number, stored.handle) == (1, 4)
    assert watched.missing(state) == ["Thing", "Gone"]
    assert watched.missing([["Gone", {}], ["torch.DistributedSampler", {"epoch": 1}]]) == []
    assert watched.missing([["torch.Subset", {"indices": ["list", [1]]}]]) == ["torch.Subset"]


def test_modules_and_parts_of_frameworks_are_not_watched():
    assert is_watched(Thing())
    assert is_watched(type("Holder", (), {"__module__": __name__})())
    assert not any(map(is_watched, [nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)], 0.1), io.BytesIO(), Thing, 1]))
