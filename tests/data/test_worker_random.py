"""Random states written by a worker, and restored in another one."""

import pickle
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support import through_a_file
from trainer.data import worker_random
from trainer.data.worker_random import PLACE, WorkerRandom, WorkerStates
from trainer.state import random_states

OWN = random.Random(1)
DRAWS = {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(1).item(), "own": OWN.random}


@pytest.fixture(autouse=True)
def in_a_worker(monkeypatch):
    monkeypatch.setattr(worker_random, "get_worker_info", lambda: SimpleNamespace(dataset=[OWN]))
    with random_states.isolated():
        yield


def made(states, starts=None, number=0, init=None, collate=list):
    """Return a started worker."""
    worker = WorkerRandom(SimpleNamespace(worker_init_fn=init, collate_fn=collate), starts or {}, states.memory)
    worker.start(number)
    return worker


@pytest.mark.parametrize("names", [[], ["torch"], list(DRAWS)], ids=str)
def test_changed_states_arrive_and_are_restored_in_another_worker(names):
    states = WorkerStates({}, 1, ahead=1)
    worker = made(states)
    assert worker.collate("ab") == ["a", "b"]
    assert (states.state_dict(0, 1), states.have_changed) == ({}, False)
    for name in names:
        DRAWS[name]()
    worker.collate("second")
    current = states.state_dict(0, 2)
    assert {number: list(changed) for number, changed in current.items()} == ({0: names} if names else {})
    assert states.have_changed is bool(names)
    worker.collate("third")
    assert states.state_dict(0, 3) == current
    following = [DRAWS[name]() for name in names]
    worker.collate("fourth")  # is on its way
    assert states.state_dict(0, 3) == current

    starts = through_a_file(current)
    assert starts == current
    made(states, starts)
    assert [DRAWS[name]() for name in names] == following
    made(states, {1: starts.get(0, {})})  # of another worker
    assert [DRAWS[name]() for name in names] != following or not names
    assert WorkerStates(starts, 1, ahead=1).state_dict(0, 0) == starts


def test_random_numbers_of_user_functions_are_included():
    def collate(samples):
        return samples, random.random()

    states = WorkerStates({}, 1, 1)
    worker = made(states, init=random.seed, collate=collate)
    assert worker.collate("samples") == ("samples", random.Random(0).random())
    assert {number: list(changed) for number, changed in states.state_dict(0, 1).items()} == {0: ["python"]}


@pytest.mark.parametrize("ahead", [1, 4])
def test_worker_that_is_ahead_keeps_the_last_taken_states(ahead):
    states = WorkerStates({}, 1, ahead)
    worker = made(states)
    expected = []
    for _ in range(3 * ahead + 6):
        random.random()
        worker.collate("a")
        expected.append({0: {"python": random_states.capture()["python"]}})
        taken = len(expected) - ahead - 1  # and one is lost to an error
        if taken > 0:
            assert states.state_dict(0, taken) == expected[taken - 1]
    assert states.state_dict(0, len(expected) - ahead - 2) is None  # the worker has written over it


def test_batches_of_workers_that_take_turns():
    """A pass that begins with the last of three workers, after one of five batches that began with the first."""
    states, places = WorkerStates({}, 3, ahead=9), []
    states.end_pass(0, 5)
    for number in range(3):
        worker = made(states, number=number)
        random.seed(number)
        for _ in range(4):
            random.random()
            worker.collate("a")
            places.append({"python": random_states.capture()["python"]})
    counts = [2, 2, 1]
    for batches in range(5):
        found = states.state_dict(2, batches)
        assert [places.index(found[number]) for number in range(3)] == [4 * n + counts[n] - 1 for n in range(3)]
        counts[(2 + batches) % 3] += 1


def test_states_that_are_too_large_are_unknown(monkeypatch):
    own = [random.Random(number) for number in range(40)]
    monkeypatch.setattr(worker_random, "get_worker_info", lambda: SimpleNamespace(dataset=own))
    states = WorkerStates({}, 1, ahead=1)
    worker = made(states)
    own[0].random()
    assert len(pickle.dumps(random_states.states_of(own))) > PLACE
    worker.collate("a")
    assert states.state_dict(0, 1) is None
