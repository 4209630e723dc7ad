"""Processes find those of the same start, regardless of entries of an earlier start in the store."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from trainer.common.rendezvous import rendezvous
from trainer.errors import ClusterError

LONG, SHORT = timedelta(seconds=30), timedelta(seconds=0.3)


def together(*functions):
    """Return the results of concurrent calls."""
    with ThreadPoolExecutor(len(functions)) as threads:
        return [future.result() for future in [threads.submit(function) for function in functions]]


def start(served, processes=3):
    return together(*(lambda rank=rank: rendezvous(served, rank, processes, LONG) for rank in range(processes)))


def test_each_start_has_its_own_store():
    served = HashStore()
    first = start(served)
    first[1].set("where", "here")
    assert [store.get("where") for store in first] == [b"here"] * 3
    second = start(served)
    assert not any(store.check(["where"]) for store in second)
    second[0].set("where", "there")
    assert [store.get("where") for store in second] == [b"there"] * 3


def test_entries_of_a_dead_process_are_ignored():
    served = HashStore()
    served.set("amp_trainer/request/1", "died before it was answered")
    stores = together(lambda: rendezvous(served, 0, 2, LONG), lambda: rendezvous(served, 1, 2, LONG))
    stores[0].set("a", "b")
    assert stores[1].get("a") == b"b"


def test_missing_ranks_are_named():
    served = HashStore()
    served.set_timeout(SHORT)
    with pytest.raises(ClusterError, match="rank 1, 2 of 3 did not join"):
        rendezvous(served, 0, 3, SHORT)
    with pytest.raises(ClusterError, match="rank 0 did not join"):
        rendezvous(served, 1, 3, SHORT)
