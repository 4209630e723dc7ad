"""Contents of a batch: tensors, samples, and their slices."""

from collections import UserDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from trainer.data.samples import batch_size, named_tensors_in, samples_of


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Sample:
    x: Tensor
    name: str


X = torch.arange(10.0).view(5, 2)
Y = torch.arange(5)


def test_tensors_with_the_batchs_length_are_cut():
    assert torch.equal(samples_of(X, range(1, 3)), X[1:3])
    one, scale = samples_of([X, torch.tensor(2.0)], range(3, 5))
    assert torch.equal(one, X[3:])
    assert scale == 2.0
    pair = samples_of(Pair(X, Y), range(2))
    assert isinstance(pair, Pair)
    assert torch.equal(pair.y, Y[:2])


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_mappings(kind):
    batch = kind({"x": X, "more": (Y, {"deep": Y}), "name": "train", "files": list("abcde"), "other": ["a", "b"]})
    part = samples_of(batch, range(1, 3))
    assert type(part) is kind
    assert torch.equal(part["x"], X[1:3])
    assert torch.equal(part["more"][1]["deep"], Y[1:3])
    assert (part["name"], part["files"], part["other"]) == ("train", ["b", "c"], ["a", "b"])
    assert len(batch["x"]) == 5


def test_samples_with_indices():
    part = samples_of({"x": X, "files": list("abcde"), "scale": torch.tensor(2.0)}, [0, 3])
    assert torch.equal(part["x"], X[[0, 3]])
    assert (part["files"], float(part["scale"])) == (["a", "d"], 2.0)
    x, y = samples_of([X[:2], Y[:2]], range(1))  # two columns of two samples
    assert torch.equal(x, X[:1])
    assert torch.equal(y, Y[:1])


def test_values_that_cannot_be_changed():
    part = samples_of(MappingProxyType({"x": X, "sample": Sample(X, "a")}), range(1, 3))
    assert torch.equal(part["x"], X[1:3])
    assert torch.equal(part["sample"].x, X[1:3])
    assert part["sample"].name == "a"


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(5, 2), 5),
        ([torch.tensor(1.0), torch.tensor(2.0)], 1),
        (["name", {"a": None, "b": (torch.zeros(7), torch.zeros(3))}], 7),
        ([{"name": ["a"], "scale": torch.tensor(1.0), "image": torch.ones(3, 2)}, torch.ones(7)], 3),
        (Sample(torch.zeros(4), "name"), 4),
        ("text", 0),
        (None, 0),
    ],
)
def test_batch_size(batch, size):
    assert batch_size(batch) == size


def test_tensors_in_a_batch_have_names():
    @dataclass
    class Item:
        x: Tensor
        label: int = 3

    one, two, three = torch.zeros(1), torch.ones(1), torch.ones(2)
    batch = [{"image": one, "meta": ("a", two)}, Item(three), None]
    named = list(named_tensors_in(batch, "batch"))
    assert [name for name, _ in named] == ["batch[0]['image']", "batch[0]['meta'][1]", "batch[1].x"]
    assert all(a is b for (_, a), b in zip(named, (one, two, three), strict=True))
