"""``self.log``: reductions, names, and visibility. Lightning's own results are in the parity suite."""

import copy
import random
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torchmetrics import MeanSquaredError

from tests.parity import Learner, RecordingLogger, data, ours
from tests.support import OnMPS
from trainer.errors import ConfigurationError
from trainer.metrics.metrics import (
    LoggedValue,
    LogOptions,
    MetricStore,
    PublishedMetrics,
    StageMetrics,
    accumulation_dtype,
    to_scalars,
)
from trainer.state.progress import FitProgress


def not_reduced(tensor, op="mean", group=None):
    return tensor


# --- one value ----------------------------------------------------------------------------------------------------


def lightnings(values, weights, reduce_fx):
    """Return the values logged by Lightning's Trainer."""
    metadata = _Metadata("training_step", "x", on_epoch=True, reduce_fx=getattr(torch, reduce_fx))
    metadata.sync = _Sync()
    result = _ResultMetric(metadata, is_tensor=True)
    for value, weight in zip(values, weights, strict=True):
        result.forward(value, weight)
    return result.compute()


BATCH_SIZES = {
    "all the same": lambda draws: 8,
    "different": lambda draws: draws.randint(1, 99),
    "weights": lambda draws: draws.random() + 0.1,
    "tensors": lambda draws: torch.tensor(draws.randint(1, 99)),
}


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def default_dtype(request):
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_dtype")
@pytest.mark.parametrize("sizes", BATCH_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "max", "min"])
def test_epoch_reductions_equal_lightnings(reduce_fx, dtype, sizes):
    """EarlyStopping depends on ties. None stands for dtypes that change within the epoch.

    Sums of more than 256 values, and of several dtypes, are more precise than Lightning's.
    """
    draws = random.Random(f"{reduce_fx} {dtype} {sizes}")
    is_bit_identical = dtype is not None or reduce_fx in ("max", "min")
    for number, on_host in ((1, True), (256, False), (256, True), (257, False), (520, True)):
        values = [torch.tensor(draws.gauss(0.3, 1)) for _ in range(number)]
        values = [value.to(dtype or draws.choice([torch.float32, torch.float64])) for value in values]
        weights = [BATCH_SIZES[sizes](draws) for _ in range(number)]
        entry = LoggedValue("training_step", "x", LogOptions(reduce_fx=reduce_fx), None, not_reduced)
        for at, (value, weight) in enumerate(zip(values, weights, strict=True)):
            value = value if dtype is not torch.bfloat16 else value.to(accumulation_dtype())  # as `log` does
            entry.update(*((value.item(), weight, value.dtype) if on_host else (value, weight)))
            if at == 50 and is_bit_identical:  # an earlier read changes nothing
                assert same(entry.epoch_value(), lightnings(values[: at + 1], weights[: at + 1], reduce_fx))
        found, expected = entry.epoch_value(), lightnings(values, weights, reduce_fx)
        if (number > 256 and reduce_fx in ("mean", "sum")) or not is_bit_identical:
            torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-3)  # also the dtype
            exact = lightnings([value.double() for value in values], weights, reduce_fx).double()
            assert abs(found - exact) <= max(abs(expected - exact), 1e-6 * max(1, abs(exact)))
        else:
            assert same(found, expected), number


@pytest.mark.parametrize("number", [torch.tensor, float])
def test_sums_of_many_values_keep_their_digits(number):
    """With a total in float32, the sum is 204,808,192 and the mean is 0.10001."""
    entries = [
        LoggedValue("training_step", "x", LogOptions(reduce_fx=one), None, not_reduced) for one in ("sum", "mean")
    ]
    many, tenth = torch.tensor(2049.0), torch.tensor(0.1)
    for _ in range(100_000):
        for entry, value in zip(entries, (many, tenth), strict=True):
            entry.update(value if number is torch.tensor else value.double(), 4)
    total, mean = (entry.epoch_value() for entry in entries)
    assert total.item() == 204_900_000
    assert mean.item() == pytest.approx(0.1, rel=3e-6)
    assert total.dtype is (torch.float32 if number is torch.tensor else torch.float64)


def same(one, other):
    return one is not None and one.dtype is other.dtype and torch.equal(one, other)


def test_half_precision_values_are_accumulated_in_float32():
    value = LoggedValue("training_step", "x", LogOptions(reduce_fx="sum"), None, not_reduced)
    for _ in range(4096):
        value.update(torch.tensor(1.0, dtype=torch.bfloat16), 1)
    assert same(value.epoch_value(), torch.tensor(4096.0))  # in bfloat16 the sum would stop at 256


@pytest.mark.parametrize(("reduce_fx", "expected"), [("mean", 1.0), ("sum", 6.0), ("max", 3.0)])
def test_sync_dist_reduces_once_over_the_processes(reduce_fx, expected):
    """Further reads call no collective, so that rank 0 may read it alone."""
    calls = []

    def double(tensor, op="mean", group=None):
        calls.append(op)
        return tensor * (2 if op == "sum" else 1)

    value = LoggedValue("training_step", "x", LogOptions(reduce_fx=reduce_fx, sync_dist=True), None, double)
    for number in (3.0, 0.0, 0.0):
        value.update(torch.tensor(number), 1)
    # a mean is a sum over a sum, so that batches of different sizes on several ranks have their weight
    once = ["sum", "sum"] if reduce_fx == "mean" else [reduce_fx]
    assert [value.epoch_value(), value.epoch_value(), calls] == [expected, expected, once]
    value.update(torch.tensor(0.0), 1)
    value.epoch_value()
    assert calls == once * 2
    value.reset()
    assert value.epoch_value() is None


def test_rank_zero_only_is_not_reduced():
    options, reduce = LogOptions(on_step=True, sync_dist=True, rank_zero_only=True), Mock()
    value = LoggedValue("training_step", "x", options, None, reduce)
    value.update(torch.tensor(2.0), 1)
    assert value.epoch_value() == 2.0
    reduce.assert_not_called()


def test_value_of_a_metric_object_is_detached():
    metric, value = MeanSquaredError(), LoggedValue("training_step", "mse", LogOptions(on_step=True), None, not_reduced)
    metric(torch.ones(2, requires_grad=True), torch.zeros(2))
    value.update_metric(metric)
    assert (value.step_value, value.epoch_value()) == (1, 1)
    assert copy.deepcopy(value.step_value) == 1, "ModelCheckpoint copies it"


# --- a stage's values ---------------------------------------------------------------------------------------------


def test_published_metrics_are_live():
    published = PublishedMetrics(FitProgress())
    callback = published.callback
    published.take(StageMetrics({"a": 1}, {"b": 2}, {"c": 3}))
    published.take(StageMetrics({"a": 4}, {}, {}))
    assert published.callback is callback
    assert (published.callback, published.logged, published.progress_bar) == ({"a": 4}, {"b": 2}, {"c": 3})
    published.clear()
    assert callback == {}
    published.take(StageMetrics({"a": 5}, {}, {}))
    published.begin_run()
    published.take(StageMetrics({"a": 6}, {}, {}))
    assert (callback, published.callback) == ({"a": 5}, {"a": 6})


def test_to_scalars():
    assert to_scalars({"a": torch.tensor(2.5), "b": 3, "c": torch.tensor([4.0])}) == {"a": 2.5, "b": 3, "c": 4.0}
    values = {"a": torch.tensor(2.5), "b": torch.tensor([2**40 + 1]), "c": torch.tensor(0.5, dtype=torch.float16)}
    on_mps = {name: value.as_subclass(OnMPS) for name, value in values.items()}
    assert to_scalars(on_mps | {"d": 1}) == {"a": 2.5, "b": 2**40 + 1, "c": 0.5, "d": 1}
    with pytest.raises(ConfigurationError, match=r"does not contain a single element.*Log 'v' as a mean"):
        to_scalars({"v": torch.zeros(2)})


def test_rows_have_the_epoch_and_a_logged_step():
    logger, published = RecordingLogger(), PublishedMetrics(FitProgress(epoch=7))
    published.send({"a": 1.0}, 3)  # no listener
    assert published.logged == {}
    published.loggers = [logger]
    published.send({}, 3)
    published.send({"a": torch.tensor(1.0)}, 3)
    published.send({"a": 2.0, "step": torch.tensor(9.0), "epoch": 1.5}, 4)
    published.send({"a": 3.0}, 5, exact_step=True)
    assert logger.rows == [(3, {"a": 1.0, "epoch": 7}), (9, {"a": 2.0, "epoch": 1.5}), (5, {"a": 3.0})]
    assert published.logged["a"] == 3.0


# --- valid calls of self.log ------------------------------------------------------------------------------------------


def test_logged_values_do_not_follow_their_tensor_and_hold_no_graph():
    class InPlace(Learner):
        def training_step(self, batch, batch_idx):
            value = torch.tensor(1.0, requires_grad=True) * 1
            self.log("x", value, on_step=True, on_epoch=True)
            value += 5
            assert not self.trainer.callback_metrics["x"].requires_grad
            return self.loss(batch)

    trainer = ours(max_epochs=1)
    trainer.fit(InPlace(), data(4))
    assert (trainer.callback_metrics["x_step"], trainer.callback_metrics["x_epoch"]) == (1.0, 1.0)


def test_values_logged_in_this_batch_are_copied_once():
    store = MetricStore(training=True)
    losses = torch.tensor([1.0, 2.0])
    logged, copy = losses[1], torch.tensor(2.0)
    store.copies.append((logged, logged._version, copy))
    assert store.copy_of(losses[1]) is copy  # another view of the same memory
    for other in (losses[0], losses, torch.tensor(2.0)):
        assert torch.equal(store.copy_of(other), other)
        assert not store.copy_of(other).is_set_to(other)
    losses.mul_(3)
    assert store.copy_of(logged).item() == 6.0  # changed after it was logged
    store.end_batch()
    assert store.copies == []


def test_numbers_on_a_device_are_read_exactly(cuda):
    numbers = {"double": 0.1, "integer": 2.0**24 + 1}
    on_device = {name: torch.tensor(number, dtype=torch.float64, device="cuda") for name, number in numbers.items()}
    assert to_scalars(on_device) == numbers
