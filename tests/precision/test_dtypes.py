"""Casting nested data, and the dtype of new tensors."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from trainer.precision.dtypes import DefaultDtype, cast, widen

Pair = namedtuple("Pair", "a b")


@dataclass
class Data:
    x: Tensor
    note: str


def test_cast():
    integers = torch.arange(2)
    data = cast([torch.ones(1), Pair(torch.ones(1).double(), integers), Data(torch.ones(1).half(), "n")], torch.float16)
    assert [tensor.dtype for tensor in (data[0], data[1].a, data[2].x)] == [torch.float16] * 3
    assert (type(data[1]), data[1].b, data[2].note) == (Pair, integers, "n")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_widen(dtype):
    half = torch.ones(2, dtype=dtype)
    assert widen(half).dtype is torch.float32
    nested = widen({"a": [half], "b": OrderedDict(c=(half, 1)), "d": Data(half, "n")})
    assert [tensor.dtype for tensor in (nested["a"][0], nested["b"]["c"][0], nested["d"].x)] == [torch.float32] * 3
    assert (type(nested["b"]), nested["b"]["c"][1], nested["d"].note) == (OrderedDict, 1, "n")


@pytest.mark.parametrize(
    "data",
    [
        torch.ones(1), torch.ones(1).double(), torch.arange(2), torch.ones(1, dtype=torch.complex64), None, 3, "text",
        [torch.ones(1), 2], {"a": torch.arange(2)}, Data(torch.ones(1), "n"), Pair(torch.ones(1), None), [], object(),
    ],
    ids=lambda data: type(data).__name__,
)  # fmt: skip
def test_data_without_widening_is_returned_unchanged(data):
    assert widen(data) is data


def test_default_dtypes_nest_and_are_restored():
    half = DefaultDtype(torch.bfloat16)
    for _ in range(2):
        with half:
            with DefaultDtype(torch.float32):
                assert torch.zeros(1).dtype is torch.float32
            assert torch.zeros(1).dtype is torch.bfloat16
            with DefaultDtype(torch.bfloat16):
                pass
            assert torch.zeros(1).dtype is torch.bfloat16
        assert torch.zeros(1).dtype is torch.float32
