"""The page of a sweep, and of a comparison."""

import json
from pathlib import Path

import pytest

from tests.cli.report.conftest import ROWS, facts, report
from trainer.cli.report.several import _colors
from trainer.record.run_record import RunRecord

FOLDER = Path("multirun/digits/one")


def job(number, accuracy, **more):
    overrides = ["+recipe=digits", f"optimizer.lr={number / 10}", "precision=16-mixed", "command=fit"]
    metrics = {"val_acc": accuracy, "val_loss": 1.5}
    objective = {"metric": "val_acc", "mode": "max", "value": accuracy}
    return facts(job=number, overrides=overrides, metrics=metrics, objective=objective, best_score=None) | more


@pytest.fixture
def sweep(make_run):
    def make(*jobs, rows=None):
        for record in jobs:
            own = (rows or ROWS).replace("0.75", str(record["metrics"].get("val_acc", 0.75)))
            make_run(str(FOLDER / str(record["job"])), record=record, files={"csv/metrics.csv": own})
        make_run()
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / "multirun.yaml").write_text("")
        return FOLDER

    return make


def test_mean_of_folds(sweep):
    folds = [
        job(number, value, overrides=["+recipe=a", f"data.fold={number}"]) for number, value in ((0, 0.5), (1, 1.0))
    ]
    page = report(sweep(*folds))
    assert "Mean val_acc 0.75 ± 0.35 over 2 jobs" in page.text
    assert "Highest val_acc" not in page.text
    assert "best" not in page.sections["jobs"]


def test_jobs_and_curves(sweep):
    jobs = [
        job(1, 0.5),
        job(2, 0.875),
        job(3, 0.9, status="pruned"),  # is not completed
        job(10, 0.25, status="failed", error="RuntimeError: asked to"),
        job(11, 0.75, status="running", overrides=["+recipe=digits", "precision=16-mixed"]),
    ]
    page = report(sweep(*jobs))
    assert "Sweep of 5 jobs digits" in page.text
    assert "Jobs 5 3 completed or pruned" in page.text
    for count in ("Completed 2", "Failed 1", "Pruned 1", "Running 1"):
        assert count in page.text
    assert "Highest val_acc at the end 0.875 optimizer.lr=0.2" in page.text
    jobs = page.sections["jobs"]
    assert "Equal in all: +recipe=digits precision=16-mixed" in jobs
    assert "Job Settings Status Last val_acc at step val_loss Time Samples/s Memory Skipped" in jobs
    assert "2 optimizer.lr=0.2 best Completed 0.875 4 1.5 0:01:02 123.4 3.0 GiB 1" in jobs
    assert jobs.index("optimizer.lr=0.2") < jobs.index("optimizer.lr=1.0")  # by number, not by name
    assert page.titles[:4] == ["Training loss", "val_loss", "val_acc", "Learning rate"]
    lines = page.lines("val_acc")
    assert list(lines)[-1] == "optimizer.lr=0.2"  # the best one on top of the others
    assert [line["y"][-1] for line in lines.values()] == [0.5, 0.9, 0.25, 0.75, 0.875]
    assert [line["color"] for line in lines.values()] == [0, 2, 3, 4, 1]
    assert "RuntimeError: asked to" in page.sections["job-3"]
    assert "backward pass overflows in 16 bits (step 2)" in page.sections["job-0"]
    assert {"#job-0", "#job-1", "#job-4"} <= set(page.having("a", "href"))


def test_job_without_a_curve_takes_no_color(tmp_path):
    curve = {"losses": {"steps": [1, 2], "values": [0.5, 0.25]}}
    runs = [RunRecord({"curves": {} if number % 2 else curve}, None) for number in range(12)]
    assert _colors(runs, None, None) == [0, None, 1, None, 2, None, 3, None, 4, None, 5, None]


def test_more_jobs_than_colors(sweep):
    """Gray lines are drawn below the others, and do not affect the axes."""
    rows = "\n".join(["epoch,step,val_acc", *(f"0,{step},{step % 7}" for step in range(2000)), "0,2000,0.75", ""])
    jobs = [job(number, (11 - number) / 16 if number < 11 else -1e30) for number in range(12)]
    page = report(sweep(*jobs, rows=rows))
    lines = page.lines("val_acc")
    assert all(48 <= len(line["x"]) <= 300 for line in lines.values())
    colors = {name: line["color"] for name, line in lines.items()}
    assert [name for name, color in colors.items() if color < 0] == list(lines)[:4]
    assert set(list(lines)[:4]) == {f"optimizer.lr={number / 10}" for number in range(8, 12)}
    assert sorted(color for color in colors.values() if color >= 0) == [*range(8)]
    assert list(lines)[-1] == "optimizer.lr=0.0"
    assert "the other 4" in page.sections["curves"]
    (chart,) = (data for data in page.data if "-1e+30" in str(data))
    assert -1 < chart["y"][0] < chart["y"][1] < 7


def test_comparison(sweep):
    goal = {"metric": "val_loss", "mode": "min"}
    folder = sweep(*(job(n, 0.5, objective=goal, metrics={"val_loss": v}) for n, v in enumerate((3.0, 1.0))))
    verdict = {"text": "val_acc within 0.1 points, 1.6x faster.", "advice": ["Try <more>."], "met": True}
    runs = [{"run_dir": "elsewhere/0", "verdict": None}, {"run_dir": "elsewhere/1", "verdict": verdict}]
    (folder / "compare.json").write_text(json.dumps({"runs": runs, "conditions": ["Equal in all runs: seed 42."]}))
    page = report(folder)
    assert "Comparison of 2 jobs" in page.text
    assert "Lowest val_loss at the end 1 optimizer.lr=0.1" in page.text
    assert "Verdicts optimizer.lr=0.1: val_acc within 0.1 points, 1.6x faster. Try <more>." in page.sections["jobs"]
    assert "Equal in all runs: seed 42." in page.sections["jobs"]


def test_sweep_without_jobs_and_without_curves(sweep, make_run):
    assert "Sweep of 0 jobs" in report(sweep()).text
    make_run(str(FOLDER / "0"), record=job(0, 0.5, curves={}, skipped_steps=0), files={"csv/metrics.csv": None})
    assert "No job has curves" in report(FOLDER).sections["curves"]
