"""Lightning's progress bars and summaries show the same under both Trainers."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, IterableDataset

from tests.parity import Classifier, assert_agree, data, lightning, ours
from trainer.callbacks import ProgressBar

MOMENTS = [
    f"on_{stage}_{moment}"
    for stage in ("train", "validation", "test", "predict")
    for moment in ("start", "epoch_start", "batch_end", "epoch_end", "end")
]


class Unsized(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.ones(4), 1)] * 5)


class Logs(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("step", float(batch_idx), prog_bar=True)
        self.log("both", float(batch_idx), prog_bar=True, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, *_: Any) -> Any:
        self.log(self.trainer.state.stage.value, float(self.global_step), prog_bar=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, *_: Any) -> Any:
        return self(batch[0])


def state_of(bar: Any) -> list[Any]:
    """Return the displayed state."""
    if isinstance(bar, RichProgressBar):
        tasks = bar.progress.tasks if bar.progress is not None else []
        return [(task.completed, task.total, task.visible) for task in tasks]
    bars = [getattr(bar, f"_{stage}_progress_bar") for stage in ("train", "val", "test", "predict")]
    return [
        None if one is None else (one.n, one.total, getattr(one, "desc", None), one.leave, one.disable) for one in bars
    ]


def watched(kind: type) -> type:
    """Return a bar of ``kind`` that records its state and metrics after each hook."""

    def make(name: str) -> Callable[..., None]:
        def method(self: Any, trainer: Any, *args: Any) -> None:
            getattr(kind, name)(self, trainer, *args)
            self.seen.append((name, str(trainer.state.stage), *state_of(self)))

        return method

    def get_metrics(self: Any, trainer: Any, module: Any) -> Any:
        metrics = kind.get_metrics(self, trainer, module)
        self.seen.append(("metrics", {name: float(value) for name, value in metrics.items()}))
        return metrics

    return type("Watched", (kind,), {**{name: make(name) for name in MOMENTS}, "get_metrics": get_metrics})


SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "left behind": {"leave": True, "refresh_rate": 3},
    "validation inside": {"val_check_interval": 2},
    "limits": {"limit_train_batches": 3, "limit_val_batches": 1, "limit_test_batches": 0.5},
    "two loaders": {"loaders": lambda: [data(4), data(2)], "num_sanity_val_steps": 0},
    "no length": {"loaders": lambda: DataLoader(Unsized(), batch_size=1)},
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((TQDMProgressBar, name) for name in SCENARIOS), *((RichProgressBar, name) for name in ("plain", "two loaders"))],
)
def test_screen_is_the_same(kind, name, tmp_path):
    arguments: dict[str, Any] = {"max_epochs": 2, "enable_progress_bar": True, **SCENARIOS[name]}
    options = {key: arguments.pop(key) for key in ("refresh_rate", "leave") if key in arguments}
    loaders = arguments.pop("loaders", lambda: data(6))

    def scenario(make: Callable[..., Any]) -> Any:
        bar, module = watched(kind)(**options), Logs()
        bar.seen = []
        trainer = make(callbacks=bar, logger=CSVLogger(tmp_path / make.__name__), **arguments)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            trainer.fit(module, data(10) if name != "no length" else loaders(), loaders())
            for function in ("validate", "test", "predict"):
                getattr(trainer, function)(module, loaders())
        return bar.seen

    assert len(assert_agree(scenario)) > 20


def test_custom_bar_replaces_the_default() -> None:
    assert type(ours(enable_progress_bar=True).progress_bar_callback) is ProgressBar
    for bar in (TQDMProgressBar(), RichProgressBar(), TQDMProgressBar(refresh_rate=0), ProgressBar()):
        trainer = ours(enable_progress_bar=True, callbacks=bar)
        assert trainer.progress_bar_callback is bar
        assert sum(isinstance(one, type(bar).__mro__[-3]) for one in trainer.callbacks) == 1


def test_default_summary_is_the_rich_one() -> None:
    def summaries(make: Any, **arguments: Any) -> list[Any]:
        callbacks = make(enable_model_summary=True, **arguments).callbacks
        return [callback for callback in callbacks if isinstance(callback, ModelSummary)]

    for make in (lightning, ours):
        (summary,) = summaries(make)
        assert isinstance(summary, RichModelSummary)
        assert summary._max_depth == 1
    given = ModelSummary(max_depth=3)
    assert summaries(ours, callbacks=given) == [given]
