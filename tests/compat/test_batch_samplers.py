"""Any iterable of batches of indices is a batch sampler, in each kind of run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.distributed.test_batch_samplers import Seen
from tests.support import make_trainer
from trainer.data.unpadded import BatchShare

BATCHES = [[6, 2], [4, 0]]


class Slots:
    """Has no ``__dict__`` and no length."""

    __slots__ = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BATCHES)


class Own:
    def __iter__(self) -> Iterator[list[int]]:
        return iter(BATCHES)


KINDS: dict[str, Callable[[], Any]] = {
    "list": lambda: BATCHES,
    "generator": lambda: (batch for batch in BATCHES),
    "slots": Slots,
    "object": Own,
}


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
@pytest.mark.filterwarnings("ignore:You are using a custom batch sampler `Own` for prediction")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["fit", "validate", "test", "predict"])
def test_any_iterable_is_a_batch_sampler(tmp_path, what, kind):
    module, loader = Seen(), DataLoader(torch.arange(8.0).reshape(8, 1), batch_sampler=KINDS[kind]())
    given = loader.batch_sampler
    trainer = make_trainer(tmp_path)
    result = getattr(trainer, what)(module, loader)
    assert module.seen == BATCHES
    if what == "predict":
        assert [batch.flatten().tolist() for batch in result] == BATCHES
        assert module.indices == BATCHES
    assert loader.batch_sampler is given


@pytest.mark.parametrize(("count", "replicas"), [(0, 2), (4, 1), (4, 2), (5, 3)])
def test_shares_of_all_ranks_are_all_batches_once(count, replicas):
    batches = [[i] for i in range(count)]
    shares = [BatchShare(batches, replicas, rank) for rank in range(replicas)]
    assert sorted(batch for share in shares for batch in share) == batches
    assert [len(share) for share in shares] == [len([*share]) for share in shares]
    padded = [BatchShare(batches, replicas, rank, padded=True) for rank in range(replicas)]
    assert {len(share) for share in padded} == {len([*share]) for share in padded} == {-(-count // replicas)}
    assert {batch[0] for share in padded for batch in share} == set(range(count))
