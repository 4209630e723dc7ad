"""Metrics that a caller keeps after a run do not change in the next run; in a run, they are live."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from tests.support import Regression, loader_of, loss_of, make_batches, make_trainer

NAMES = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


class Module(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, prog_bar=True, batch_size=4)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.net, batch), prog_bar=True, batch_size=4)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", loss_of(self.net, batch), prog_bar=True, batch_size=4)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


def batches() -> Any:
    return loader_of(make_batches(2))


def kept_of(trainer: Any) -> dict[str, dict[str, Any]]:
    return {name: getattr(trainer, name) for name in NAMES}


@pytest.mark.parametrize(
    ("first", "then"), [("fit", "test"), ("validate", "fit"), ("test", "predict"), ("test", "validate")]
)
def test_run_leaves_the_metrics_of_the_run_before_as_they_were(tmp_path, first, then):
    trainer, module = make_trainer(tmp_path, logger=CSVLogger(tmp_path), log_every_n_steps=1), Module()

    def run(what: str) -> None:
        arguments = (batches(), batches()) if what == "fit" else (batches(),)
        getattr(trainer, what)(module, *arguments)

    run(first)
    kept = kept_of(trainer)
    copies = {name: dict(metrics) for name, metrics in kept.items()}
    assert all(copies.values())
    trainer.fit_loop.max_epochs = 2
    run(then)
    for name, metrics in kept.items():
        assert metrics.keys() == copies[name].keys(), name
        assert all(metrics[key] is value for key, value in copies[name].items()), name
        now = getattr(trainer, name)
        assert now is not metrics
        assert bool(now) is (then != "predict"), name
        if first != "fit" and then in ("validate", "test") and first != then:
            assert not now.keys() & metrics.keys()
