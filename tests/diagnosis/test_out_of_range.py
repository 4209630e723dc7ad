from contextlib import suppress

import pytest
import torch
from torch.nn import functional as F

from trainer.diagnosis.out_of_range import OutOfRange, RaisedCall

TABLE, INDEX = torch.rand(3, 4), torch.tensor([0, 5, 1])
CALLS = {
    "embedding": (lambda: F.embedding(INDEX, TABLE), (0, 2)),
    "embedding_bag": (lambda: F.embedding_bag(INDEX[None], TABLE), (0, 2)),
    "cross_entropy": (lambda: F.cross_entropy(TABLE, INDEX), (0, 3)),
    "cross_entropy by name": (lambda: F.cross_entropy(input=TABLE, target=INDEX, ignore_index=1), (0, 3)),
    "gather": (lambda: TABLE.gather(1, INDEX[:, None]), (0, 3)),
    "scatter_": (lambda: TABLE.clone().scatter_(1, INDEX[:, None], 1.0), (0, 3)),
    "index_select": (lambda: torch.index_select(TABLE, 1, INDEX), (0, 3)),
    "one_hot": (lambda: F.one_hot(INDEX, 4), (0, 3)),
    "one_hot, negative": (lambda: F.one_hot(INDEX - 1), (0, 2**63 - 1)),
    "index": (lambda: TABLE[INDEX], (0, 2)),
    "index of a later dimension": (lambda: TABLE[None][0, ..., INDEX], (0, 3)),
    "index after a mask": (lambda: TABLE[None][torch.ones(1, 3).bool(), INDEX], (0, 3)),
    "negative index": (lambda: TABLE[INDEX - 4], (-3, 2)),
    "assignment": (lambda: TABLE.clone().__setitem__(INDEX, 1.0), (0, 2)),
    "binary_cross_entropy": (lambda: F.binary_cross_entropy(TABLE[0, :3], INDEX.float()), (0, 1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_tensor_that_torch_rejects_and_its_range(name):
    call, expected = CALLS[name]
    with suppress(IndexError, RuntimeError), RaisedCall() as raised:
        call()
    assert (raised.rejection.low, raised.rejection.high) == expected
    assert raised.rejection.error
    wrong = [0] if "negative" in name else [1]
    assert raised.rejection.rejected.flatten().nonzero().flatten().tolist() == wrong


def test_limits_above_the_range_of_the_dtype():
    assert OutOfRange(INDEX, 0, 39_999).rejected_in(torch.tensor([-5, 7], dtype=torch.int16)).tolist() == [True, False]


def test_an_exception_without_an_index():
    with suppress(RuntimeError), RaisedCall() as raised:
        TABLE @ TABLE
    assert raised.rejection is None
