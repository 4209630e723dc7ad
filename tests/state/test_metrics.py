"""``self.log``: reductions, names, and visibility. Lightning's own results are in the parity suite."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

from tests.parity import CLASSES, Classifier, Learner, RecordingLogger, data, lightning, lightnings_noise_ignored, ours
from tests.support import OnMPS
from trainer.errors import ConfigurationError
from trainer.state.metrics import (
    LoggedValue,
    LogOptions,
    MetricStore,
    PublishedMetrics,
    Recorder,
    StageMetrics,
    to_scalars,
)
from trainer.state.progress import FitProgress


def not_reduced(tensor: Tensor, op: str = "mean", group: Any = None) -> Tensor:
    return tensor


def logged(values: list[float], weights: list[int] | None = None, **options: Any) -> LoggedValue:
    value = LoggedValue("training_step", "x", LogOptions(**options), None, not_reduced)
    for number, weight in zip(values, weights or [1] * len(values), strict=True):
        value.update(torch.tensor(number), weight)
    return value


# --- one value ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reduce_fx", "expected"), [("mean", 2.25), ("sum", 9.0), ("min", 1.0), ("max", 4.0)])
def test_epoch_reductions(reduce_fx: str, expected: float) -> None:
    assert logged([2.0, 1.0, 4.0, 2.0], reduce_fx=reduce_fx).epoch_value() == expected


def test_mean_is_weighted_by_batch_size() -> None:
    assert logged([1.0, 4.0], [3, 1]).epoch_value() == 1.75


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
def test_more_values_than_wait_together_reduce_as_one_would(reduce_fx: str) -> None:
    values = torch.linspace(-3, 5, 1000)
    expected = getattr(values, reduce_fx)()
    torch.testing.assert_close(logged(values.tolist(), reduce_fx=reduce_fx).epoch_value(), expected)


def lightnings(values: list[Tensor], weights: list[Any], reduce_fx: str) -> Tensor:
    """Return the values logged by Lightning's Trainer."""
    metadata = _Metadata("training_step", "x", on_epoch=True, reduce_fx=getattr(torch, reduce_fx))
    metadata.sync = _Sync()
    result = _ResultMetric(metadata, is_tensor=True)
    for value, weight in zip(values, weights, strict=True):
        result.forward(value, weight)
    return result.compute()


BATCH_SIZES: dict[str, Callable[[random.Random], Any]] = {
    "all the same": lambda draws: 8,
    "different": lambda draws: draws.randint(1, 99),
    "weights": lambda draws: draws.random() + 0.1,
    "tensors": lambda draws: torch.tensor(draws.randint(1, 99)),
}


@pytest.mark.parametrize("sizes", BATCH_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "max"])
def test_epoch_reductions_equal_lightnings(reduce_fx: str, dtype: torch.dtype | None, sizes: str) -> None:
    """EarlyStopping depends on ties. None stands for dtypes that change within the epoch."""
    draws = random.Random(f"{reduce_fx} {dtype} {sizes}")
    for number in (1, 256, 257, 520):
        values = [torch.tensor(draws.gauss(0.3, 1)) for _ in range(number)]
        values = [value.to(dtype or draws.choice([torch.float32, torch.float64])) for value in values]
        weights = [BATCH_SIZES[sizes](draws) for _ in range(number)]
        entry = LoggedValue("training_step", "x", LogOptions(reduce_fx=reduce_fx), None, not_reduced)
        for at, (value, weight) in enumerate(zip(values, weights, strict=True)):
            entry.update(value if dtype is not torch.bfloat16 else value.float(), weight)
            if at == 50:  # an earlier read changes nothing
                assert same(entry.epoch_value(), lightnings(values[: at + 1], weights[: at + 1], reduce_fx))
        assert same(entry.epoch_value(), lightnings(values, weights, reduce_fx)), number


def same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.dtype is other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("sizes", BATCH_SIZES)
def test_epoch_is_accumulated_in_a_double_default_dtype(sizes: str) -> None:
    draws = random.Random(sizes)
    values = [torch.tensor(draws.gauss(0.3, 1)) for _ in range(300)]  # of float32
    weights = [BATCH_SIZES[sizes](draws) for _ in values]
    torch.set_default_dtype(torch.float64)
    try:
        for reduce_fx in ("mean", "sum", "max"):
            entry = LoggedValue("training_step", "x", LogOptions(reduce_fx=reduce_fx), None, not_reduced)
            for value, weight in zip(values, weights, strict=True):
                entry.update(value, weight)
            expected = lightnings(values, weights, reduce_fx)
            assert expected.dtype is torch.float64
            assert same(entry.epoch_value(), expected), reduce_fx
    finally:
        torch.set_default_dtype(torch.float32)


def test_half_precision_values_are_accumulated_in_float32() -> None:
    value = LoggedValue("training_step", "x", LogOptions(reduce_fx="sum"), None, not_reduced)
    for _ in range(4096):
        value.update(torch.tensor(1.0, dtype=torch.bfloat16), 1)
    epoch = value.epoch_value()
    assert epoch is not None
    assert epoch.dtype is torch.float32
    assert epoch == 4096  # in bfloat16 the sum would stop at 256


@pytest.mark.whole
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_epoch_means_of_half_precision_losses_in_a_run(dtype: torch.dtype) -> None:
    """Lightning #18620. Sums of 5,000 losses near 1 would stall at 256 in bfloat16, and at 2,048 in float16."""
    number = 5_000
    values = (1 + torch.rand(number, generator=torch.Generator().manual_seed(0))).to(dtype)

    class Logs(Learner):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train", values[batch_idx], on_step=True, on_epoch=True)
            self.log("sum", values[batch_idx], on_step=False, on_epoch=True, reduce_fx="sum")
            return None  # no trainable parameters

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val", values[batch_idx])

        def test_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("test", values[batch_idx])

    trainer, module = ours(max_epochs=1, num_sanity_val_steps=0), Logs()
    batches = data(2 * number, batch_size=2)
    trainer.fit(module, batches, batches)
    metrics = dict(trainer.callback_metrics)
    metrics["test"] = torch.tensor(trainer.test(module, batches, verbose=False)[0]["test"])
    exact = values.double().sum()
    for name, expected in {
        "train_epoch": exact / number,
        "val": exact / number,
        "test": exact / number,
        "sum": exact,
    }.items():
        assert metrics[name].dtype is torch.float32, name
        assert metrics[name].item() == pytest.approx(expected.item(), rel=1e-6), name
    assert metrics["train_step"] == values[-1]


def test_step_value_is_the_last_one() -> None:
    value = logged([1.0, 5.0], on_step=True)
    assert value.step_value == 5.0
    assert value.epoch_value() == 3.0


def test_reset_forgets_values_and_keeps_options() -> None:
    value = logged([1.0, 5.0], reduce_fx="max")
    value.reset()
    assert not value.has_value
    assert value.epoch_value() is None
    value.update(torch.tensor(2.0), 1)
    assert value.epoch_value() == 2.0


@pytest.mark.parametrize(("reduce_fx", "expected"), [("mean", 1.0), ("sum", 6.0), ("max", 3.0)])
def test_sync_dist_reduces_once_over_the_processes(reduce_fx: str, expected: float) -> None:
    calls: list[str] = []

    def double(tensor: Tensor, op: str = "mean", group: Any = None) -> Tensor:
        calls.append(op)
        return tensor * (2 if op == "sum" else 1)

    value = LoggedValue("training_step", "x", LogOptions(reduce_fx=reduce_fx, sync_dist=True), None, double)
    for number in (3.0, 0.0, 0.0):
        value.update(torch.tensor(number), 1)
    assert value.epoch_value() == expected
    # a mean is a sum over a sum, so that batches of different sizes on several ranks have their weight
    assert calls == (["sum", "sum"] if reduce_fx == "mean" else [reduce_fx])


def test_rank_zero_only_is_not_reduced() -> None:
    def fail(*args: Any) -> Tensor:
        raise AssertionError("a collective that the other ranks do not join")

    options = LogOptions(on_step=True, sync_dist=True, rank_zero_only=True)
    value = LoggedValue("training_step", "x", options, None, fail)
    value.update(torch.tensor(2.0), 1)
    assert value.epoch_value() == 2.0


def test_value_of_a_metric_object_is_detached() -> None:
    metric, value = MeanSquaredError(), LoggedValue("training_step", "mse", LogOptions(on_step=True), None, not_reduced)
    metric(torch.ones(2, requires_grad=True), torch.zeros(2))
    value.update_metric(metric)
    assert (value.step_value, value.epoch_value()) == (1, 1)
    assert copy.deepcopy(value.step_value) == 1, "ModelCheckpoint copies it"


@pytest.mark.parametrize("on_step", [False, True])
def test_metric_object_that_computes_no_tensor_is_refused(on_step: bool) -> None:
    class Odd:
        _forward_cache = {"a": 1}

        def compute(self) -> Any:
            return {"a": 1}

    store = MetricStore(training=True)
    value = LoggedValue("training_step", "odd", LogOptions(on_step=True), None, not_reduced)
    value.update_metric(Odd())  # type: ignore[arg-type]
    store.entries["training_step", "odd", None] = value
    with pytest.raises(ConfigurationError, match=r"'odd' must be a tensor. Found \{'a': 1\}"):
        store.current(on_step)


def test_epoch_value_is_reduced_over_ranks_once() -> None:
    """Further reads call no collective, so that rank 0 may read it alone."""
    calls: list[str] = []

    def reduce(tensor: Tensor, op: str = "mean", group: Any = None) -> Tensor:
        calls.append(op)
        return tensor * 2

    value = LoggedValue("training_step", "x", LogOptions(reduce_fx="sum", sync_dist=True), None, reduce)
    value.update(torch.tensor(1.0), 1)
    assert [value.epoch_value(), value.epoch_value(), calls] == [2.0, 2.0, ["sum"]]
    value.update(torch.tensor(1.0), 1)
    assert [value.epoch_value(), calls] == [4.0, ["sum", "sum"]]
    value.reset()
    assert value.epoch_value() is None


# --- a stage's values ---------------------------------------------------------------------------------------------


def store_with(training: bool, dataloader_idx: int | None = None, **options: Any) -> MetricStore:
    store = MetricStore(training)
    store.begin_batch(None, dataloader_idx)
    entry = LoggedValue("training_step", "x", LogOptions(**options), dataloader_idx, not_reduced)
    entry.update(torch.tensor(2.0), 1)
    entry.update(torch.tensor(4.0), 1)
    store.entries["training_step", "x", dataloader_idx] = entry
    return store


def test_names_have_suffixes_if_both_values_are_requested() -> None:
    both = store_with(True, on_step=True, on_epoch=True, prog_bar=True)
    assert both.current() == StageMetrics({"x": 4.0, "x_step": 4.0}, {"x_step": 4.0}, {"x_step": 4.0})
    both.end_epoch()
    assert both.current() == StageMetrics({"x": 3.0, "x_epoch": 3.0}, {"x_epoch": 3.0}, {"x_epoch": 3.0})
    step = store_with(True, on_step=True, on_epoch=False, logger=False)
    assert step.current() == StageMetrics({"x": 4.0}, {}, {})
    step.end_epoch()
    assert step.current() == StageMetrics({}, {}, {})


def test_dataloaders_get_suffixes_and_are_shown_one_at_a_time() -> None:
    store = store_with(False, dataloader_idx=1)
    store.end_epoch()
    name = "x/dataloader_idx_1"
    assert store.current() == StageMetrics({name: 3.0}, {name: 3.0}, {})
    store.dataloader_idx = None
    assert store.current() == StageMetrics({}, {}, {})


def test_callbacks_do_not_monitor_the_steps_of_an_evaluation() -> None:
    store = store_with(False, on_step=True, on_epoch=True)
    assert store.current().callback == {}
    assert store.current().logger == {"x_step": 4.0}


def test_published_metrics_are_live() -> None:
    published = PublishedMetrics()
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


def test_to_scalars() -> None:
    assert to_scalars({"a": torch.tensor(2.5), "b": 3, "c": torch.tensor([4.0])}) == {"a": 2.5, "b": 3, "c": 4.0}
    with pytest.raises(ConfigurationError, match=r"does not contain a single element.*Log 'v' as a mean"):
        to_scalars({"v": torch.zeros(2)})


def test_to_scalars_on_mps() -> None:
    values = {"a": torch.tensor(2.5), "b": torch.tensor([2**40 + 1]), "c": torch.tensor(0.5, dtype=torch.float16)}
    assert to_scalars({name: value.as_subclass(OnMPS) for name, value in values.items()} | {"d": 1}) == {
        "a": 2.5, "b": 2**40 + 1, "c": 0.5, "d": 1,
    }  # fmt: skip


def test_recorder_adds_the_epoch_and_uses_a_logged_step() -> None:
    logger, published = RecordingLogger(), PublishedMetrics()
    progress = FitProgress()
    progress.epoch = 7
    recorder = Recorder(published, progress)
    recorder.send({"a": 1.0}, 3)  # no listener
    assert published.logged == {}
    recorder.loggers = [logger]
    recorder.send({}, 3)
    recorder.send({"a": torch.tensor(1.0)}, 3)
    recorder.send({"a": 2.0, "step": torch.tensor(9.0), "epoch": 1.5}, 4)
    recorder.send({"a": 3.0}, 5, exact_step=True)
    assert logger.rows == [(3, {"a": 1.0, "epoch": 7}), (9, {"a": 2.0, "epoch": 1.5}), (5, {"a": 3.0})]
    assert published.logged["a"] == 3.0


# --- invalid calls of self.log ----------------------------------------------------------------------------------------


class Wrong(Classifier):
    """Calls a function in its training step."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.hparams.clear()  # a function among them could not be pickled
        self.what = what

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.what(self)
        return self.loss(batch)


def twice(module: Any) -> None:
    module.log("x", 1.0)
    module.log("x", 1.0, on_epoch=True)


MISUSE: dict[str, tuple[Any, str]] = {
    "neither": (lambda m: m.log("x", 1.0, on_step=False, on_epoch=False), "is not useful"),
    "dict": (lambda m: m.log("x", {"a": 1}), "`dict` values cannot be logged"),
    "string": (lambda m: m.log("x", "a"), "`str` values cannot be logged"),
    "list": (lambda m: m.log("x", [1.0]), "`list` values cannot be logged"),
    "vector": (lambda m: m.log("x", torch.zeros(2)), "must have a single element"),
    "reduction": (lambda m: m.log("x", 1.0, reduce_fx="median"), r"reduce_fx=\{min,max,mean,sum\}"),
    "callable reduction": (lambda m: m.log("x", 1.0, reduce_fx=torch.std), r"reduce_fx=\{min,max,mean,sum\}"),
    "dataloader in the name": (lambda m: m.log("a/dataloader_idx_0", 1.0), "should not contain information about"),
    "twice, differently": (twice, "twice in `training_step` with different arguments"),
    "a metric of nobody": (lambda m: m.log("x", MulticlassAccuracy(CLASSES)), "Could not find the `LightningModule`"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_raises_lightnings_errors(name: str) -> None:
    what, message = MISUSE[name]
    kinds = []
    for make in (lightning, ours):
        with lightnings_noise_ignored(), pytest.raises((MisconfigurationException, ValueError), match=message) as error:
            make(max_epochs=1).fit(Wrong(what), data(2), data(2))
        kinds.append(error.type)
    assert kinds[0] is kinds[1]


def hooks_that_may_log(make: Any) -> dict[str, bool]:
    """Return whether ``self.log`` works in each hook."""
    allowed: dict[str, bool] = {}

    def hook(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                self.log(f"from_{name}", 1.0)
                allowed[name] = True
            except MisconfigurationException:
                allowed[name] = False
            original = getattr(Classifier, name)
            return original(self, *args, **kwargs)

        return method

    names = [name for name in dir(Classifier) if name.startswith("on_") and name not in ("on_gpu",)]
    names += ["setup", "teardown", "configure_optimizers", "train_dataloader", "prepare_data", "configure_model"]
    names += ["predict_step", "test_step", "lr_scheduler_step", "optimizer_zero_grad", "configure_gradient_clipping"]
    names.remove("train_dataloader")
    module = type("Everywhere", (Classifier,), {name: hook(name) for name in names})()
    trainer = make(max_epochs=1)
    trainer.fit(module, data(2), data(2))
    trainer.test(module, data(2), verbose=False)
    trainer.predict(module, data(2))
    return allowed


def test_same_hooks_may_log_as_in_lightning() -> None:
    with lightnings_noise_ignored():
        theirs = hooks_that_may_log(lightning)
    mine = hooks_that_may_log(ours)
    assert sum(theirs.values()) > 20
    assert theirs == mine


def test_logging_without_a_trainer_warns() -> None:
    with pytest.warns(UserWarning, match="reference is not registered"):
        Learner().log("x", 1.0)


def test_logging_outside_a_run_is_restored() -> None:
    module = Learner()
    trainer = ours(max_epochs=1)
    trainer.fit(module, data(2))
    assert "log" not in vars(module)
    with pytest.raises(MisconfigurationException, match=r"not registered yet|not managed by the `Trainer`"):
        module.log("x", 1.0)


def test_logger_true_without_a_logger_warns() -> None:
    with pytest.warns(UserWarning, match=r"logger=True\)` but have no logger configured"):
        ours(max_epochs=1).fit(Wrong(lambda m: m.log("x", 1.0, logger=True)), data(2), data(2))


def test_integer_tensor_is_converted_with_a_warning() -> None:
    trainer = ours(max_epochs=1)
    with pytest.warns(UserWarning, match="needs to be floating to be reduced"):
        trainer.fit(Wrong(lambda m: m.log("x", torch.tensor(3), on_epoch=True)), data(2), data(2))
    assert trainer.callback_metrics["x"].dtype is torch.float32
    assert trainer.callback_metrics["x"] == 3.0


# --- valid calls of self.log ------------------------------------------------------------------------------------------


def test_logged_values_do_not_follow_their_tensor() -> None:
    class InPlace(Learner):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            value = torch.tensor(1.0)
            self.log("x", value, on_step=True, on_epoch=True)
            value += 5
            return self.loss(batch)

    trainer = ours(max_epochs=1)
    trainer.fit(InPlace(), data(4))
    assert (trainer.callback_metrics["x_step"], trainer.callback_metrics["x_epoch"]) == (1.0, 1.0)


def test_logged_values_hold_no_graph() -> None:
    class Step(Learner):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("x", loss, on_epoch=True)
            assert not self.trainer.callback_metrics["x"].requires_grad
            return loss

    ours(max_epochs=1).fit(Step(), data(4))


def test_one_name_from_two_hooks_is_two_values() -> None:
    class Two(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0, on_epoch=True)
            return self.loss(batch)

        def on_train_epoch_end(self) -> None:
            self.log("x", 5.0)

    for make in (lightning, ours):
        with lightnings_noise_ignored():
            trainer = make(max_epochs=1)
            trainer.fit(Two(), data(4), data(2))
        assert trainer.callback_metrics["x"] == 5.0


def test_child_module_logs_through_its_parents_trainer() -> None:
    class Child(Learner):
        def forward(self, features: Tensor) -> Tensor:
            self.log("from_child", 3.0)
            return super().forward(features)

    class Parent(Learner):
        def __init__(self) -> None:
            super().__init__()
            self.net = Child()

    trainer = ours(max_epochs=1)
    module = Parent()
    trainer.fit(module, data(4))
    assert trainer.callback_metrics["from_child"] == 3.0
    assert "log" not in vars(module.net)


def test_callbacks_may_call_log_themselves() -> None:
    from lightning.pytorch import Callback

    class Logs(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            self.log("one", 1.0)
            self.log_dict({"two": 2.0, "three": 3.0})

    callback = Logs()
    trainer = ours(max_epochs=1, callbacks=[callback])
    trainer.fit(Learner(), data(4))
    assert trainer.callback_metrics == {"one": 1.0, "two": 2.0, "three": 3.0}
    assert not hasattr(callback, "log")


def test_copy_of_a_running_module_does_not_take_the_trainer_along() -> None:
    copies: list[Any] = []

    class Copied(Learner):
        def on_train_batch_end(self, *args: Any) -> None:
            self.log("x", 1.0)
            copies.append(copy.deepcopy(self.net))
            alone = copy.copy(self)
            vars(alone)["_trainer"] = None
            duplicate = copy.deepcopy(alone)
            assert type(vars(duplicate)["log"]).__name__ == "_DetachedLog"
            copies.append(duplicate)

    module = Copied()
    ours(max_epochs=1).fit(module, data(2))
    with pytest.warns(UserWarning, match="reference is not registered"):
        copies[-1].log("x", 1.0)


def test_log_of_a_running_module_pickles() -> None:
    pickled: list[bytes] = []

    class Pickled(Learner):
        def on_train_start(self) -> None:
            pickled.append(pickle.dumps(vars(self)["log"]))

    ours(max_epochs=1).fit(Pickled(), data(2))
    with pytest.warns(UserWarning, match="reference is not registered"):
        pickle.loads(pickled[0])("x", 1.0)


def test_metrics_stay_readable_after_the_run_and_are_cleared_by_the_next() -> None:
    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train", 1.0)
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val", 2.0)

        def test_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("test", 3.0)

    trainer, module = ours(max_epochs=1), Logs()
    trainer.fit(module, data(2), data(2))
    assert trainer.callback_metrics == {"train": 1.0, "val": 2.0}
    assert trainer.test(module, data(2), verbose=False) == [{"test": 3.0}]
    assert trainer.callback_metrics == {"test": 3.0}
    assert trainer.predict(module, data(2)) is not None
    assert trainer.callback_metrics == {}


def test_sanity_check_leaves_no_metrics_behind() -> None:
    class Looks(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val", 2.0)

        def on_train_start(self) -> None:
            assert self.trainer.callback_metrics == {}

        def on_validation_end(self) -> None:
            assert self.trainer.callback_metrics["val"] == 2.0

    logger = RecordingLogger()
    ours(max_epochs=1, logger=logger, limit_train_batches=0, num_sanity_val_steps=1).fit(Looks(), data(2), data(2))
    assert logger.rows == []


def test_batch_size_is_found_in_nested_batches_and_may_be_given() -> None:
    class Sizes(Learner):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            value = float(batch_idx)
            self.log("found", value, on_step=False, on_epoch=True)
            self.log("given", value, on_step=False, on_epoch=True, batch_size=10)
            return self.loss(batch)

    trainer = ours(max_epochs=1)
    trainer.fit(Sizes(), data(5, batch_size=4))  # batches of 4 and 1
    assert trainer.callback_metrics["found"].item() == pytest.approx(0.2)
    assert trainer.callback_metrics["given"].item() == pytest.approx(0.5)


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
