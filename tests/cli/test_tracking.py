"""``logger=wandb`` and ``logger=mlflow``, with the real packages: W&B offline, MLflow in a database of SQLite."""

import csv
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from trainer.cli import main, tracking
from trainer.cli.config_checks import validate
from trainer.cli.parsing import UsageError, read
from trainer.common import redaction
from trainer.loggers import LoggedRun
from trainer.record.run_record import read_json

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's, of SQLAlchemy

FIT = ["fit", "+recipe=line", "callbacks.learning_rate_monitor=null"]
BOTH = ["logger=[csv,wandb,mlflow]", "logger.wandb.offline=true"]


@pytest.fixture(autouse=True)
def alone(project, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr("mlflow.tracking.context.git_context._resolve_git_info", dict)  # it leaves a git behind
    monkeypatch.setenv("HOME", str(project / "home"))  # folders of W&B and MLflow
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


class Wandb:
    """A run of W&B, with the arguments of its calls."""

    def __init__(self, run):
        self.run, self.rows, self.artifacts, self.exit_code = run, [], [], None

    def values(self, name):
        return [(row["trainer/global_step"], row[name]) for row in self.rows if name in row]


@pytest.fixture
def wandb_runs(monkeypatch):
    """All runs of W&B."""
    from wandb.sdk.wandb_run import Run

    runs = []

    def watch(method, note):
        original = getattr(Run, method)

        def call(run, *args, **options):
            if not runs or runs[-1].run is not run:
                runs.append(Wandb(run))
            note(runs[-1], args[0] if args else options.get("exit_code"))
            return original(run, *args, **options)

        monkeypatch.setattr(Run, method, call)

    watch("log", lambda run, row: run.rows.append(row))
    watch("log_artifact", lambda run, artifact: run.artifacts.append(artifact))
    watch("finish", lambda run, code: setattr(run, "exit_code", code))
    return runs


class Mlflow:
    """Return the content of the database, which has one run."""

    def __init__(self, experiment="line", store="outputs/mlflow.db"):
        from mlflow.tracking import MlflowClient

        client = MlflowClient(f"sqlite:///{Path(store).absolute()}")
        (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
        self.id, self.status, self.name = run.info.run_id, run.info.status, run.info.run_name
        self.parameters, self.tags = run.data.params, run.data.tags
        self.values = lambda name: [(m.step, m.value) for m in client.get_metric_history(self.id, name)]
        self.artifacts = lambda path=None: [file.path for file in client.list_artifacts(self.id, path)]


@pytest.fixture
def database(mlflow_database):
    """The default database, without runs."""
    Path("outputs").mkdir()
    return Path(shutil.copy(mlflow_database, "outputs"))


def rows():
    with Path("run/csv/metrics.csv").open() as file:
        return [(int(row["step"]), float(row["val_loss"])) for row in csv.DictReader(file) if row["val_loss"]]


def approximately(points):
    return [(step, pytest.approx(value)) for step, value in points]


@pytest.mark.whole
@pytest.mark.usefixtures("database")
def test_run_its_resume_and_its_test_are_one_run_in_each_logger(monkeypatch, wandb_runs):
    words = [*FIT, *BOTH, "resume=auto", "hydra.run.dir=run"]
    artifacts = ["logger.wandb.log_model=true", "logger.mlflow.log_model=true", "logger.wandb.offline=false"]
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert main([*words, *artifacts, "trainer.max_epochs=1"]) == 0
    (wandb,), mlflow = wandb_runs, Mlflow()
    saved = {file.stem for file in Path("run/checkpoints").iterdir()}
    assert set(mlflow.artifacts()) == saved
    assert mlflow.artifacts("last") == ["last/aliases.txt", "last/last.ckpt", "last/metadata.yaml"]
    sent = [(artifact.type, artifact.name) for artifact in wandb.artifacts]
    assert sent == [("model", f"model-{wandb.run.id}")] * len(saved)
    assert (wandb.run.config["optimizer"]["lr"], mlflow.parameters["optimizer/lr"]) == (0.1, "0.1")
    assert (wandb.exit_code, mlflow.status) == (0, "FINISHED")
    assert (wandb.run.project, wandb.run.name, wandb.run.group) == ("line", "run", "")
    assert mlflow.name == "run"

    assert main([*words, "trainer.max_epochs=2"]) == 0  # which MLflow would refuse to change
    assert [step for step, _ in rows()] == [3, 7]
    assert wandb_runs[1].run.id == wandb.run.id
    assert [run.values("val_loss") for run in wandb_runs] == [approximately([row]) for row in rows()]
    assert Mlflow().values("val_loss") == approximately(rows())
    assert read_json(Path("run"))["tracking"] == {"wandb": wandb.run.id, "mlflow": mlflow.id}

    assert main(["test", "ckpt=run", "hydra.run.dir=tested"]) == 0
    tested, mlflow = wandb_runs[2], Mlflow()
    assert tested.run.id == wandb.run.id
    assert tested.values("test_loss") == mlflow.values("test_loss")
    assert len(tested.values("test_loss")) == 1
    assert "command" not in tested.run.config
    assert mlflow.parameters["command"] == "fit"


@pytest.mark.whole
@pytest.mark.usefixtures("database")
def test_failed_job_of_a_sweep_has_its_group(wandb_runs):
    job = ["model.fail_at=2", "hydra.run.dir=multirun/line/today/3", "hydra.job.num=3"]
    assert main([*FIT, *BOTH, *job]) == 1
    (wandb,), mlflow = wandb_runs, Mlflow()
    assert (wandb.run.name, wandb.run.group) == ("today/3", "today")
    assert (mlflow.name, mlflow.tags["sweep"]) == ("today/3", "today")
    assert (wandb.exit_code, mlflow.status) == (1, "FAILED")


def test_secrets_are_not_logged_as_settings(monkeypatch):
    monkeypatch.setitem(redaction._values, "hush-hush", "TOKEN")
    settings = {
        "data": {"password": "1234", "root": "s3/hush-hush", "limit": None},
        "model": {"width": 3, "optimizer": {"lr": 0.1, "weight_decay": None}},
        "logger": {"wandb": {}},
    }
    assert tracking.settings_to_log(settings) == {
        "data": {"password": "***", "root": "s3/${oc.env:TOKEN}"},
        "model": {"width": 3, "optimizer": {"lr": 0.1}},
    }


OPENS = """
from pathlib import Path
from trainer.cli import tracking
from trainer.loggers import LoggedRun
node = {"_target_": "lightning.pytorch.loggers.MLFlowLogger", "tracking_uri": None}
tracking.open_stores(tracking.complete({"m": node}, LoggedRun(Path("run"), "line"), {}))
"""


@pytest.mark.whole
def test_parallel_jobs_create_one_database(python):
    jobs = [python.start("-c", OPENS, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for job in jobs:
        err = job.communicate(timeout=120)[1]
        assert job.returncode == 0, err
    with closing(sqlite3.connect("outputs/mlflow.db")) as database:
        assert sorted(database.execute("select name from experiments")) == [("Default",), ("line",)]


def test_without_an_account(capsys):
    assert main([*FIT, "logger=wandb"]) == 1
    assert "No API key configured" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "absent", "complaint"),
    [
        ("logger=wandb", "wandb", "logger.wandb needs wandb, which is not installed: pip install wandb"),
        ("logger=mlflow", "alembic", "logger.mlflow needs alembic, which is not installed: pip install mlflow-skinny"),
        ("logger=mlflow logger.mlflow.tracking_uri=http://host:5000", "alembic", ""),
        ("logger=wandb logger.wandb.log_model=true checkpoint_files.sharded=true", "", "checkpoints are folders"),
        ("logger=wandb logger.wandb.log_model=all checkpoint_files.asynchronous=true", "", "before it is writt"),
    ],
)
def test_mistakes(words, absent, complaint, monkeypatch):
    monkeypatch.setattr("trainer.common.packages.is_installed", lambda name: name != absent)
    if not complaint:
        validate(read([*FIT, *words.split()]))
        return
    with pytest.raises(UsageError) as caught:
        validate(read([*FIT, *words.split()]))
    assert complaint in str(caught.value)


def test_words_of_the_packages_themselves_count(tmp_path, database, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    node = {"_target_": "lightning.pytorch.loggers.WandbLogger", "project": None, "name": None, "id": "mine"}
    completed = tracking.complete({"w": node, "csv": {}}, LoggedRun(tmp_path / "a", "line"), {"wandb": "x"})
    assert completed == {"w": node | {"name": "a", "log_model": False}, "csv": {}}
    node = {"_target_": "lightning.pytorch.loggers.MLFlowLogger", "tracking_uri": None}
    database.rename(tmp_path / "other.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/other.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    loggers = tracking.complete({"m": node}, LoggedRun(tmp_path / "a", "line"), {"mlflow": "gone"})
    tracking.open_stores(loggers)
    completed = loggers["m"]
    assert completed["tracking_uri"] == f"sqlite:///{tmp_path}/other.db"
    assert (completed["experiment_name"], completed["run_name"]) == ("theirs", "a")
    assert completed["run_id"] is None  # there is no such run
    assert "artifact_location" not in completed
