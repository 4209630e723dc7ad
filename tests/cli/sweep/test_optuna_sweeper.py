"""Sweeps with Optuna: the space, the study and its direction, resuming, and reported values."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import write
from trainer.cli import main
from trainer.record.run_record import read_json

optuna = pytest.importorskip("optuna")

OBJECTIVE = ["objective.metric=val_loss"]
SWEEP = ["fit", "-m", "+recipe=line", "hydra/sweeper=optuna", "hydra.sweep.dir=jobs", *OBJECTIVE]
LR = "optimizer.lr=tag(log,interval(1e-4,1))"


class Trials:
    """Jobs with a loss that depends on the learning rate: the best is 0.01."""

    def __init__(self, started):
        self.started = started
        self.ends = {}  # unusual ones, by number

    def end(self, job):
        ends = self.ends.pop(int(job.value("hydra.job.num")), "completed")
        if ends == "interrupted":
            job.returncode = 130
            raise KeyboardInterrupt
        if ends == "failed":
            return 1
        loss = math.nan if ends == "diverged" else abs(math.log10(float(job.value("optimizer.lr"))) + 2)
        status, objective = ends.replace("diverged", "completed"), {"metric": "val_loss", "mode": "min"}
        return {"status": status, "metrics": {"val_loss": loss}, "run_dir": str(job.folder), "objective": objective}

    @property
    def rates(self):
        return [float(job.value("optimizer.lr")) for job in self.started]


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """A database without studies, because Optuna takes seconds to create one."""
    file = tmp_path_factory.mktemp("optuna") / "study.db"
    optuna.storages.RDBStorage(f"sqlite:///{file}").engine.dispose()
    return file


@pytest.fixture
def trials(jobs, database, monkeypatch):
    trials = Trials(jobs.started)
    Path("jobs").mkdir()
    shutil.copy(database, "jobs")
    monkeypatch.setattr(jobs, "ends", trials.end)
    return trials


def study(storage="sqlite:///jobs/study.db", name="line"):
    return optuna.load_study(study_name=name, storage=storage)


def test_trials_are_jobs_and_the_study_has_their_results(trials, capsys):
    Path("jobs/study.db").unlink()
    trials.ends = {1: "failed", 2: "pruned", 3: "diverged"}
    assert main([*SWEEP, LR, "hydra.sweeper.n_trials=5"]) == 1  # one has failed
    finished = study().get_trials()
    assert [trial.state.name for trial in finished] == ["COMPLETE", "FAIL", "PRUNED", "FAIL", "COMPLETE"]
    assert study().direction.name == "MINIMIZE"
    assert [trial.params["optimizer.lr"] for trial in finished] == trials.rates
    best = study().best_trial
    numbers = json.loads(Path("jobs/summary.json").read_text())
    assert [job["job"] for job in numbers if job["best"]] == [best.number]
    assert all(1e-4 <= rate <= 1 for rate in trials.rates)
    out = capsys.readouterr().out
    assert f"fit +recipe=line objective.metric=val_loss optimizer.lr={best.params['optimizer.lr']}\n" in out
    assert "OptunaPruning" not in out
    words = [word for word in trials.started[0].command[1:] if not word.startswith("hydra.")]
    assert main([*words, "--cfg", "job"]) == 0


@pytest.mark.whole
def test_seed_makes_the_same_trials(trials):
    words = [*SWEEP[:4], *OBJECTIVE, LR, "+hydra.sweeper.sampler.n_startup_trials=1", "hydra.sweeper.n_trials=2"]
    found = []
    for folder, seed in (("one", 42), ("again", 42), ("other", 1)):
        trials.started.clear()
        Path(folder).mkdir()
        shutil.copy("jobs/study.db", folder)
        assert main([*words, f"hydra.sweep.dir={folder}", f"seed={seed}"]) == 0
        found.append(trials.rates)
    assert found[0] == found[1] != found[2]


@pytest.mark.whole
def test_same_sweep_resumes_interrupted_and_missing_trials(trials, capsys):
    trials.ends = {2: "interrupted"}
    words = [*SWEEP, LR, "hydra.sweeper.n_trials=4"]
    assert main(words) == 130
    assert [trial.state.name for trial in study().get_trials()] == ["COMPLETE", "COMPLETE", "RUNNING"]
    capsys.readouterr()
    assert main(words) == 0
    finished = study().get_trials()
    assert [trial.state.name for trial in finished] == ["COMPLETE"] * 4
    assert [trial.user_attrs["job"] for trial in finished] == [0, 1, 2, 3]
    # the third one twice
    assert trials.rates == [trial.params["optimizer.lr"] for trial in (*finished[:3], finished[2], finished[3])]
    assert len(set(trials.rates)) == 4  # a seed does not restart the study
    assert len(json.loads(Path("jobs/summary.json").read_text())) == 4  # complete trials count
    before = len(trials.started)
    assert main(words) == 0  # nothing is left, and the table has the results
    assert len(trials.started) == before
    assert "Sweep of 4 jobs" in capsys.readouterr().out


@pytest.mark.whole
def test_another_sweep_may_share_the_study(trials):
    Path("jobs/study.db").rename("shared.db")
    storage = [f"hydra.sweeper.storage=sqlite:///{Path('shared.db').resolve().as_posix()}"]
    storage.append("hydra.sweeper.study_name=both")
    assert main([*SWEEP, LR, *storage, "hydra.sweeper.n_trials=1"]) == 0
    assert study("sqlite:///shared.db", "both").ask().number == 1  # of a third, running trial
    assert main([*SWEEP, LR, *storage, "hydra.sweeper.n_trials=4", "hydra.sweep.dir=other"]) == 0
    states = [trial.state.name for trial in study("sqlite:///shared.db", "both").get_trials()]
    assert states == ["COMPLETE", "RUNNING", "COMPLETE", "COMPLETE"]
    assert [Path(read_json(Path("other", str(job)))["run_dir"]).name for job in (0, 1)] == ["0", "1"]


@pytest.mark.whole
def test_every_kind_of_value(trials, capsys):
    space = [
        LR, "data.batch_size=tag(log,int(interval(2,64)))", "seed=range(1,10,3)", "precision=32,bf16",
        "model.start=choice(0.5,-0.5)", "trainer.gradient_clip_val=interval(0,1)", "logger=glob(c*)",
    ]  # fmt: skip
    assert main([*SWEEP, *space, "hydra.sweeper.n_trials=1"]) == 0
    (trial,) = study().get_trials()
    assert {name: repr(values) for name, values in trial.distributions.items()} == {
        "optimizer.lr": "FloatDistribution(high=1.0, log=True, low=0.0001, step=None)",
        "data.batch_size": "IntDistribution(high=64, log=True, low=2, step=1)",
        "seed": "IntDistribution(high=7, log=False, low=1, step=3)",
        "precision": "CategoricalDistribution(choices=('32-true', 'bf16-mixed'))",
        "model.start": "CategoricalDistribution(choices=('0.5', '-0.5'))",
        "trainer.gradient_clip_val": "FloatDistribution(high=1.0, log=False, low=0.0, step=None)",
        "logger": "CategoricalDistribution(choices=('csv',))",
    }
    command = trials.started[0].command
    for name, value in trial.params.items():
        assert f"{name}={value}" in command


@pytest.mark.whole
def test_space_in_a_config_a_grid_and_a_batch(trials, capsys):
    space = '{mode: MULTIRUN, sweeper: {params: {optimizer.lr: "0.1,0.01", seed: "range(1,3)"}}}'
    write(Path(), {"conf/sweep/mine.yaml": f"# @package _global_\nhydra: {space}\n"})
    words = ["fit", "+recipe=line", "+sweep=mine", *SWEEP[3:], "hydra.sweeper.sampler.name=grid"]
    assert main([*words, "hydra.sweeper.n_jobs=4"]) == 0
    points = [{name: trial.params[name] for name in ("optimizer.lr", "seed")} for trial in study().get_trials()]
    assert points == [{"optimizer.lr": lr, "seed": seed} for lr in ("0.1", "0.01") for seed in (1, 2)]
    assert main([*words, LR]) == 2
    assert "optimizer.lr is an interval, but the sampler grid needs a list of values" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([LR, "objective.metric=null"], "Set objective.metric=val_loss"),
        (["optimizer.lr=0.1"], "hydra/sweeper=optuna without a search space"),
        ([LR, "hydra.sweeper.n_trials=0"], "hydra.sweeper.n_trials is 0, expected at least 1."),
        (
            ["optimizer.lr=interval(0.1,1)", "hydra.sweeper.sampler.name=grid"],
            "the sampler grid needs a list of values",
        ),
        ([LR, "hydra.sweeper.sampler.name=tpee"], "The sampler is tpee, expected one of tpe, random"),
        ([LR, "+hydra.sweeper.pruner.patience=1"], "The pruner median does not take these settings"),
        (["optimizer.lr=tag(log,interval(0,1))"], "Cannot choose from 'optimizer.lr=tag(log,interval(0,1))'"),
        (["precision=interval(0,1)"], "Config group 'precision' has no option '0.0'."),
    ],
)
def test_mistakes(trials, capsys, words, complaint):
    shutil.rmtree("jobs")
    assert main([*SWEEP, *words]) == 2
    assert complaint in capsys.readouterr().err
    assert not trials.started
    assert not Path("jobs").exists()


def test_metric_that_no_job_logs_ends_the_sweep_after_the_first_one(trials, capsys):
    assert main([*SWEEP, LR, "objective={metric: val_acc, mode: max}", "hydra.sweeper.n_trials=5"]) == 2
    assert len(trials.started) == 1
    assert "objective.metric is val_acc, which job 0 did not log." in capsys.readouterr().err


@pytest.mark.whole
def test_study_of_another_kind_is_not_changed(trials, capsys):
    assert main([*SWEEP, "optimizer.lr=0.1,0.2", "hydra.sweeper.n_trials=1"]) == 0
    assert main([*SWEEP, "optimizer.lr=0.1,0.2", "objective.mode=max", "hydra.sweeper.n_trials=2"]) == 2
    assert "objective.mode is max, but the study" in capsys.readouterr().err
    assert main([*SWEEP, "optimizer.lr=0.1,0.3", "hydra.sweeper.n_trials=2"]) == 2
    assert re.search("has another search space: .* Choose another name", capsys.readouterr().err)


def test_interval_requires_the_sweeper_and_the_sweeper_its_package(trials, monkeypatch, capsys):
    assert main(["fit", "-m", "+recipe=line", "optimizer.lr=interval(0,1)"]) == 2
    assert "is an interval, which only hydra/sweeper=optuna" in capsys.readouterr().err
    monkeypatch.setattr("trainer.common.packages.is_installed", lambda name: False)
    assert main([*SWEEP, LR]) == 2
    assert "hydra/sweeper=optuna needs optuna, which is not installed: pip install optuna" in capsys.readouterr().err
