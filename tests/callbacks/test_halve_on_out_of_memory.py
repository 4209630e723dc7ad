"""What is a part of a batch; how parts are run is in ``tests/loops/test_splitting.py``."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from trainer.callbacks import HalveOnOutOfMemory
from trainer.callbacks.halve_on_out_of_memory import part_of


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Sample:
    x: Tensor
    name: str


X = torch.arange(10.0).view(5, 2)
Y = torch.arange(5)


def test_tensors_with_the_batchs_length_are_cut() -> None:
    assert torch.equal(part_of(X, 1, 3), X[1:3])
    one, scale = part_of([X, torch.tensor(2.0)], 3, 5)
    assert torch.equal(one, X[3:])
    assert scale == 2.0
    pair = part_of(Pair(X, Y), 0, 2)
    assert isinstance(pair, Pair)
    assert torch.equal(pair.y, Y[:2])


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
def test_mappings(kind: Any) -> None:
    batch = kind({"x": X, "more": (Y, {"deep": Y}), "name": "train", "files": list("abcde"), "other": ["a", "b"]})
    part = part_of(batch, 1, 3)
    assert type(part) is kind
    assert torch.equal(part["x"], X[1:3])
    assert torch.equal(part["more"][1]["deep"], Y[1:3])
    assert (part["name"], part["files"], part["other"]) == ("train", ["b", "c"], ["a", "b"])
    assert len(batch["x"]) == 5


def test_dataclasses() -> None:
    part = part_of(Sample(X, "a"), 4, 5)
    assert torch.equal(part.x, X[4:])
    assert part.name == "a"


def test_two_columns_of_two_samples_are_columns() -> None:
    x, y = part_of([X[:2], Y[:2]], 0, 1)
    assert torch.equal(x, X[:1])
    assert torch.equal(y, Y[:1])


def test_the_number_of_samples() -> None:
    measure = HalveOnOutOfMemory().measure
    assert measure({"x": X, "y": [Y, torch.tensor(1.0)]}) == 5
    with pytest.raises(ValueError, match=r"tensors of the lengths \[3, 5\]"):
        measure([X, torch.ones(3)])
    with pytest.raises(ValueError, match=r"\(list\) has no tensors"):
        measure(["a", 1])
    assert HalveOnOutOfMemory(split=part_of).measure([X, torch.ones(3)]) == 5
