"""Reduction of the logged values of several ranks: the stores and metric objects of each, without processes."""

import torch
from torch import nn
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.utilities import dim_zero_cat

from trainer.metrics.metric_objects import MetricObjects
from trainer.metrics.metrics import LoggedValue, LogOptions, MetricStore

STEP = "validation_step"


class Process:
    """One rank's store; ``asked`` are the exchanged values, in order."""

    def __init__(self):
        self.store = MetricStore(training=False)
        self.store.shared_hooks = {STEP}
        self.asked = []

    def reduce(self, tensor, op="mean", group=None):
        self.asked.append((op, float(tensor), tensor.dtype))
        return tensor

    def log(self, name, *values, hook=STEP, dtype=torch.float32, **options):
        entry = LoggedValue(hook, name, LogOptions(**options), None, self.reduce)
        for value in values:
            entry.update(torch.tensor(value, dtype=dtype), 2)
        self.store.entries[hook, name, None] = entry

    def outline(self):
        return self.store.outline(lambda metric: None)


def exchange(*processes):
    outlines = [process.outline() for process in processes]
    for process in processes:
        process.store.complete(outlines, lambda name: None, process.reduce)
        process.store.current(on_step=False)


def test_all_reduce_the_same_names_in_the_same_order_and_dtype():
    first, second = Process(), Process()
    float32, float64 = torch.float32, torch.float64
    for process, name, value, dtype in (
        (first, "a", 1.0, float32), (first, "b", 2.0, float32),
        (second, "c", 3.0, float32), (second, "b", 4.0, float64), (second, "a", 5.0, float32),
    ):  # fmt: skip
        process.log(name, value, reduce_fx="sum", dtype=dtype)
    exchange(first, second)
    assert first.asked == [("sum", 1.0, float32), ("sum", 2.0, float64), ("sum", 0.0, float32)]
    assert second.asked == [("sum", 5.0, float32), ("sum", 4.0, float64), ("sum", 3.0, float32)]


def test_values_of_different_kinds_are_reduced_separately():
    first, second = Process(), Process()
    first.log("one", 1.0, rank_zero_only=True)
    first.log("group", 1.0, sync_dist_group="some of them")
    first.log("hook", 1.0, hook="on_validation_epoch_start")
    first.log("step", 1.0, on_step=True, on_epoch=False)
    exchange(first, second)
    assert first.asked == second.asked == []
    assert second.store.entries == {}
    first.log("synced", 1.0, hook="on_validation_epoch_start", sync_dist=True)
    exchange(first, second)
    assert [op for op, *_ in first.asked] == [op for op, *_ in second.asked] == ["sum", "sum"]


def test_values_of_a_batch_are_reduced_while_all_share_it():
    process = Process()
    process.log("x", sync_dist=True, on_step=True)
    process.log("own", on_step=True)
    for shares in (True, False, True):
        process.asked.clear()
        process.store.share_steps(shares)
        for entry in process.store.entries.values():
            entry.update(torch.tensor(1.0), 1)
        assert len(process.asked) == shares


def test_all_go_by_the_first_process_s_own_values():
    first, second = Process(), Process()
    for process, value in ((first, 1.0), (second, 2.0)):
        process.log("epoch", value, hook="on_validation_epoch_end")
        process.log("kept", value, hook="on_validation_epoch_end", rank_zero_only=True)
    said = []
    first.store.take_first(lambda value: said.append(value) or value)
    second.store.take_first(lambda value: said[0])
    assert second.store.current(on_step=False).callback == {"epoch": 1.0, "kept": 2.0}
    assert not first.asked + second.asked


# --- metric objects ---------------------------------------------------------------------------------------------------


class Metrics(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.lists, self.unused = MeanMetric(), CatMetric(), CatMetric()
        self.scores = MetricCollection({"accuracy": MulticlassAccuracy(2), "f1": MulticlassF1Score(2)})


def complete(*modules, new=False):
    """Exchange the outlines of the metric objects of each rank, which are ``new`` in this pass or have all updates."""
    objects = [MetricObjects(module) for module in modules]
    outlines = [one.outline(one.counts() if new else {}) for one in objects]
    for one in objects:
        one.complete(outlines, torch.device("cpu"))


def test_metric_without_updates_has_empty_states_of_the_others_kind():
    first, second = Metrics(), Metrics()
    first.mean.update(1.0)
    first.lists.value.append(torch.zeros(3, 4, dtype=torch.int64))
    first.lists._update_count = 1
    first.scores.update(torch.tensor([0, 1]), torch.tensor([0, 1]))
    complete(first, second)
    (empty,) = second.lists.value
    assert (empty.shape, empty.dtype) == ((0, 4), torch.int64)
    assert torch.equal(dim_zero_cat([*first.lists.value, empty]), first.lists.value[0])
    assert second.mean._update_count == second.scores["f1"]._update_count == 1  # or its compute would warn
    assert second.unused._update_count == 0
    assert second.unused.value == []


def test_value_of_before_another_process_s_update_is_computed_again():
    first, second = Metrics(), Metrics()
    for module in (first, second):
        module.mean.update(1.0)
        module.mean.compute()
    first.mean.update(3.0)
    complete(first, second)
    assert second.mean._computed is None


def test_metrics_without_updates_in_the_pass_are_not_synchronized():
    """Those of the training, if a validation runs in its middle."""
    modules = Metrics(), Metrics()
    for module, count in zip(modules, (2, 1), strict=True):
        module.lists._reductions["value"] = None
        for _ in range(count):
            module.lists.update(torch.ones(1))
    complete(*modules, new=True)
    assert len(modules[1].lists.value) == 1
