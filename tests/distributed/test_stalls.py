"""The thread that monitors the progress of a run; several ranks are in ``tests/distributed/test_trouble.py``."""

import time
from datetime import timedelta

import torch.distributed as distributed

from trainer.distributed import stalls
from trainer.distributed.stalls import StallWatch


def test_stall_is_reported_in_each_run_of_the_same_processes(monkeypatch):
    """The store belongs to the processes; a run that ends during a stall leaves its entries there."""
    store, messages = distributed.HashStore(), []
    monkeypatch.setattr(distributed.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(stalls, "write_stderr", messages.append)
    for run in (1, 2):
        with StallWatch((0, 1), timedelta(seconds=0.3), lambda: 0, lambda frames: "", lambda: None) as watch:
            end = time.monotonic() + 20.0
            while len(messages) < run and time.monotonic() < end:
                time.sleep(0.01)
            assert len(messages) == run
            assert messages[-1].startswith("The run has not moved for ")
            assert watch.last_report() == messages[-1]


def test_stall_that_ends_during_the_exchange_is_not_reported(monkeypatch):
    store, messages = distributed.HashStore(), []
    monkeypatch.setattr(distributed.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(stalls, "write_stderr", messages.append)
    counted = []

    def counters():
        counted.append(asks := store.num_keys() > 0)
        return bool(asks)  # it continues after this rank has reported its position

    with StallWatch((0, 2), timedelta(seconds=0.3), counters, lambda frames: "", lambda: None):
        end = time.monotonic() + 20.0
        while sum(counted) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.2)
    assert sum(counted) >= 3
    assert messages == []
