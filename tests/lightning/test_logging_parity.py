"""Public results of ``self.log`` in small programs under Lightning's Trainer and ours."""

import inspect
import warnings
from collections import defaultdict
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from unittest import mock

import pytest
import rich
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loops import evaluation_loop
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import data as batch_sizes
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from tests.parity import CLASSES, Classifier, assert_agree, data
from tests.support import loader_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class Logs(Classifier):
    """Runs given functions (module, batch, batch_idx) in its steps."""

    def __init__(self, training=None, evaluation=None):
        super().__init__()
        self.in_training, self.in_evaluation = training, evaluation
        self.accuracy = MulticlassAccuracy(CLASSES)

    def training_step(self, batch, batch_idx):
        if self.in_training is not None:
            self.in_training(self, batch, batch_idx)
        return self.loss(batch[0] if isinstance(batch[0], (list, tuple)) else batch)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        if self.in_evaluation is not None:
            self.in_evaluation(self, batch, batch_idx)

    test_step = validation_step


def shown(metrics):
    """Return values and their types: 0-dim tensors or numbers."""
    kinds = {k: (v.dtype, v.ndim, v.device) if isinstance(v, Tensor) else type(v) for k, v in metrics.items()}
    return {name: (round(float(metrics[name]), 5), kinds[name]) for name in sorted(metrics)}


def everything(trainer):
    return [shown(trainer.callback_metrics), shown(trainer.logged_metrics), shown(trainer.progress_bar_metrics)]


def attempt(action, words=45):
    """Return the result of ``action``, or the type and first words of its error."""
    try:
        return action()
    except Exception as error:
        return type(error).__name__, str(error)[:words]


def warned(action, about):
    """Return the warnings of ``action`` by category and first words."""
    result.warning_cache.clear()
    batch_sizes.warning_cache.clear()
    with warnings.catch_warnings(record=True, action="always") as caught:
        action()
    return sorted({(w.category.__name__, str(w.message)[:60]) for w in caught if about in str(w.message)})


def fitted(make, training, **arguments):
    trainer = make(max_epochs=1, **arguments)
    trainer.fit(Logs(training), data(6))
    return everything(trainer)


# --- the programs -------------------------------------------------------------------------------------------------


def values_and_types_without_a_logger(make):
    def training(module, batch, batch_idx):
        module.log("both", float(batch_idx), on_step=True, on_epoch=True, prog_bar=True)
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):  # integers are float64 here
            module.log(str(dtype), torch.tensor(batch_idx, dtype=dtype), on_epoch=True)
        module.log("of one element", torch.tensor([[2.5]]))
        module.log("number", 3)

    def evaluation(module, batch, batch_idx):
        module.log("v", float(batch_idx), on_step=True, on_epoch=True, prog_bar=True)
        module.log("step", float(batch_idx), on_step=True, on_epoch=False, prog_bar=True)

    trainer, module = make(max_epochs=1), Logs(training, evaluation)
    trainer.fit(module, data(6), data(4))
    return everything(trainer), trainer.test(module, data(4), verbose=False), everything(trainer)


def batch_sizes_found_in_batches(make):
    mean = Logs(lambda module, batch, i: module.log("x", float(i), on_step=False, on_epoch=True))
    two, three = ((torch.zeros(n, 4), torch.zeros(n, dtype=torch.long)) for n in (2, 3))
    found = []
    for one, other in ((None, None), (torch.zeros(5), torch.zeros(1)), ("a", "b"), ([], {}), (torch.tensor(1.0), 7)):
        trainer, loader = make(max_epochs=1), loader_of([[two, one], [three, other]])
        found.append(warned(lambda: trainer.fit(mean, loader), "batch_size"))  # noqa: B023
        found.append(shown(trainer.callback_metrics))
    words = Logs(evaluation=lambda module, batch, i: module.log("x", 1.0))
    found.append(attempt(lambda: make().validate(words, loader_of(["a", "b"]), verbose=False)))
    given = Logs(evaluation=lambda module, batch, i: module.log("x", float(i), batch_size=i + 1))
    return found, make().validate(given, loader_of(["a", "b", "c"]), verbose=False)


def tables(make):
    def evaluation(module, batch, batch_idx):
        module.log("accuracy", 1 / 3)
        module.log("loss_with_a_name_that_is_rather_long_for_a_column", torch.tensor(2.0))

    printed = []
    for with_rich in (True, False):
        for loaders, verbose in ((data(4), True), ([data(4)] * 2, True), (data(4), False)):
            with (
                mock.patch.object(evaluation_loop, "_RICH_AVAILABLE", with_rich),
                redirect_stdout(StringIO()) as plain,
                rich.get_console().capture() as captured,
            ):
                results = make().validate(Logs(evaluation=evaluation), loaders, verbose=verbose)
            printed.append((results, plain.getvalue(), captured.get()))
        with redirect_stdout(StringIO()) as plain:
            printed.append((make().test(Logs(), data(4)), plain.getvalue()))
    return printed


def a_run_that_broke_off_and_another(make):
    def training(module, batch, batch_idx):
        module.accuracy(module(batch[0]), batch[1])
        module.log("accuracy", module.accuracy, on_step=False, on_epoch=True)
        if batch_idx == 2 and module.global_step == 2:
            raise RuntimeError("broken off")
        module.log("x", float(batch_idx), on_step=True, on_epoch=True, prog_bar=True)

    trainer, module = make(max_epochs=1), Logs(training)
    outcome = attempt(lambda: trainer.fit(module, data(10)))
    broken_off = everything(trainer)
    trainer.fit(module, data(10))
    return outcome, broken_off, everything(trainer)


def metric_objects(make):
    def collection(module, batch, batch_idx):
        own = module.nested["a"][0]
        own.update(module(batch[0]), batch[1])
        module.log_dict(own, on_step=False, on_epoch=True, prog_bar=True)

    def foreign(module, batch, batch_idx, **options):
        metric = MulticlassAccuracy(CLASSES)
        metric(module(batch[0]), batch[1])
        module.log("foreign", metric, **options)

    def sum_of_two(module, batch, batch_idx):
        module.accuracy(module(batch[0]), batch[1])
        module.log("sum", module.accuracy + 1, on_step=False, on_epoch=True, metric_attribute="accuracy")

    def bare(module, batch, batch_idx):
        del module.accuracy
        foreign(module, batch, batch_idx)

    named = partial(foreign, metric_attribute="accuracy")
    trainer, module = make(max_epochs=2), Logs(collection)
    kinds = [MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)]
    module.nested = nn.ModuleDict({"a": nn.ModuleList([MetricCollection(kinds, prefix="p/")])})
    trainer.fit(module, data(6))
    others = [attempt(lambda log=log: fitted(make, log), words=300) for log in (foreign, bare, named, sum_of_two)]
    return everything(trainer), others


def wrong_use(make):
    outcomes = []
    for value in (None, {"a": 1}, "word", [1, 2], (1,), torch.ones(2), 1j, float("inf")):
        outcomes.append(attempt(lambda value=value: fitted(make, lambda m, b, i: m.log("x", value))))
    for options in (
        {"on_step": False, "on_epoch": False},
        {"reduce_fx": "median"},
        {"reduce_fx": torch.argmax},
        {"reduce_fx": "AVG", "on_epoch": True},
        {"sync_dist": True, "rank_zero_only": True, "enable_graph": True},
    ):
        outcomes.append(attempt(lambda given=options: fitted(make, lambda m, b, i: m.log("x", 1.0, **given))))

    def twice(module, batch, batch_idx):
        module.log("x", 1.0, prog_bar=False)
        module.log("x", 1.0, prog_bar=True)

    outcomes.append(attempt(lambda: fitted(make, twice)))
    outcomes.append(attempt(lambda: fitted(make, lambda m, b, i: m.log("x/dataloader_idx_0", 1.0))))
    same_name = Logs(evaluation=lambda m, b, i: m.log("x", 1.0, add_dataloader_idx=False))
    outcomes.append(attempt(lambda: make().validate(same_name, [data(4), data(4)], verbose=False)))
    outcomes.append(warned(lambda: fitted(make, lambda m, b, i: m.log("x", torch.tensor(1))), "needs to"))
    outcomes.append(warned(lambda: fitted(make, lambda m, b, i: m.log("x", 1.0, logger=True)), "no logger"))
    return outcomes


def without_a_run(make):
    module, trainer = Logs(), make(max_epochs=1)
    outcomes = [warned(lambda: module.log("x", 1.0), "self.log")]
    module.trainer = trainer
    outcomes.append(attempt(lambda: module.log("x", 1.0)))
    trainer.state.stage = RunningStage.TRAINING
    outcomes.append(attempt(lambda: module.log("x", 1.0)))
    module._current_fx_name = "training_step"
    module.log("x", torch.tensor([1.25]), on_epoch=True)
    module.log("metric", module.accuracy, on_step=True, on_epoch=False)
    outcomes += everything(trainer)
    trainer.state.stage = None
    trainer.fit(module := Logs(), data(2), data(2))
    return outcomes, attempt(lambda: module.log("x", 1.0))


def results_by_hook_and_name(make):
    seen = []

    class Looks(Logs):
        def training_step(self, batch, batch_idx):
            self.accuracy(self(batch[0]), batch[1])
            self.log("accuracy", self.accuracy)
            self.log_dict({"mean": float(batch_idx), "step": 2.0}, on_epoch=True)
            self.log("largest", 5.0 - batch_idx, on_step=False, on_epoch=True, reduce_fx="max")
            return self.loss(batch)

        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.log("v", 1.0)
            self.log(f"own_{dataloader_idx}", 2.0, add_dataloader_idx=False)
            seen.append(self.trainer._results.dataloader_idx)

        def on_train_epoch_end(self):
            results = self.trainer._results
            loop = self.trainer.fit_loop
            assert list(results) == list(loop._results) == list(loop.epoch_loop._results)
            seen.append([shown(part) for part in results.metrics(on_step=False).values()])
            mean, metric = results["training_step.mean"], results["training_step.accuracy"]
            seen.append((float(mean.value), int(mean.cumulated_batch_size), float(mean.compute())))
            seen.append((type(metric.value).__name__, metric.meta.metric_attribute, metric.meta.on_epoch))
            listed = results.result_metrics
            assert all(isinstance(each, result._ResultMetric) for each in listed)
            seen.append([(each.meta.name, each.is_tensor, each.meta.sync.should) for each in listed])
            seen.append((float(results["training_step.largest"].value), "training_step.other" in results, len(results)))

        def on_validation_epoch_end(self):
            results = self.trainer._results
            seen.append((sorted(results), int(results["validation_step.v.1"].cumulated_batch_size), results.batch))

    make(max_epochs=1, num_sanity_val_steps=0).fit(Looks(), data(6), [data(4), data(6)])
    return seen


def where_logging_is_allowed(make):
    """Call ``log`` in every public method of a module and of a callback."""

    def methods(cls):
        return {name for name, _ in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")}

    outcomes = defaultdict(set)
    module, callback = Logs(), Callback()
    for stage in ("train", "val", "test", "predict"):
        setattr(module, f"{stage}_dataloader", lambda: data(4))

    def tries(name, call):
        def method(*args, **kwargs):
            returned = None if call is None else call(*args, **kwargs)
            trainer = module._trainer
            outcome = attempt(lambda: module.log(f"{name}_{call is None}", 1.0))
            outcomes[trainer and trainer.state.fn, call is None, name].add(outcome)
            return returned

        return method

    not_hooks = methods(nn.Module) | {"log", "log_dict", "configure_sharded_model"}
    for name in methods(LightningModule) - not_hooks:
        setattr(module, name, tries(name, getattr(module, name)))
    for name in methods(Callback) - {"state_dict", "load_state_dict"}:
        setattr(callback, name, tries(name, None))
    trainer = make(max_epochs=2, limit_train_batches=1, limit_val_batches=1, callbacks=callback)
    trainer.fit(module)
    trainer.test(module, verbose=False)
    trainer.predict(module)
    return outcomes, sorted(trainer.callback_metrics)


class OneNameForBoth(Classifier):
    """Logs the training and validation loss as "loss", with a schedule that monitors it."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    validation_step = training_step

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}


def one_name_in_training_and_validation(make):
    seen = []

    def look(trainer, *_):
        metrics = trainer.callback_metrics, trainer.progress_bar_metrics
        seen.append([*map(shown, metrics), trainer.optimizers[0].param_groups[0]["lr"]])

    watch = LambdaCallback(on_train_batch_start=look, on_train_batch_end=look, on_train_epoch_end=look)
    for when in ({}, {"val_check_interval": 2}, {"check_val_every_n_epoch": 2}, {"max_steps": 6}):
        make(max_epochs=3, callbacks=watch, **when).fit(OneNameForBoth(), data(8), data(6, seed=5))
    assert {rate for *_, rate in seen} > {0.5}  # the validation has run
    return seen


PROGRAMS = [
    values_and_types_without_a_logger,
    batch_sizes_found_in_batches,
    tables,
    a_run_that_broke_off_and_another,
    metric_objects,
    wrong_use,
    without_a_run,
    results_by_hook_and_name,
    where_logging_is_allowed,
    one_name_in_training_and_validation,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.filterwarnings("ignore")  # warnings are compared in programs about them
def test_logging_equals_lightnings(program):
    assert_agree(program)
