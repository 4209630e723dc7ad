"""Logged values of some ranks, distributed to another number of ranks: an epoch's values stay correct."""

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MinMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.state.test_snapshot import state_of
from trainer.metrics.metric_objects import MetricObjects
from trainer.metrics.metrics import LoggedValue, LogOptions, MetricStore, shared_among

VALUES = [[(1.0, 2), (4.0, 3)], [(2.0, 1), (8.0, 1), (0.5, 5)], [(3.0, 4)]]
"""Logged values of each of three ranks, with their numbers of samples."""
CPU = torch.device("cpu")


def logged(reduce_fx, values, **options):
    """Return the state of a rank that has logged ``values``."""
    store = MetricStore(training=True)
    entry = LoggedValue("training_step", "x", LogOptions(reduce_fx=reduce_fx, **options), None, torch.as_tensor)
    for value, weight in values:
        entry.update(torch.tensor(value), weight)
    store.entries["training_step", "x", None] = entry
    return store.state_dict(lambda _: None)


def loaded(state):
    store = MetricStore(training=True)
    store.load_state_dict(state, lambda _: None, torch.as_tensor, CPU)
    (entry,) = store.entries.values()
    return entry


EXPECTED = {"mean": 38.5 / 16, "sum": 18.5, "max": 8.0, "min": 0.5}


@pytest.mark.parametrize("processes", [1, 2, 5])
@pytest.mark.parametrize("reduce_fx", EXPECTED)
def test_logged_values_are_shared(reduce_fx, processes):
    state = shared_among(processes, [logged(reduce_fx, values) for values in VALUES])
    total, weight, _ = loaded(state).accumulated()
    if reduce_fx == "mean":
        assert (total / weight).item() == pytest.approx(EXPECTED["mean"])  # of each process by itself, too
        assert weight * processes == pytest.approx(16)
    else:
        whole = total * processes if reduce_fx == "sum" else total  # over all of them
        assert whole.item() == pytest.approx(EXPECTED[reduce_fx])


def test_values_are_added_to_shared_ones():
    entry = loaded(shared_among(1, [logged("mean", values) for values in VALUES]))
    entry.update(torch.tensor(10.0), 4)
    assert entry.epoch_value().item() == pytest.approx((EXPECTED["mean"] * 16 + 40) / 20)


def test_values_logged_with_rank_zero_only_are_not_added():
    states = [logged("mean", VALUES[0], rank_zero_only=True), {"in_batch": True, "entries": []}]
    assert loaded(shared_among(3, states)).epoch_value().item() == pytest.approx((2 + 12) / 5)


class Seen(Metric):
    """A metric with a state that is reduced over ranks by ``reduce``."""

    seen: Tensor

    def __init__(self, reduce):
        super().__init__()
        self.add_state("seen", torch.tensor(0.0), dist_reduce_fx=reduce)

    def update(self, value):
        self.seen = value

    def compute(self):
        return self.seen


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.sum, self.mean, self.max, self.min = SumMetric(), MeanMetric(), MaxMetric(), MinMetric()
        self.cat = CatMetric()
        self.accuracy, self.averages, self.own = MulticlassAccuracy(3, average="micro"), Seen("mean"), Seen(torch.prod)

    def update(self, values):
        for value in values:
            for metric in (self.sum, self.mean, self.max, self.min, self.cat, self.averages, self.own):
                metric.update(torch.tensor(value))
            self.accuracy.update(torch.tensor([int(value) % 3]), torch.tensor([1]))


SEEN = [[1.0, 4.0], [2.0, 8.0, 7.0], []]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_metric_objects_are_shared(processes):
    states = []
    for values in SEEN:
        module = Module()
        snapshot = state_of(module)
        module.update(values)
        states.append(snapshot.read())
    found = []
    for rank in range(processes):
        module = Module()
        state, lost = MetricObjects(module).shared(states, rank, processes)
        assert state_of(module).write(state) == []
        assert lost == ({"own"} if processes < len(SEEN) else set())
        found.append(module)
    assert [int(module.sum.sum_value) for module in found] == [22] + [0] * (processes - 1)
    assert sum(float(module.mean.mean_value) for module in found) == 22
    assert sum(float(module.mean.weight) for module in found) == 5
    assert [module.max.compute().item() for module in found] == [8.0] * processes
    assert [module.min.compute().item() for module in found] == [1.0] * processes
    assert all(module.cat.value == [] for module in found[1:])
    assert found[0].cat.compute().tolist() == [1.0, 4.0, 2.0, 8.0, 7.0]
    assert sum(int(module.accuracy.tp) for module in found) == 3  # 1, 4 and 7
    assert found[0].accuracy.tp.dtype == torch.long
    assert [module.averages.seen.item() for module in found] == [5.5] * processes  # of 4 and 7
    own = [4.0, 7.0, 0.0, 0.0]
    assert [module.own.seen.item() for module in found] == own[:processes]
    assert all(module.sum._update_count == 3 for module in found)  # without a warning about an empty metric
