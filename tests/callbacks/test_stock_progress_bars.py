"""Lightning's progress bars and summaries show the same under both Trainers."""

import io
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from tests.parity import Classifier, assert_agree, data, lightning, ours
from tests.support import Stream
from trainer.callbacks import ProgressBar

MOMENTS = [
    f"on_{stage}_{moment}"
    for stage in ("train", "validation", "test", "predict")
    for moment in ("start", "epoch_start", "batch_end", "epoch_end", "end")
]


class Logs(Classifier):
    def training_step(self, batch, batch_idx):
        self.log("step", float(batch_idx), prog_bar=True)
        self.log("both", float(batch_idx), prog_bar=True, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx, *_):
        self.log(self.trainer.state.stage.value, float(self.global_step), prog_bar=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx, *_):
        return self(batch[0])


def state_of(bar):
    """Return the displayed state."""
    if isinstance(bar, RichProgressBar):
        tasks = bar.progress.tasks if bar.progress is not None else []
        return [(task.completed, task.total, task.visible) for task in tasks]
    bars = [getattr(bar, f"_{stage}_progress_bar") for stage in ("train", "val", "test", "predict")]
    return [
        None if one is None else (one.n, one.total, getattr(one, "desc", None), one.leave, one.disable) for one in bars
    ]


def watched(kind):
    """Return a bar of ``kind`` that records its state and metrics after each hook."""

    def make(name):
        def method(self, trainer, *args):
            getattr(kind, name)(self, trainer, *args)
            self.seen.append((name, str(trainer.state.stage), *state_of(self)))

        return method

    def get_metrics(self, trainer, module):
        metrics = kind.get_metrics(self, trainer, module)
        self.seen.append(("metrics", {name: float(value) for name, value in metrics.items()}))
        return metrics

    return type("Watched", (kind,), {**{name: make(name) for name in MOMENTS}, "get_metrics": get_metrics})


SCENARIOS = {
    "plain": {},
    "left behind": {"leave": True, "refresh_rate": 3},
    "validation inside": {"val_check_interval": 2},
    "limits": {"limit_train_batches": 3, "limit_val_batches": 1, "limit_test_batches": 0.5},
    "two loaders": {"loaders": lambda: [data(4), data(2)], "num_sanity_val_steps": 0},
    "no length": {"loaders": lambda: DataLoader(Stream([(torch.ones(4), 1)] * 5), batch_size=1)},
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((TQDMProgressBar, name) for name in SCENARIOS), *((RichProgressBar, name) for name in ("plain", "two loaders"))],
)
def test_screen_is_the_same(kind, name, tmp_path):
    arguments = {"max_epochs": 2, "enable_progress_bar": True, **SCENARIOS[name]}
    options = {key: arguments.pop(key) for key in ("refresh_rate", "leave") if key in arguments}
    loaders = arguments.pop("loaders", lambda: data(6))

    def scenario(make):
        bar, module = watched(kind)(**options), Logs()
        bar.seen = []
        trainer = make(callbacks=bar, logger=CSVLogger(tmp_path / make.__name__), **arguments)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            trainer.fit(module, data(10) if name != "no length" else loaders(), loaders())
            for function in ("validate", "test", "predict"):
                getattr(trainer, function)(module, loaders())
        return bar.seen

    assert len(assert_agree(scenario)) > 20


def test_custom_bar_replaces_the_default():
    assert type(ours(enable_progress_bar=True).progress_bar_callback) is ProgressBar
    for bar in (TQDMProgressBar(), RichProgressBar(), TQDMProgressBar(refresh_rate=0), ProgressBar()):
        trainer = ours(enable_progress_bar=True, callbacks=bar)
        assert trainer.progress_bar_callback is bar
        assert sum(isinstance(one, type(bar).__mro__[-3]) for one in trainer.callbacks) == 1


def test_default_summary_is_the_rich_one():
    def summaries(make, **arguments):
        callbacks = make(enable_model_summary=True, **arguments).callbacks
        return [callback for callback in callbacks if isinstance(callback, ModelSummary)]

    for make in (lightning, ours):
        (summary,) = summaries(make)
        assert isinstance(summary, RichModelSummary)
        assert summary._max_depth == 1
    given = ModelSummary(max_depth=3)
    assert summaries(ours, callbacks=given) == [given]
