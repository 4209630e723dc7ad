"""Checkpoints with objects as hyperparameters are read without creating the objects."""

from __future__ import annotations

import collections
import copy
import enum
import functools
import sys
from argparse import Namespace
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from trainer.checkpoint.inert import StandIn, allow_stand_ins, refusal, write_without_data

pickles_members_by_value = pytest.mark.skipif(
    sys.version_info < (3, 11, 4), reason="Python before 3.11.4 pickles a member of an enumeration as getattr"
)


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Sizes:
    width: int = 3


class Entries(dict):
    pass


class Items(list):
    pass


class Aware(dict):
    def __init__(self, **entries):
        super().__init__(entries)
        self.__dict__ = self


class Positional:
    def __new__(cls, width):
        made = object.__new__(cls)
        made.width = width
        return made

    def __getnewargs__(self):
        return (self.width,)


class Named(Positional):
    def __getnewargs_ex__(self):
        return (), {"width": self.width}


Point = collections.namedtuple("Point", "x y")

KINDS = {
    "loss": torch.nn.HuberLoss(delta=3.0),
    "config": OmegaConf.create({"a": [1, {"b": "${c}"}], "c": 2}),
    "structured": OmegaConf.structured(Sizes),
    "class": Sizes,
    "dataclass": Sizes(4),
    "namespace": Namespace(a=1),
    "path": Path("a/b"),
    "enum": Colour.RED,
    "array": np.arange(4.0),
    "dtype": np.dtype("float32"),
    "partial": functools.partial(torch.optim.Adam, lr=0.1),
    "defaultdict": collections.defaultdict(list, a=[1]),
    "deque": collections.deque([1, 2], maxlen=3),
    "ordered": collections.OrderedDict(a=Colour.RED),
    "of dict": Entries(a=1),
    "dict that is its attributes": Aware(a=1),
    "of list": Items([1, Colour.RED]),
    "point": Point(1, Path("a")),
    "positional": Positional(3),
    "function": torch.nn.functional.gelu,
    "builtin": print,
    "method": Sizes(4).__repr__,
    "frozenset": frozenset({1, Colour.RED}),
    "network": torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)),
    "optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1),
    "generator of numpy": np.random.default_rng(1),
    "exception": ValueError("a"),
    "type": dict[str, int],
}


def file_of(hyper_parameters, **more):
    file = BytesIO()
    torch.save({"state_dict": {"w": torch.arange(3.0)}, "hyper_parameters": hyper_parameters, **more}, file)
    return file


def read(file):
    with allow_stand_ins(file):
        file.seek(0)
        return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", KINDS)
def test_objects_in_hyperparameters_are_skipped(kind):
    given = {"it": KINDS[kind], "again": [KINDS[kind]], "lr": 0.5}
    assert refusal(given) == ""
    checkpoint = read(file_of(given))
    assert checkpoint["state_dict"]["w"].tolist() == [0, 1, 2]
    assert checkpoint["hyper_parameters"]["lr"] == 0.5
    it = checkpoint["hyper_parameters"]["it"]
    bases = it.__mro__ if isinstance(it, type) else type(it).__mro__
    assert StandIn in bases or type(it) in (list, dict, collections.OrderedDict, collections.Counter, tuple)


NOTED = Items([1])
NOTED.note = "a"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (lambda: 1, "it cannot be pickled"),
        (NOTED, "it could not be read again without running code"),
        (Named(3), "it could not be read again without running code"),
    ],
)
def test_unsupported_objects_are_detected_before_the_save(value, reason):
    assert refusal({"it": value}).startswith(reason)


@pickles_members_by_value
def test_safe_globals_are_created():
    with torch.serialization.safe_globals([Colour]):
        made = read(file_of({"it": Colour.RED, "other": Sizes(3)}))["hyper_parameters"]
        assert torch.serialization.get_safe_globals().count(Colour) == 1
    assert made["it"] is Colour.RED
    assert isinstance(made["other"], StandIn)


def test_stand_in_has_the_name_of_its_class():
    it = read(file_of({"it": KINDS["loss"]}))["hyper_parameters"]["it"]
    with pytest.raises(AttributeError, match=r"no 'delta': a torch.nn.modules.loss.HuberLoss was saved among"):
        it.delta
    assert isinstance(copy.deepcopy(it), StandIn)


def test_trial_writes_no_data():
    network = torch.nn.Linear(1000, 1000)
    file = BytesIO()
    write_without_data({"a": network, "b": np.zeros(10**6), "c": torch.zeros(10**6)}, file)
    assert file.tell() < 10_000
    assert refusal({"a": network, "b": np.zeros(10**6)}) == ""
