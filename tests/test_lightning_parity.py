"""Whole runs under Lightning's Trainer and ours: the same losses, weights, logs and results.

Each scenario is run twice from the same seed, and all public results are compared. The scenarios have no known
differences, which are in ``docs`` and in other tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from tests.parity import (
    CALLBACK_HOOKS,
    Classifier,
    Learner,
    RecordingLogger,
    data,
    recording,
    run_both,
)

# log_every_n_steps is larger than the epoch in many scenarios, which is meant
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's CombinedLoader on torch 2.15
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]


class Logging(Classifier):
    """Logs with all valid options of a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("plain", loss)
        self.log("epoch", loss, on_step=False, on_epoch=True)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("bar", 0.5 * batch_idx, prog_bar=True, logger=False)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("smallest", loss, on_step=False, on_epoch=True, reduce_fx=torch.min)
        self.log("total", loss, on_step=False, on_epoch=True, reduce_fx=sum)
        self.log("weighted", loss, on_step=False, on_epoch=True, batch_size=batch_idx + 1)
        self.log_dict({"a": batch_idx, "b": loss.detach()}, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_both", loss, on_step=True, on_epoch=True)
        self.log("val_largest", loss, reduce_fx="max")
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch))
        self.log("test_batch", float(batch_idx), on_step=True)


class SeveralLoaders(Classifier):
    """Logs with several evaluation dataloaders, with and without their index."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log(f"own_{dataloader_idx}", loss, add_dataloader_idx=False)
        return loss

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        return self(batch[0]) + dataloader_idx

    def on_validation_epoch_end(self) -> None:
        self.log("at_the_end", 3.0)


class Dict(Learner):
    """A dict from the training step; a dict as a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch["one"]) + self.loss(batch["two"])
        self.log("loss", loss)
        return {"loss": loss, "extra": batch_idx}


class Empty(Learner):
    """Has no loss for some batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else self.loss(batch)


class Schedules(Classifier):
    """A schedule for each interval, and one that watches a metric."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        parts = [self.net[0].parameters(), self.net[2].parameters()]
        optimizer = torch.optim.SGD([{"params": list(part)} for part in parts], lr=0.1)
        lr = torch.optim.lr_scheduler
        return [optimizer], [
            # with interval="step", Lightning's frequency counts batches of the epoch, not updates
            {"scheduler": lr.StepLR(optimizer, 1, 0.9), "interval": "step", "frequency": 1},
            {"scheduler": lr.StepLR(optimizer, 1, 0.7), "interval": "epoch", "frequency": 2},
            {"scheduler": lr.ExponentialLR(optimizer, 0.8), "interval": "epoch"},
            {"scheduler": lr.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0), "monitor": "val_loss"},
        ]


class Stream(IterableDataset):
    """Five batches without a length."""

    def __iter__(self) -> Any:
        yield from data(10)


class Sized:
    """Batches from an iterable that is not a dataloader."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        return iter(data(6))


class MetricsSeen(Callback):
    """Records the metrics dictionaries in callbacks."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def record(self, place: str, trainer: Any) -> None:
        self.seen.append((place, numbers(trainer.callback_metrics), numbers(trainer.progress_bar_metrics)))

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.record("batch", trainer)

    def on_validation_end(self, trainer: Any, *args: Any) -> None:
        self.record("sanity check" if trainer.sanity_checking else "validation", trainer)

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        self.record("epoch", trainer)

    def on_fit_end(self, trainer: Any, *args: Any) -> None:
        self.record("fit", trainer)


def numbers(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


class Seen:
    """Records all public results of a run."""

    def __init__(
        self, make: Callable[..., Any], module: Any, loaders: Callable[[], Any], arguments: Any, folder: Path
    ) -> None:
        self.module = module()
        self.hooks = recording(Callback, CALLBACK_HOOKS, "callback")()
        self.hooks.calls = []
        self.logger = RecordingLogger()
        self.metrics = MetricsSeen()
        self.losses: list[float] = []
        callbacks = [self.metrics, *(kind() for kind in arguments.pop("callbacks", [])), self.hooks]
        self.trainer = make(logger=self.logger, callbacks=callbacks, **{"log_every_n_steps": 1, **arguments})
        self.module.register_forward_hook(lambda *io: self.losses.append(io[2].sum().item()))
        train, val = loaders()
        self.trainer.fit(self.module, train, val)
        self.trainer.save_checkpoint(folder / "last.ckpt")
        self.checkpoint = shape(torch.load(folder / "last.ckpt", weights_only=False))
        self.after_fit = [numbers(self.trainer.callback_metrics), numbers(self.trainer.logged_metrics)]
        self.results: list[Any] = []
        if val is not None:
            self.results = [self.trainer.validate(self.module, loaders()[1], verbose=False)]
            if type(self.module).test_step is not Classifier.test_step:
                self.results.append(self.trainer.test(self.module, loaders()[1], verbose=False))


def shape(checkpoint: Any) -> Any:
    """Return the keys of a checkpoint at every depth, with the counts under ``loops``, except our own form."""
    keys = {key: sorted(value) if isinstance(value, dict) else len(value) if isinstance(value, list) else value
            for key, value in checkpoint.items()}  # fmt: skip
    keys["loops"] = {key: value for key, value in checkpoint["loops"].items() if key != "amp_trainer"}
    return keys


def assert_close(theirs: Any, ours: Any, place: str = "") -> None:
    """Compare keys exactly, and numbers approximately."""
    assert type(theirs) is type(ours), place
    if isinstance(theirs, dict):
        assert sorted(theirs) == sorted(ours), place
        for key in theirs:
            assert_close(theirs[key], ours[key], f"{place}.{key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(theirs) == len(ours), (place, theirs, ours)
        for index, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            assert_close(a, b, f"{place}[{index}]")
    elif isinstance(theirs, float):
        assert math.isclose(theirs, ours, rel_tol=1e-5, abs_tol=1e-6), (place, theirs, ours)
    else:
        assert theirs == ours, place


def train_val() -> Any:
    return data(8), data(6, seed=1)


def train_only() -> Any:
    return data(8), None


def two_val() -> Any:
    return data(8), [data(6, seed=1), data(4, seed=2)]


SCENARIOS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "logging": (Logging, train_val, {"max_epochs": 2}),
    "logging, validation over epochs":
        (Logging, train_val, {"max_epochs": 3, "val_check_interval": 3, "check_val_every_n_epoch": None}),
    "logging, accumulation, sparse":
        (Logging, train_val, {"max_epochs": 3, "accumulate_grad_batches": 2, "log_every_n_steps": 3}),
    "logging, overfit": (Logging, train_val, {"max_epochs": 2, "overfit_batches": 2}),
    "several dataloaders": (SeveralLoaders, two_val, {"max_epochs": 2}),
    "clipping by value":
        (Logging, train_val, {"max_epochs": 2, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "nothing from training_step": (Empty, train_only, {"max_epochs": 2}),
    "schedules, stopped inside an epoch": (Schedules, train_val, {"max_steps": 6}),
    "dict of dataloaders":
        (Dict, lambda: ({"one": data(8), "two": data(4, seed=2)}, None), {"max_epochs": 2}),
    "combined loader":
        (Dict, lambda: (CombinedLoader({"one": data(8), "two": data(4, seed=2)}, "min_size"), None), {"max_epochs": 2}),
    "stream, limited":
        (Learner, lambda: (DataLoader(Stream(), batch_size=None), None), {"max_epochs": 2, "limit_train_batches": 3}),
    "bare iterable": (Learner, lambda: (Sized(), None), {"max_epochs": 2}),
    "64-true": (Logging, train_val, {"max_epochs": 2, "precision": "64-true"}),
    "bf16-mixed": (Logging, train_val, {"max_epochs": 2, "precision": "bf16-mixed"}),
}  # fmt: skip

COUNTERS = ("current_epoch", "global_step", "num_training_batches", "is_last_batch", "should_stop")


@pytest.mark.parametrize("name", SCENARIOS)
def test_same_run(name: str, tmp_path: Path) -> None:
    module, loaders, arguments = SCENARIOS[name]
    theirs, mine = run_both(lambda make: Seen(make, module, loaders, dict(arguments), tmp_path))
    without_grad_norm(mine)
    assert_close(theirs.losses, mine.losses, "forward")
    if name.startswith("nothing from training_step"):  # Lightning steps on no gradients at all
        for calls in (theirs.hooks.calls, mine.hooks.calls):
            calls[:] = [call for call in calls if call[0] != "callback.on_before_optimizer_step"]
    assert_close(theirs.hooks.calls, mine.hooks.calls, "hooks")
    assert_close(theirs.checkpoint, mine.checkpoint, "checkpoint")
    for (key, a), b in zip(theirs.module.state_dict().items(), mine.module.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")
    assert_close(theirs.logger.rows, mine.logger.rows, "logger")
    assert_close(theirs.after_fit, mine.after_fit, "after fit")
    for a, b in zip(theirs.metrics.seen, mine.metrics.seen, strict=True):
        assert_close(a, at_most(a, b) if a[0] == "sanity check" else b, "metrics")
    assert_close(theirs.results, mine.results, "results")
    for counter in COUNTERS:
        assert getattr(theirs.trainer, counter) == getattr(mine.trainer, counter), counter


def at_most(theirs: Any, mine: Any) -> Any:
    """Remove metrics that only ``mine`` has: in a sanity check Lightning has the last dataloader's metrics only."""
    place, *metrics = mine
    return place, *({k: v for k, v in b.items() if k in a} for a, b in zip(theirs[1:], metrics, strict=True))


def without_grad_norm(seen: Seen) -> None:
    """Remove the norm logged by GradientClipping, which Lightning does not have."""
    places = [row for _, row in seen.logger.rows] + seen.after_fit
    places += [metrics for _, *both in seen.metrics.seen for metrics in both]
    for place in places:
        for name in ("grad_norm", "grad_norm_step", "grad_norm_epoch"):
            place.pop(name, None)
    seen.logger.rows = [(step, row) for step, row in seen.logger.rows if row.keys() - {"epoch"}]
