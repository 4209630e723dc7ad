"""Random states sent by a worker, and restored in another one."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support import through_a_file
from trainer.data import worker_random
from trainer.data.worker_random import WorkerRandom, states_of
from trainer.state import random_states

OWN = random.Random(1)
DRAWS = {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(1).item(), "own": OWN.random}


@pytest.fixture(autouse=True)
def in_a_worker(monkeypatch):
    monkeypatch.setattr(worker_random, "get_worker_info", lambda: SimpleNamespace(dataset=[OWN]))
    with random_states.isolated():
        yield


def made(starts=None, number=0, init=None, collate=list, sends=True):
    """Return a started worker."""
    worker = WorkerRandom(SimpleNamespace(worker_init_fn=init, collate_fn=collate), starts or {}, 0, sends=sends)
    worker.start(number)
    return worker


@pytest.mark.parametrize("names", [[], ["torch"], list(DRAWS)], ids=str)
def test_changed_states_arrive_and_are_restored_in_another_worker(names):
    worker = made(number=1)
    assert (worker.collate("ab"), worker.have_changed) == ((["a", "b"], 1, None), False)
    for name in names:
        DRAWS[name]()
    _, _, sent = worker.collate("second")
    assert worker.have_changed is bool(names)
    assert worker.collate("third")[2] is None
    current = states_of({1: sent} if names else {})
    assert {number: [*changed] for number, changed in current.items()} == ({1: ["epoch", *names]} if names else {})
    following = [DRAWS[name]() for name in names]

    starts = through_a_file(current)
    assert starts == current == states_of(starts)
    assert made(starts, 1).have_changed is bool(names)
    assert [DRAWS[name]() for name in names] == following
    made({0: starts.get(1, {})}, 1)  # of another worker
    assert [DRAWS[name]() for name in names] != following or not names


def test_random_numbers_of_user_functions_are_included():
    def collate(samples):
        return samples, random.random()

    batch, _, sent = made(init=random.seed, collate=collate).collate("samples")
    assert batch == ("samples", random.Random(0).random())
    assert [*states_of({0: sent})[0]] == ["epoch", "python"]


def test_worker_that_sends_nothing_reports_changes():
    worker = made(sends=False)
    assert (worker.collate("ab"), worker.have_changed) == (["a", "b"], False)
    random.random()
    assert (worker.collate("ab"), worker.have_changed) == (["a", "b"], True)
