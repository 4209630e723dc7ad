"""Callbacks that read the metrics of an epoch read those that the module logs in ``on_train_epoch_end``."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.support import Regression, loader_of, loss_of, make_batches, make_trainer
from trainer.callbacks import OptunaPruning, ProgressBar, RunRecorder


class Module(Regression):
    """Logs the number of the epoch when it ends."""

    def on_train_epoch_end(self) -> None:
        self.log("number", float(self.current_epoch), prog_bar=True)


class Validated(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.net, batch), batch_size=4)
        self.log("twice", 10.0 + self.current_epoch, batch_size=4)


def fit(tmp_path: Any, callback: Any, module: type[Module], **arguments: Any) -> Any:
    trainer = make_trainer(tmp_path, max_epochs=3, callbacks=[callback], num_sanity_val_steps=0, **arguments)
    batches = loader_of(make_batches(2))
    trainer.fit(module(), batches, batches if module is Validated else None)
    return trainer


def test_line_of_an_epoch(tmp_path):
    file = io.StringIO()
    fit(tmp_path, ProgressBar(console=Console(file=file, width=120)), Validated, enable_progress_bar=True)
    lines = [line for line in file.getvalue().splitlines() if "number" in line and "epoch" in line]
    for epoch in range(3):
        line = next(line for line in lines if f"epoch {epoch + 1}/3" in line)
        assert f"number {float(epoch):#.4g}" in line


def test_record_of_a_run(tmp_path):
    recorder = RunRecorder(writes=False)
    fit(tmp_path, recorder, Validated)
    assert recorder.metrics["train"]["number"].state_dict()["values"] == [0.0, 1.0, 2.0]
    assert "val_loss" in recorder.metrics["val"]


class Trial:
    """A trial that keeps its reports, and is pruned after a number of them."""

    def __init__(self, most: int) -> None:
        self.reports: list[tuple[int, float]] = []
        self.most = most
        state = SimpleNamespace(is_finished=lambda: False)
        known = SimpleNamespace(intermediate_values={}, state=state)
        self.study = SimpleNamespace(get_trials=lambda deepcopy: [known])

    def report(self, value: float, step: int) -> None:
        self.reports.append((step, value))

    def should_prune(self) -> bool:
        return len(self.reports) >= self.most


@pytest.mark.parametrize(
    ("module", "metric", "values", "most"),
    [
        (Module, "number", [0.0, 1.0, 2.0], 2),
        (Validated, "number", [0.0, 1.0, 2.0], 9),
        (Validated, "twice", [10.0, 11.0, 12.0], 2),
        (Module, "nothing", [], 2),
    ],
)
def test_reports_to_a_study(tmp_path, monkeypatch, module, metric, values, most):
    trial = Trial(most)
    monkeypatch.setattr("trainer.callbacks.optuna_pruning.trial_of", lambda *_: trial)
    pruning = OptunaPruning("storage", "study", 0, metric)
    trainer = fit(tmp_path, pruning, module)
    assert trial.reports == [*enumerate(values[:most])]
    assert pruning.pruned is bool(values and most == 2)
    assert trainer.current_epoch == (2 if pruning.pruned else 3)
    again = OptunaPruning("storage", "study", 0, metric)
    again.load_state_dict(pruning.state_dict())
    assert again.validations == len(trial.reports)
