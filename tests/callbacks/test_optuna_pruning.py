"""A run reports to its Optuna trial, and ends if the study prunes it."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import project  # noqa: F401
from trainer.cli import main

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.filterwarnings("default")  # Lightning warns of tiny data and few workers

STORAGE = "sqlite:///study.db"
LINE = ["fit", "+recipe=line", "logger=none", "callbacks=none", "hydra.run.dir=run", "trainer.max_epochs=4"]


@pytest.fixture
def study(project):  # noqa: F811
    """A study with one excellent trial, and one that has started."""
    study = optuna.create_study(storage=STORAGE, study_name="s", direction="minimize")
    good = study.ask()
    for step in range(4):
        good.report(1e-9, step)
    study.tell(good, 1e-9)
    study.ask()
    return study


def pruning(trial=1, metric="val_loss", pruner="{name:median,n_startup_trials:1,n_warmup_steps:2}"):
    settings = f"storage:'{STORAGE}',study_name:s,trial:{trial},metric:{metric},pruner:{pruner}"
    return f"++callbacks.pruning={{_target_:trainer.callbacks.OptunaPruning,{settings}}}"


def result():
    return json.loads(Path("run/run.json").read_text())


def test_trial_that_is_behind_ends_its_run(study):
    assert main([*LINE, pruning(), "objective.metric=val_loss"]) == 0
    trial = study.get_trials()[1]
    assert list(trial.intermediate_values) == [0, 1, 2]  # the third validation is the first that counts
    assert (result()["status"], result()["epochs"]) == ("pruned", 3)
    assert trial.intermediate_values[2] == pytest.approx(result()["metrics"]["val_loss"])
    assert trial.state.name == "RUNNING"  # it is the sweep that closes it


@pytest.mark.whole
def test_repeated_trial_reports_new_values_only_and_a_finished_one_none(study, recwarn):
    optuna.trial.Trial(study, study.get_trials()[1]._trial_id).report(7.0, 0)
    assert main([*LINE, pruning(pruner="{name:none}")]) == 0
    assert (result()["status"], result()["epochs"]) == ("completed", 4)
    values = study.get_trials()[1].intermediate_values
    assert (list(values), values[0]) == ([0, 1, 2, 3], 7.0)
    assert "already reported" not in "".join(str(warning.message) for warning in recwarn)
    study.tell(1, 5.0)
    assert main([*LINE, pruning()]) == 0
    assert "Trial 1 of the study s is over" in "".join(str(warning.message) for warning in recwarn)
