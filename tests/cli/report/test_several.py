"""The page of any runs side by side."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.report.conftest import CONFIG, ENVIRONMENT, ROWS, Page, facts
from trainer.cli import main


def several(*words: str | Path) -> Page:
    """Return the page of the command in the working directory, or in the only given folder."""
    assert main(["report", *map(str, words)]) == 0
    place = Path(words[0]) if len(words) == 1 else Path()
    return Page((place / "report.html").read_text(encoding="utf-8"))


@pytest.fixture
def two(make_run):
    """Two runs with other recipes, settings and times; the second is better, with an even better earlier value."""
    config = CONFIG.replace("lr: 0.1", "lr: 0.5\n  momentum: 0.9").replace("max_epochs: 2", "max_epochs: 7")
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


def test_differing_settings_come_first(two):
    page = several(*two)
    assert page.text.index("Differences") < page.text.index("Best val_acc") < page.text.index("The x-axis")
    differences = page.sections["differences"]
    assert "recipe 1digits 2scans" in differences
    assert "optimizer.lr 10.1 20.5" in differences
    assert "optimizer.momentum 1 - 20.9" in differences
    assert "trainer.max_epochs 12 27" in differences
    # overrides of the user come first
    assert differences.index("optimizer.lr") < differences.index("trainer.max_epochs")
    for same in ("seed", "precision", "callbacks.model_checkpoint.monitor"):
        assert same not in differences
    assert "1 difference in code, machine and versions 1 2 torch 12.15.0 22.16.0" in differences


def test_best_values_and_their_steps(two):
    page = several(*two)
    assert "2 runs digits, scans" in page.text
    assert "Highest val_acc 0.875 at step 1, scans optimizer.lr=0.5" in page.text
    table = page.sections["jobs"]
    assert "Run Settings Status Best val_acc at step val_loss Time Samples/s Memory Skipped" in table
    assert "1 digits Completed 0.75 3 1.5" in table
    assert "2 scans optimizer.lr=0.5 best Completed 0.875 1 1.5" in table
    assert "Best val_acc 0.875 at step 1, last 0.75" in page.sections["job-1"]


def test_curves_are_overlaid(two):
    page = several(*two)
    lines = page.lines("val_acc")
    assert [line["y"] for line in lines.values()] == [[0.25, 0.75], [0.875, 0.75]]
    assert [line["color"] for line in lines.values()] == [0, 1]
    assert set(lines) == {"digits", "scans optimizer.lr=0.5"}


def test_curves_with_a_slash_in_their_name_are_overlaid(make_run):
    rows = "epoch,step,val/loss\n0,1,0.5\n1,3,0.25\n"
    page = several(*(make_run(f"a/{number}", files={"csv/metrics.csv": rows}) for number in (1, 2)))
    assert [line["y"] for line in page.lines("val/loss").values()] == [[0.5, 0.25]] * 2


def test_optimizers_of_different_names_share_a_chart(make_run):
    first, second = make_run("a/1"), make_run("a/2", files={"csv/metrics.csv": ROWS.replace("lr-SGD", "lr-AdamW")})
    page = several(first, second)
    assert page.titles.count("Learning rate") == 1
    assert set(page.lines("Learning rate")) == {"16-mixed (1)", "16-mixed (2)"}  # without another difference


def test_folder_with_several_runs(two, make_run):
    make_run("outputs/mine/a/1")
    make_run("outputs/mine/b/2")
    for number in (0, 1):
        make_run(f"outputs/mine/sweep/{number}", record=facts(job=number))
    page = several("outputs/mine")
    assert "4 runs" in page.text
    assert "outputs/mine" in page.text
    assert "No setting differs" in page.sections["differences"]
    assert page.having("a", "href").count("#job-3") == 1


def test_sweeps_and_runs_together_each_once(two, make_run):
    for number in (0, 1):
        make_run(f"multirun/x/1/{number}", record=facts(job=number, overrides=["+recipe=digits", f"seed={number}"]))
    page = several(two[0], "multirun/x/1", "multirun/x/1/1", two[0])
    assert "3 runs" in page.text
    assert several(two[0], two[0].parent / "one" / "csv" / "..").titles  # the same run twice is one
    assert "digits Completed" in Page((two[0] / "report.html").read_text()).text


def test_one_bad_run_does_not_spoil_the_report(two, make_run, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    old = make_run("old/1", files={"run.json": None, "result.json": "{}", ".hydra/config.yaml": None})
    odd = make_run("odd/1", record=facts(seconds="long"))
    page = several(*two, "empty", "nowhere", two[0] / "fit.log", old, odd)
    err = capsys.readouterr().err
    assert "2 runs" in page.text
    for words in (
        "empty is not the folder of a run or a sweep: the folder of a run contains run.json",
        "There is no folder nowhere.",
        "fit.log is a file, expected the folder of a run",
        f"{old} was written by an older version (it has result.json, expected run.json)",
        f"The files in {odd} have contents that no run writes (ValueError",
    ):
        assert err.count(f"Left out: {words}") + err.count(f"{os.sep}{words}") == 1, err
        assert words in page.text
    assert err.count("Left out: ") == 5


def test_only_unreadable_runs(make_run, capsys):
    odd = make_run("odd/1", record=facts(seconds="long"))
    assert main(["report", str(odd), "nowhere"]) == 2
    assert "have contents that no run writes" in capsys.readouterr().err
    assert main(["report", "here", "nowhere"]) == 2
    err = capsys.readouterr().err
    assert "There is no folder here." in err
    assert "There is no folder nowhere." in err
    assert not Path("report.html").exists()


def test_sweep_with_one_job_of_an_older_version(make_run, capsys):
    make_run("multirun/a/1/0", record=facts(job=0))
    make_run("multirun/a/1/1", files={"run.json": None, "result.json": "{}"})
    page = several("multirun/a/1")
    assert "Sweep of 1 job digits" in page.text
    assert "older version" in page.text
    assert "older version" in capsys.readouterr().err


def test_runs_without_curves_without_settings_and_still_going(two, make_run):
    others = dict.fromkeys(["csv/metrics.csv", ".hydra/config.yaml", ".hydra/overrides.yaml"])
    test = make_run("t/1", record=facts(command="test", curves={}, metrics={"test_acc": 0.5}), files=others)
    going = make_run("g/1", record=facts(status="running", steps=None, overrides=["+recipe=digits", "seed=3"]))
    page = several(*two, test, going)
    assert "has no curves: its command was test." in page.sections["curves"]
    assert "are unknown: there is no .hydra/config.yaml" in page.sections["differences"]
    assert "The run is in progress: step 4, written" in page.text
    assert "Running 1" in page.text


def test_runs_that_cannot_be_compared(make_run):
    record = facts(metrics={"reward": 1.0}, monitor=None, objective=None, curves={})
    runs = [make_run(f"a/{number}", record=record, files={"csv/metrics.csv": None}) for number in (1, 2)]
    page = several(*runs)
    assert "best" not in page.sections["jobs"]
    assert "No run has curves" in page.sections["curves"]


def test_name_of_the_page_is_the_last_argument(two, capsys):
    assert main(["report", *map(str, two), "pages/two.html"]) == 0
    assert capsys.readouterr().out == f"The report is {Path('pages/two.html')}\n"
    assert "2 runs" in Page(Path("pages/two.html").read_text()).text
    assert main(["report", "two.html", *map(str, two)]) == 2
    assert "after the name of the page, two.html, expected" in capsys.readouterr().err


def test_secrets_and_markup_are_not_in_the_page(make_run):
    bad = "<script>alert(1)</script>"
    runs = [
        make_run(f"a/{n}", files={".hydra/config.yaml": json.dumps({"logger": {"api_key": f"k{n}9", bad: bad * n}})})
        for n in (1, 2)
    ]
    page = several(*runs)
    assert len(page.scripts) == 1
    assert "k19" not in page.html
    assert f"logger.{bad}" in page.sections["differences"]
