from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from trainer.common.session import Session
from trainer.data import workers
from trainer.data.workers import SurviveSignals, guard_workers


def loader(**options):
    return DataLoader(torch.arange(12), **{"num_workers": 1} | options)


def test_methods_of_dataloaders_are_replaced_until_the_session_closes():
    free, alone, own, unlimited = loader(), loader(num_workers=0), loader(timeout=7), loader(worker_init_fn=int)
    with Session() as session:
        for each, seconds in ((free, 5), (alone, 5), (own, 5), (range(3), 5), (free, 9), (unlimited, 0)):
            guard_workers(session, each, seconds)
        assert ["_get_iterator" in vars(each) for each in (free, alone, own, unlimited)] == [True, *[False] * 3]
        inits = [each.worker_init_fn for each in (free, alone, own, unlimited)]
        assert [type(init) is SurviveSignals and init.init for init in inits] == [None, False, None, int]
    assert [each.worker_init_fn for each in (free, alone, own, unlimited)] == [None, None, None, int]
    assert "_get_iterator" not in vars(free)


def test_iterator_that_is_bounded_ends_its_workers_with_itself(no_gc):
    data = loader()
    with Session() as session:
        guard_workers(session, data, 5)
        iterator = iter(data)
        next(iterator)
    (worker,) = iterator._workers
    del iterator
    assert not worker.is_alive()
    assert "_get_iterator" not in vars(data)


class Slow:
    """An iterator with a simulated duration."""

    def __init__(self, clock, answers):
        self.clock, self.answers, self.killed = clock, answers, []
        self._workers = [SimpleNamespace(kill=lambda: self.killed.append(clock.now))]

    def _try_get_data(self, timeout):
        arrived = self.answers.pop(0)
        self.clock.now += 0.5 if arrived else timeout
        return arrived, None


def test_patience(clock):
    slow = Slow(clock, [False, True, *[False] * 8])
    look = workers._BoundedGet(slow, 36)
    assert [look()[0], look()[0]] == [False, True]  # the time of this batch is discarded
    look()
    with pytest.warns(UserWarning, match=r"nothing for 10 seconds.*36"):
        look()
    assert [look()[0] for _ in range(5)] == [False] * 5  # warned once
    with pytest.raises(RuntimeError, match="DataLoader timed out after 36 seconds"):
        look()
    assert slow.killed == [145.5]  # the hanging worker


def test_worker_that_dies_while_its_batch_is_sent():
    killed = []

    class Broken:
        _workers = [SimpleNamespace(pid=1, exitcode=None, join=lambda timeout: None, kill=lambda: killed.append(1)),
                    SimpleNamespace(pid=2, exitcode=-9, join=lambda timeout: None, kill=lambda: None)]  # fmt: skip

        def _try_get_data(self, timeout):
            raise ConnectionResetError

    broken = Broken()
    with pytest.raises(RuntimeError, match=r"worker \(pid\(s\) 2\) is killed by signal: Killed"):
        workers._BoundedGet(broken, 36)()
    assert killed == [1]  # it may wait for a lock of the other one
    Broken._workers = Broken._workers[:1]
    with pytest.raises(ConnectionResetError):
        workers._BoundedGet(broken, 36)()
