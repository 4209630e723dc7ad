"""The objective of a run: the metric, its direction, and its value at the end."""

import json
from pathlib import Path

import pytest

from trainer.cli import main
from trainer.cli.objective import choose, monitored
from trainer.record.run_record import RunRecord
from trainer.record.sweep_record import Sweep

pytestmark = pytest.mark.filterwarnings("default")  # Lightning warns of tiny data and few workers

LINE = ["+recipe=line", "logger=none", "hydra.run.dir=run"]
MONITOR = {"metric": "val_f1", "mode": "max"}


@pytest.mark.parametrize(
    ("node", "monitor", "chosen"),
    [
        (None, None, None),
        ({"metric": None, "mode": None}, MONITOR, ("val_f1", "max")),
        ({"metric": None, "mode": "min"}, MONITOR, ("val_f1", "min")),
        ({"metric": "val_loss", "mode": None}, MONITOR, ("val_loss", "min")),
        ({"metric": "val_acc", "mode": None}, None, ("val_acc", "max")),
        ({"metric": "test_rmse"}, None, ("test_rmse", "min")),
        ({"metric": "a", "mode": "min"}, None, ("a", "min")),
        ({"metric": "val_f1"}, {"metric": "val_f1", "mode": "min"}, ("val_f1", "min")),
    ],
)
def test_selected_metric_and_direction(node, monitor, chosen):
    assert choose(node, monitor) == chosen


def test_checkpoints_come_before_early_stopping():
    stopping = {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "b", "mode": "max"}
    checkpoint = {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "monitor": "a"}
    other = {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "monitor": None}
    assert monitored({"x": None, "y": stopping, "z": checkpoint}) == {"metric": "a", "mode": "min"}
    assert monitored({"y": stopping, "z": other}) == {"metric": "b", "mode": "max"}
    assert monitored({"z": other}) is None
    assert monitored({}) is None


def run_with(value, metric="a", mode="max", status="completed"):
    facts = {"status": status, "metrics": {"a": value}, "objective": {"metric": metric, "mode": mode}}
    return RunRecord(facts, Path())


@pytest.mark.parametrize(("value", "expected"), [(0.5, 0.5), (float("nan"), None), (float("inf"), None)])
def test_only_finite_values_are_used(value, expected):
    assert run_with(value).result == expected
    assert run_with(value, metric="b").result is None
    assert run_with(value, status="failed").result is None


def test_best_of_several_has_one_direction():
    assert Sweep([run_with(0.25, mode="min"), run_with(0.75, mode="min")]).best.objective_value == 0.25
    assert Sweep([run_with(0.25), run_with(0.5, mode="min")]).best is None


def test_value_is_that_of_the_best_checkpoint():
    kept = {"monitor": {"metric": "a", "mode": "max"}, "best_score": 0.9}
    early, late = run_with(0.5), run_with(0.75)
    early.facts |= kept
    assert (early.objective_value, early.reached(("a", "max")).is_best) == (0.9, True)
    assert Sweep([early, late]).best is early
    other = run_with(0.5, mode="min")  # its checkpoints are chosen the other way
    other.facts |= kept
    assert other.objective_value == 0.5


@pytest.mark.parametrize("monitor", ["auto", "null"])
def test_record_has_the_value_of_the_objective(project, monkeypatch, monitor):
    """The learning rate makes the line worse from epoch to epoch."""
    from trainer.cli import execution as run

    returned = []
    monkeypatch.setattr(run, "task", lambda config, task=run.task: returned.append(task(config)))
    settings = [f"callbacks.model_checkpoint.monitor={monitor}", "objective.metric=val_loss", "optimizer.lr=2"]
    assert main(["fit", *LINE, *settings]) == 0
    record, best = json.loads(Path("run/run.json").read_text()), monitor == "auto"
    assert ("best_checkpoint" in record["paths"], record["best_score"] is not None) == (best, best)
    assert returned == [record["best_score"] if best else record["metrics"]["val_loss"]]
    assert record["objective"] == {"metric": "val_loss", "mode": "min", "value": returned[0]}


def test_missing_metric_is_reported(project, capsys):
    assert main(["fit", *LINE, "objective={metric: val_los, mode: min}"]) == 0
    assert "objective.metric is val_los, which the run did not log. Did you mean 'v" in capsys.readouterr().err
    assert json.loads(Path("run/run.json").read_text())["objective"]["value"] is None
