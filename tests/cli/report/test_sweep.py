"""The page of a sweep, and of a comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.report.conftest import ROWS, facts, report

FOLDER = Path("multirun/digits/one")


def job(number: int, accuracy: float, **more):
    overrides = ["+recipe=digits", f"optimizer.lr={number / 10}", "precision=16-mixed", "command=fit"]
    metrics = {"val_acc": accuracy, "val_loss": 1.5}
    objective = {"metric": "val_acc", "mode": "max", "value": accuracy}
    return facts(job=number, overrides=overrides, metrics=metrics, objective=objective, best_score=None) | more


@pytest.fixture
def sweep(make_run):
    def make(*jobs, name=FOLDER):
        for record in jobs:
            rows = ROWS.replace("0.75", str(record["metrics"].get("val_acc", 0.75)))
            make_run(str(name / str(record["job"])), record=record, files={"csv/metrics.csv": rows})
        (name / "multirun.yaml").write_text("")
        return name

    return make


def test_jobs_and_curves(sweep):
    page = report(sweep(job(1, 0.5), job(2, 0.875), job(10, 0.25, status="failed", error="RuntimeError: asked to")))
    assert "Sweep of 3 jobs digits" in page.text
    assert "Completed 2" in page.text
    assert "Failed 1" in page.text
    assert "Highest val_acc at the end 0.875 optimizer.lr=0.2" in page.text
    jobs = page.sections["jobs"]
    assert "Equal in all: +recipe=digits precision=16-mixed" in jobs
    assert "Job Settings Status Last val_acc at step val_loss Time Samples/s Memory Skipped" in jobs
    assert "2 optimizer.lr=0.2 best Completed 0.875 3 1.5 1 min 02 s 123.4 3.0 GiB 1" in jobs
    assert jobs.index("optimizer.lr=0.2") < jobs.index("optimizer.lr=1.0")  # by number, not by name
    assert page.titles[:4] == ["Training loss", "val_loss", "val_acc", "Learning rate"]
    lines = page.lines("val_acc")
    assert [line["y"][-1] for line in lines.values()] == [0.5, 0.25, 0.875]  # the best one on top of the others
    assert set(lines) == {"optimizer.lr=0.1", "optimizer.lr=0.2", "optimizer.lr=1.0"}
    assert [line["color"] for line in lines.values()] == [0, 2, 1]
    assert "RuntimeError: asked to" in page.sections["job-2"]
    assert "backward pass overflows in 16 bits (step 2)" in page.sections["job-0"]
    assert {"#job-0", "#job-1", "#job-2"} <= set(page.having("a", "href"))
    assert "./1" in page.having("a", "href")


def test_values_drawn_by_a_sweeper_are_rounded(sweep):
    pruning = "++callbacks.pruning={_target_:trainer.callbacks.OptunaPruning,storage:'sqlite:///x',trial:3}"
    drawn = ["optimizer.lr=0.013311216080736894", "optimizer.lr=0.00014936568554617635", "model.act=v1.234567x"]
    jobs = [job(n, 0.5, overrides=["+recipe=digits", word, pruning]) for n, word in enumerate(drawn)]
    page = report(sweep(*jobs))
    assert set(page.lines("val_acc")) == {"optimizer.lr=0.01331", "optimizer.lr=0.0001494", "model.act=v1.234567x"}
    assert "OptunaPruning" not in page.text


def test_labels_stay_apart(sweep):
    drawn = ["optimizer.lr=0.0133111", "optimizer.lr=0.0133112"]
    jobs = [job(n, 0.5, overrides=["+recipe=digits", word]) for n, word in enumerate(drawn)]
    assert set(report(sweep(*jobs)).lines("val_acc")) == set(drawn)


def test_pruned_jobs(sweep):
    page = report(sweep(job(0, 0.5), job(1, 0.9, status="pruned"), job(2, 0.4)))
    assert "Pruned 1" in page.text
    assert "Jobs 3 3 completed" in page.text
    assert "Highest val_acc at the end 0.5 optimizer.lr=0.0" in page.text  # a pruned job is not completed


def test_job_that_has_not_ended(sweep, make_run):
    folder = sweep(job(0, 0.5))
    make_run(str(folder / "1"), record=facts(status="running"))
    page = report(folder)
    assert "Running 1" in page.text
    assert list(page.lines("val_acc")) == ["optimizer.lr=0.0", "16-mixed"] or len(page.lines("val_acc")) == 2


def test_lower_is_better(sweep):
    goal = {"metric": "val_loss", "mode": "min"}
    jobs = [job(n, 0.5, objective=goal, metrics={"val_loss": v}) for n, v in enumerate((3.0, 1.0, 2.0))]
    assert "Lowest val_loss at the end 1 optimizer.lr=0.1" in report(sweep(*jobs)).text


def test_diverging_gray_run_does_not_scale_the_axis(sweep):
    page = report(sweep(*(job(number, number / 16 if number else -1e30) for number in range(12))))
    (chart,) = (data for data in page.data if "-1e+30" in str(data))
    assert -1 < chart["y"][0] < chart["y"][1] < 1


def test_more_jobs_than_colours(sweep):
    page = report(sweep(*(job(number, number / 16) for number in range(12))))
    lines = page.lines("val_acc")
    colors = {name: line["color"] for name, line in lines.items()}
    assert [name for name, color in colors.items() if color < 0] == [f"optimizer.lr={n / 10}" for n in range(4)]
    assert sorted(color for color in colors.values() if color >= 0) == [*range(8)]
    assert list(lines)[-1] == "optimizer.lr=1.1"  # the coloured ones are drawn on top
    assert "the other 4" in page.sections["curves"]


def test_many_long_jobs_make_a_page_of_moderate_size(sweep, make_run):
    rows = "\n".join(["epoch,step,val_acc", *(f"0,{step},{step % 97 / 97:.5f}" for step in range(2000)), ""])
    for number in range(30):
        make_run(str(FOLDER / str(number)), record=job(number, 0.5), files={"csv/metrics.csv": rows})
    (FOLDER / "multirun.yaml").write_text("")
    page = report(FOLDER)
    assert len(page.html) < 900_000


def test_comparison(sweep):
    folder = sweep(job(0, 0.5), job(1, 0.75))
    verdict = {"text": "val_acc within 0.1 points, 1.6x faster.", "advice": ["Try <more>."], "met": True}
    runs = [{"run_dir": "elsewhere/0", "verdict": None}, {"run_dir": "elsewhere/1", "verdict": verdict}]
    (folder / "compare.json").write_text(json.dumps({"runs": runs, "conditions": ["Equal in all runs: seed 42."]}))
    page = report(folder)
    assert "Comparison of 2 jobs" in page.text
    assert "Verdicts optimizer.lr=0.1: val_acc within 0.1 points, 1.6x faster. Try <more>." in page.sections["jobs"]
    assert "Equal in all runs: seed 42." in page.sections["jobs"]


def test_sweep_without_curves(make_run):
    folder = make_run(
        str(FOLDER / "0"), record=job(0, 0.5, curves={}, skipped_steps=0), files={"csv/metrics.csv": None}
    ).parent
    assert "No job has curves" in report(folder).sections["curves"]


def test_sweep_that_has_just_started(make_run):
    make_run()
    FOLDER.mkdir(parents=True)
    (FOLDER / "multirun.yaml").write_text("")
    assert "Sweep of 0 jobs" in report(FOLDER).text
