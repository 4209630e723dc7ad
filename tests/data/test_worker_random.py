"""Random states sent by a worker, and restored in another one."""

import pickle
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from tests.state.test_attributes import through_a_file
from trainer.data import worker_random
from trainer.data.worker_random import WorkerRandom, WorkerStates
from trainer.state import random_states

OWN = random.Random(1)
DRAWS = {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(1).item(), "own": OWN.random}


@pytest.fixture(autouse=True)
def in_a_worker(monkeypatch):
    monkeypatch.setattr(worker_random, "get_worker_info", lambda: SimpleNamespace(dataset=[OWN]))
    with random_states.isolated():
        yield


def started(starts=None, memory=None):
    worker = WorkerRandom(None, lambda samples: samples, starts or {}, memory)
    worker.start(2)
    return worker


def arrived(marked):
    """Receive the states of a worker in the main process."""
    return pickle.loads(pickle.dumps(marked))


@pytest.mark.parametrize("writers", [0, 3], ids=["sent", "in shared memory"])
@pytest.mark.parametrize("names", [[], ["torch"], list(DRAWS)], ids=str)
def test_changed_states_arrive_and_are_restored_in_another_worker(names, writers):
    states = WorkerStates({}, writers, ahead=1)
    worker = started(memory=states.memory)
    assert states.take(arrived(worker.collate("first"))) == "first"
    assert states.state_dict() == {}
    for name in names:
        DRAWS[name]()
    assert states.take(arrived(worker.collate("second"))) == "second"
    after = states.state_dict()
    assert {number: list(changed) for number, changed in after.items()} == ({2: names} if names else {})
    third = worker.collate("third")
    assert len(pickle.dumps(third)) < 100  # unchanged states are not sent
    batch, *mark = arrived(third)
    assert states.take(pin_memory(([batch], *mark))) == ["third"]  # as the thread of a DataLoader does it
    assert states.state_dict() == after
    following = [DRAWS[name]() for name in names]
    worker.collate("fourth")  # is on its way
    assert states.state_dict() == after

    starts = through_a_file(after)
    assert starts == after
    worker = started(starts)
    assert [DRAWS[name]() for name in names] == following
    started({1: starts.get(2, {})})  # of another worker
    assert [DRAWS[name]() for name in names] != following or not names


def test_random_numbers_of_user_functions_are_included():
    def collate(samples):
        return samples, random.random()

    worker, states = WorkerRandom(random.seed, collate, {}), WorkerStates({})
    worker.start(7)
    assert states.take(arrived(worker.collate("samples"))) == ("samples", random.Random(7).random())
    assert {number: list(changed) for number, changed in states.state_dict().items()} == {7: ["python"]}


@pytest.mark.parametrize("ahead", [1, 4])
def test_worker_that_is_ahead_keeps_the_last_taken_states(ahead):
    states = WorkerStates({}, 3, ahead)
    worker = started(memory=states.memory)
    for _ in range(2 * ahead + 3):
        random.random()
        states.take(arrived(worker.collate("taken")))
        now = {2: {"python": random_states.capture()["python"]}}
        for on_its_way in ["lost to an error", *range(ahead)]:
            random.random()
            worker.collate(on_its_way)
            assert states.state_dict() == now


def test_states_that_are_too_large_for_the_memory_are_sent(monkeypatch):
    own = [random.Random(number) for number in range(8)]
    monkeypatch.setattr(worker_random, "get_worker_info", lambda: SimpleNamespace(dataset=own))
    states = WorkerStates({}, 3, ahead=1)
    worker = started(memory=states.memory)
    for _ in range(3):
        own[0].random()
        states.take(arrived(worker.collate(0)))
        assert states.state_dict() == {2: {"own": random_states.states_of(own)}}
