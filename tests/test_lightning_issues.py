"""Programs of public Lightning issues that no other test runs; and the page that lists all of them."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torchmetrics import MeanMetric, RunningMean, SumMetric

from tests.support import Regression, loader_of, make_batches, make_trainer
from trainer.errors import ConfigurationError

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "lightning-issues.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if "`tests/" in line]


class Validates(Regression):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).square().mean(), batch_size=4)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_validation_inside_a_window_leaves_its_gradients(tmp_path, precision):  # 20346
    weights = []
    for interval in (None, 2):
        module = Validates()
        arguments = {"val_check_interval": interval, "limit_val_batches": 0 if interval is None else 1.0}
        trainer = make_trainer(tmp_path, accumulate_grad_batches=3, precision=precision, **arguments)
        trainer.fit(module, loader_of(make_batches(7)), loader_of(make_batches(2, seed=2)))
        weights.append([parameter.detach().clone() for parameter in module.parameters()])
    assert all(map(torch.equal, *weights))


def test_fit_after_an_early_stop_trains(tmp_path):  # 18727
    module, data = Validates(), loader_of(make_batches(3))
    stops = EarlyStopping("val_loss", stopping_threshold=1e9)
    trainer = make_trainer(tmp_path, max_epochs=5, callbacks=[stops])
    trainer.fit(module, data, data)
    assert (trainer.current_epoch, trainer.should_stop) == (1, True)
    stops.stopping_threshold = None
    trainer.fit(module, data, data)
    assert trainer.current_epoch == 5


class Shares(Regression):
    """Logs the values 1, 1, 1 in training and the index of the dataloader in validation, as metric objects."""

    def __init__(self, training, validation, resets):
        super().__init__()
        self.a, self.b = MeanMetric(), MeanMetric()
        self.metrics, self.resets = {"train": training, "val": validation}, resets

    def training_step(self, batch, batch_idx):
        self.log_metric("train", 1.0)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        if self.resets and batch_idx == 0:
            self.b.reset()
        self.log_metric("val", dataloader_idx)

    def log_metric(self, name, value):
        metric = getattr(self, self.metrics[name][0])
        number = metric(value)
        self.log(name, number if "number" in self.metrics[name] else metric, on_step=False, on_epoch=True, batch_size=4)


@pytest.mark.parametrize(
    ("training", "validation", "loaders", "resets", "refused"),
    [
        ("a", "b", 1, False, None),
        ("a", "a", 1, False, "'val' was"),  # 11601
        ("a number", "a", 1, False, "'val' was"),
        ("a", "a number", 1, False, "'train' was"),
        ("a", "b", 2, False, "'val' for dataloader 1 was"),  # 18282
        ("a", "b", 2, True, None),
        ("a", "b number", 2, False, None),
    ],
)
def test_metric_object_of_two_stages_or_dataloaders_is_refused(
    tmp_path, training, validation, loaders, resets, refused
):
    module = Shares(training, validation, resets)
    trainer, data = make_trainer(tmp_path, num_sanity_val_steps=0), loader_of(make_batches(3))
    val_data = [loader_of(make_batches(3 + 2 * i)) for i in range(loaders)]
    message = rf"\(MeanMetric\) logged as {refused} also updated .* reset\(\)"
    with pytest.raises(ConfigurationError, match=message) if refused else nullcontext():
        trainer.fit(module, data, val_data)
    names = ["val"] if loaders == 1 else ["val/dataloader_idx_0", "val/dataloader_idx_1"]
    expected = {"train": 1.0, **{name: float(i) for i, name in enumerate(names)}}
    assert refused or trainer.callback_metrics == expected


class ResetsItsState(SumMetric):
    """Overrides `reset` without calling that of its base."""

    def reset(self):
        self.sum_value = torch.tensor(0.0)


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda: (MeanMetric() + SumMetric()) * 0.5, 2.0), (ResetsItsState, 3.0),
        (lambda: ResetsItsState() * 0.5, 1.5),
        (lambda: RunningMean(window=3), 1.0), (lambda: MeanMetric() + 0.5, 1.5),
    ],
)  # fmt: skip
def test_metric_object_may_be_logged_in_several_validations(tmp_path, make, value):
    def validation_step(batch, batch_idx):
        module.metric.update(float(batch_idx))
        module.log("val", module.metric)

    module, values, data = Regression(), [], loader_of(make_batches(3))
    module.metric, module.validation_step = make(), validation_step
    module.on_train_epoch_end = lambda: values.append(module.trainer.callback_metrics["val"].item())
    make_trainer(tmp_path, max_epochs=3, num_sanity_val_steps=2).fit(module, data, data)
    assert values == [value] * 3


def test_page_has_at_least_thirty_issues_each_once():
    numbers = re.findall(r"\[#(\d+)\]", PAGE)
    assert len(set(numbers)) == len(numbers) >= 30
    assert all(f"pytorch-lightning/issues/{number})" in PAGE for number in numbers)


@pytest.mark.parametrize("row", ROWS)
def test_each_row_names_a_test_that_exists(row):
    (where,) = re.findall(r"`(tests/[\w/]+\.py::\w+)`", row)
    file, name = where.split("::")
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.M), where
