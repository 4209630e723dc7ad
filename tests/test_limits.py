"""When a fit validates by the clock."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch import Callback

from tests.parity import Classifier, data, ours, run_both
from trainer.limits import FitLimits
from trainer.progress import FitProgress


def test_time_decides_when_to_validate() -> None:
    limits = FitLimits(FitProgress(), max_epochs=1, val_check_seconds=5.0)
    with mock.patch("time.monotonic", side_effect=[10.0, 14.9, 15.0, 16.0, 20.0, 21.0]):
        limits.restart_validation_clock()
        assert [limits.validation_is_due(), limits.validation_is_due()] == [False, True]
        limits.restart_validation_clock()
        assert [limits.validation_is_due(), limits.validation_is_due()] == [False, True]


def test_who_stops_early_validates_whatever_the_time() -> None:
    limits = FitLimits(FitProgress(), max_epochs=1, val_check_seconds=1e9)
    limits.restart_validation_clock()
    limits.should_stop = True
    assert limits.validation_is_due()


@pytest.mark.parametrize(
    "arguments",
    [
        {"val_check_interval": "00:00:00:06"},
        {"val_check_interval": {"seconds": 6}, "check_val_every_n_epoch": None},
        {"val_check_interval": timedelta(seconds=6), "check_val_every_n_epoch": 2},
        {"val_check_interval": timedelta(seconds=6), "reload_dataloaders_every_n_epochs": 1},
        {"val_check_interval": timedelta(hours=1)},
        {"val_check_interval": timedelta(seconds=6), "fast_dev_run": 3},
    ],
    ids=str,
)
def test_lightning_validates_after_the_same_batches(arguments: dict[str, Any]) -> None:
    """On a clock that goes on by two seconds whenever somebody looks at it."""

    class When(Callback):
        def __init__(self) -> None:
            self.seen: list[tuple[int, int]] = []

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            self.seen.append((trainer.current_epoch, trainer.global_step))

    def scenario(make: Any) -> Any:
        when, seconds = When(), iter(range(0, 1000, 2))
        trainer = make(max_epochs=4, num_sanity_val_steps=0, callbacks=[when], **arguments)
        with mock.patch("time.monotonic", side_effect=lambda: float(next(seconds))):
            trainer.fit(Classifier(), data(8), data(2))
        return when.seen, trainer.val_check_batch

    theirs, mine = run_both(scenario)
    assert mine == theirs


def test_model_checkpoint_is_told_of_the_time() -> None:
    assert ours(val_check_interval="00:00:01:00")._val_check_time_interval == 60.0
    assert ours()._val_check_time_interval is None
