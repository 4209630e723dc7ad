"""What a worker says of its random states, and how another one takes them."""

from __future__ import annotations

import io
import pickle
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from trainer.data import worker_random
from trainer.data.worker_random import Carrier, WorkerRandom
from trainer.state import random_states

OWN = random.Random(1)
DRAWS = {
    "python": random.random,
    "numpy": np.random.rand,
    "torch": lambda: torch.rand(1).item(),
    "own": OWN.random,
}


@pytest.fixture(autouse=True)
def in_a_worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(worker_random, "get_worker_info", lambda: SimpleNamespace(dataset=[OWN]))
    with random_states.isolated():
        yield


def started(starts: dict[int, Any] | None = None) -> WorkerRandom:
    worker = WorkerRandom(None, lambda samples: samples, starts or {})
    worker.start(2)
    return worker


@pytest.mark.parametrize("names", [[], ["python"], ["numpy"], ["torch"], ["own"], list(DRAWS)], ids=str)
def test_it_sends_the_states_that_have_changed_and_another_goes_on_from_them(names: list[str]) -> None:
    worker = started()
    assert worker.collate("first").changes == {}
    for name in names:
        DRAWS[name]()
    sent = pickle.loads(pickle.dumps(worker.collate("second")))
    assert (sent.batch, sent.worker, list(sent.changes)) == ("second", 2, names)
    assert worker.collate("third").changes == {}
    following = [DRAWS[name]() for name in names]

    file = io.BytesIO()
    torch.save({2: sent.changes}, file)
    file.seek(0)
    starts = torch.load(file, weights_only=True)
    assert starts == {2: sent.changes}
    worker = started(starts)
    assert [DRAWS[name]() for name in names] == following
    started({1: starts[2]})  # of another worker
    assert [DRAWS[name]() for name in names] != following or not names


def test_what_the_users_functions_draw_counts() -> None:
    def init(worker: int) -> None:
        random.seed(worker)

    def collate(samples: Any) -> Any:
        return samples, random.random()

    worker = WorkerRandom(init, collate, {})
    worker.start(7)
    carrier = worker.collate("samples")
    assert carrier.batch == ("samples", random.Random(7).random())
    assert list(carrier.changes) == ["python"]


def test_an_unrandom_batch_costs_next_to_nothing_on_its_way() -> None:
    assert len(pickle.dumps(started().collate(0))) < 100


def test_a_carriers_batch_is_pinned() -> None:
    class Batch:
        def pin_memory(self) -> str:
            return "pinned"

    pinned = pin_memory(Carrier([Batch(), "text"], 1, {"a": 2}))  # as the thread of a DataLoader does it
    assert (pinned.batch, pinned.worker, pinned.changes) == (["pinned", "text"], 1, {"a": 2})
