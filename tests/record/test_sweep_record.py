"""Several runs in Python: their records, their labels, and the best of them."""

import os

import pytest

from trainer import load_run, load_sweep
from trainer.errors import ConfigurationError
from trainer.record.find_checkpoint import find
from trainer.record.run_record import RunRecord
from trainer.record.sweep_record import Sweep, best_of


def write(folder, job, value, **more):
    facts = {
        "command": "fit",
        "status": "completed",
        "job": job,
        "overrides": ["command=fit", "+recipe=line", f"optimizer.lr={job}"],
        "metrics": {"val_loss": value, "train_loss": 1.0},
        "objective": {"metric": "val_loss", "mode": "min"},
        "paths": {"best_checkpoint": f"{folder}/{job}/best.ckpt"},
    }
    RunRecord(facts | more, folder / str(job)).write()


def test_sweep_has_a_table_and_a_best_run(tmp_path):
    for job, value in ((10, 0.5), (2, 0.25)):
        write(tmp_path, job, value)
    sweep = load_sweep(str(tmp_path))
    assert [row["job"] for row in sweep.table()] == [2, 10]
    names = ["job", "overrides", "objective", "val_loss", "seconds", "best_checkpoint", "last_checkpoint"]
    expected = [2, "optimizer.lr=2", 0.25, 0.25, None, f"{tmp_path}/2/best.ckpt", None]
    assert [sweep.table()[0][name] for name in names] == expected
    assert load_run(str(sweep.best.folder)).metrics["val_loss"] == 0.25


def test_folder_of_a_sweep_names_the_best_checkpoint_of_its_best_job(tmp_path):
    for job, value in ((0, 0.5), (1, 0.25)):
        write(tmp_path, job, value, paths={"best_checkpoint": f"/moved/{job}/checkpoints/best.ckpt"})
        (tmp_path / str(job) / "checkpoints").mkdir()
        for name in ("best.ckpt", "last.ckpt", "other.ckpt"):
            (tmp_path / str(job) / "checkpoints" / name).touch()
    assert find(tmp_path) == tmp_path / "1" / "checkpoints" / "best.ckpt"
    os.utime(tmp_path / "1" / "checkpoints" / "last.ckpt", (2**31, 2**31))
    assert find(tmp_path, latest=True) == tmp_path / "1" / "checkpoints" / "last.ckpt"
    for file in tmp_path.glob("*/checkpoints/*.ckpt"):
        file.unlink()
    with pytest.raises(ConfigurationError, match="a folder without checkpoints"):
        find(tmp_path, latest=True)


def test_folds(tmp_path):
    for job, (rate, fold, value) in enumerate(((1, 0, 0.5), (1, 1, 0.75), (2, 0, 0.25), (2, 1, 1.25), (3, 0, 0.125))):
        write(tmp_path, job, value, overrides=["command=fit", f"optimizer.lr={rate}", f"data.fold={fold}"])
    sweep = load_sweep(tmp_path)
    assert sweep.folds == (("optimizer.lr=1",), sweep.runs[:2])
    assert sweep.mean(sweep.runs[:2]) == (0.625, pytest.approx(0.17678, abs=1e-5))
    assert sweep.best is sweep.runs[0]  # of the best folds
    only = Sweep(sweep.runs[2:4])
    assert only.folds == ((), only.runs)
    assert Sweep(sweep.runs[3:]).folds is None
    write(tmp_path, 1, float("nan"), overrides=["command=fit", "optimizer.lr=1", "data.fold=1"])
    sweep = load_sweep(tmp_path)
    assert sweep.mean(sweep.runs[:2]) is None
    assert sweep.folds == (("optimizer.lr=2",), sweep.runs[2:4])


def test_only_completed_runs_are_the_best_of_a_sweep(tmp_path):
    write(tmp_path, 0, 0.5)
    write(tmp_path, 1, 0.25, status="pruned")
    sweep = load_sweep(tmp_path)
    assert sweep.best is sweep.runs[0]
    assert best_of(sweep.runs, ("val_loss", "min")) is sweep.runs[1]
    assert best_of(sweep.runs, None) is None


def labels(folder, *overrides):
    for job, words in enumerate(overrides):
        write(folder, job, 0.5, overrides=["+recipe=line", *words])
    sweep = load_sweep(folder)
    sweep.set_labels()
    return [run.label for run in sweep.runs]


def test_labels_are_the_overrides_that_differ(tmp_path):
    words = ["optimizer.lr=1"], ["optimizer.lr=2"], ["precision=16-mixed"]
    assert labels(tmp_path, *words) == ["optimizer.lr=1", "optimizer.lr=2", "16-mixed"]
    pruning = "++callbacks.pruning={_target_:trainer.callbacks.OptunaPruning,storage:'sqlite:///x',trial:3}"
    words = ["optimizer.lr=0.013311216080736894", pruning], ["model.act=v1.234567x", pruning], []
    assert labels(tmp_path, *words) == ["optimizer.lr=0.01331", "model.act=v1.234567x", "2"]
    words = ["optimizer.lr=0.0133111"], ["optimizer.lr=0.0133112"], []  # rounded, they would be equal
    assert labels(tmp_path, *words) == ["optimizer.lr=0.01331 [1]", "optimizer.lr=0.01331 [2]", "2"]


def test_label_of_a_run_that_continues_another_has_its_recipe(tmp_path):
    write(tmp_path, 0, 0.5, overrides=["+recipe=line", "optimizer.lr=1"], recipe="line")
    write(tmp_path, 1, 0.5, overrides=["ckpt=outputs/x/1", "optimizer.lr=1"], recipe="other")
    sweep = load_sweep(tmp_path)
    sweep.set_labels()
    assert [run.label for run in sweep.runs] == ["line", "other ckpt=outputs/x/1"]
    write(tmp_path, 1, 0.5, overrides=["ckpt=outputs/x/1", "optimizer.lr=2"], recipe="line")
    assert load_sweep(tmp_path).own() == [["optimizer.lr=1"], ["ckpt=outputs/x/1", "optimizer.lr=2"]]


def test_labels_that_are_equal(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name, 0, 0.5)
    sweep = Sweep([load_run(tmp_path / name / "0") for name in ("a", "b")])
    sweep.set_labels()
    assert [run.label for run in sweep.runs] == ["0 [1]", "0 [2]"]


def test_best_value_is_at_the_step_of_its_checkpoint(tmp_path):
    """Rows of loggers have the index of an update, one less than the step in the name of a checkpoint."""
    (tmp_path / "metrics.csv").write_text("step,val_loss\n12,0.5\n25,0.25\n38,0.75\n")
    curve = {"steps": [13, 26, 39], "values": [0.5, 0.25, 0.75]}
    for curves in ({}, {"metrics": {"val": {"val_loss": curve}}}):
        facts = {
            "monitor": {"metric": "val_loss", "mode": "min"},
            "best_score": 0.25,
            "metrics": {"val_loss": 0.75},
            "curves": curves,
        }
        run = RunRecord(facts, tmp_path)
        assert run.reached(("val_loss", "min"))[:2] == (0.25, 26)
