"""The page of any runs side by side."""

import os
from pathlib import Path

import pytest

from tests.cli.report.conftest import CONFIG, ENVIRONMENT, ROWS, Page, facts
from trainer.cli import main
from trainer.record.charts import overlay
from trainer.record.run_record import load_run

NO_CURVES = {"record": facts(curves={}), "files": {"csv/metrics.csv": None}}


def several(*words):
    """Return the page of the command in the working directory, or in the only given folder."""
    assert main(["report", *map(str, words)]) == 0
    place = Path(words[0]) if len(words) == 1 else Path()
    return Page((place / "report.html").read_text(encoding="utf-8"))


@pytest.fixture
def two(make_run):
    """Two runs with other recipes, settings and times; the second is better, with an even better earlier value."""
    config = CONFIG.replace("lr: 0.1", "lr: 0.5, momentum: 0.9").replace("max_epochs: 2", "max_epochs: 7")
    there = ENVIRONMENT | {"versions": {"torch": "2.16.0"}, "started": 9e8}
    rows = ROWS.replace("0.25,2.5", "0.875,2.5")
    words = ["+recipe=scans", "precision=16-mixed", "optimizer.lr=0.5"]
    first = make_run("outputs/digits/one")
    second = make_run(
        "elsewhere/scans/two",
        record=facts(recipe="scans", overrides=words, environment=there, skipped_steps=0, best_score=0.875),
        files={".hydra/config.yaml": config, "csv/metrics.csv": rows},
    )
    return first, second


def test_differences_best_values_and_curves(two, capsys):
    assert main(["report", *map(str, two), "pages/two.html"]) == 0
    assert capsys.readouterr().out == f"The report is {Path('pages/two.html')}\n"
    page = Page(Path("pages/two.html").read_text())
    assert "2 runs digits, scans" in page.text
    assert page.text.index("Differences") < page.text.index("Best val_acc") < page.text.index("The x-axis")
    differences = page.sections["differences"]
    for expected in (
        "recipe 1digits 2scans", "optimizer.lr 10.1 20.5", "optimizer.momentum 1 - 20.9", "trainer.max_epochs 12 27",
        "1 difference in code, machine and versions 1 2 torch 12.15.0 22.16.0",
    ):  # fmt: skip
        assert expected in differences
    # overrides of the user come first
    assert differences.index("optimizer.lr") < differences.index("trainer.max_epochs")
    for same in ("seed", "precision", "callbacks.model_checkpoint.monitor"):
        assert same not in differences
    assert "Highest val_acc 0.875 at step 2, scans optimizer.lr=0.5" in page.text
    table = page.sections["jobs"]
    assert "Run Settings Status Best val_acc at step val_loss Time Samples/s Memory Skipped" in table
    assert "1 digits Completed 0.75 4 1.5" in table
    assert "2 scans optimizer.lr=0.5 best Completed 0.875 2 1.5" in table
    assert "Best val_acc 0.875 at step 2, last 0.75" in page.sections["job-1"]
    lines = page.lines("val_acc")
    assert [line["y"] for line in lines.values()] == [[0.25, 0.75], [0.875, 0.75]]
    assert [line["color"] for line in lines.values()] == [0, 1]
    assert set(lines) == {"digits", "scans optimizer.lr=0.5"}


def test_best_value_of_a_run_that_monitors_another_metric(two, make_run):
    """From its curve, because its checkpoints were chosen by the other one. It is the best run."""
    rows = ROWS.replace("0.25,2.5", "0.9375,2.5")
    record = facts(recipe="third", monitor=["val_loss", "min"], best_score=1.5, overrides=["+recipe=third"])
    page = several(*two, make_run("outputs/third/one", record=record, files={"csv/metrics.csv": rows}))
    table = page.sections["jobs"]
    assert "Best val_acc" in table
    assert "3 third best Completed 0.9375 2 1.5" in table
    assert "Highest val_acc 0.9375 at step 2, third" in page.text


def test_title_of_many_recipes(make_run):
    runs = [
        make_run(f"a/{name}", **NO_CURVES | {"record": facts(recipe=name, overrides=[f"+recipe={name}"], curves={})})
        for name in "abcde"
    ]
    assert "5 runs a, b, c and 2 more" in several(*runs).text


def test_charts_that_runs_share(make_run):
    """Learning rates of different optimizers share a chart, and heat maps are left out."""
    rows = "grad_norm/net.0,lr-SGD,step,val/loss\n0.5,,1,0.5\n,0.1,2,0.25\n"
    texts = rows, rows.replace("SGD", "AdamW")
    runs = [load_run(make_run(f"a/{n}", files={"csv/metrics.csv": text})) for n, text in enumerate(texts)]
    charts = {chart.title: chart for part in overlay(runs, [0, 1]) for chart in part.charts}
    assert [list(line.curve.values) for line in charts["val/loss"].lines] == [[0.5, 0.25]] * 2
    assert len(charts["Learning rate"].lines) == 2
    assert not any(chart.is_map for chart in charts.values())


def test_sweeps_and_runs_together_each_once(two, make_run):
    for number in (0, 1):
        record = facts(job=number, curves={}, overrides=["+recipe=digits", "precision=16-mixed"])
        make_run(f"outputs/x/1/{number}", **NO_CURVES | {"record": record})
    page = several("outputs", "outputs/x/1", "outputs/x/1/1", two[0])
    assert "3 runs" in page.text
    assert "No setting differs" in page.sections["differences"]
    assert page.having("a", "href").count("#job-2") == 1
    assert "digits Completed" in several(two[0], two[0].parent / "one" / "csv" / "..").text  # the same run is one


def test_one_bad_run_does_not_spoil_the_report(make_run, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    good = [make_run(f"good/{number}", **NO_CURVES) for number in (1, 2)]
    odd = make_run("odd/1", record=facts(seconds="long"))
    page = several(*good, "empty", "nowhere", good[0] / "fit.log", odd)
    err = capsys.readouterr().err
    assert "2 runs" in page.text
    for words in (
        "empty is not the folder of a run or a sweep: the folder of a run contains run.json",
        "nowhere is not the folder of a run",
        "fit.log is not the folder of a run",
        f"The files in {odd} have contents that no run writes (ValueError",
    ):
        assert err.count(f"Left out: {words}") + err.count(f"{os.sep}{words}") == 1, err
        assert words in page.text
    assert err.count("Left out: ") == 4


def test_runs_without_curves_without_settings_and_still_going(two, make_run):
    others = dict.fromkeys(["csv/metrics.csv", ".hydra/config.yaml", ".hydra/overrides.yaml"])
    test = make_run("t/1", record=facts(command="test", curves={}, metrics={"test_acc": 0.5}), files=others)
    going = make_run("g/1", record=facts(status="running", steps=None, overrides=["+recipe=digits", "seed=3"]))
    page = several(two[0], test, going)
    assert "has no curves: its command was test." in page.sections["curves"]
    assert "are unknown: there is no .hydra/config.yaml" in page.sections["differences"]
    assert "The run is in progress: step 4, written" in page.text
    assert "Running 1" in page.text


def test_runs_that_cannot_be_compared(make_run):
    record = facts(metrics={"reward": 1.0}, monitor=None, objective=None, curves={})
    files = [{"csv/metrics.csv": None, ".hydra/config.yaml": f"logger: {{api_key: k{n}9}}"} for n in (1, 2)]
    page = several(*(make_run(f"a/{n}", record=record, files=of_run) for n, of_run in enumerate(files)))
    assert "best" not in page.sections["jobs"]
    assert "No run has curves" in page.sections["curves"]
    assert "k19" not in page.html  # a secret
