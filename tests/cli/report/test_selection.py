"""Selection of the folder, and the error if it is ambiguous."""

from __future__ import annotations

import os
import shutil

import pytest

from trainer.cli import main
from trainer.cli.report import selection


def error_of(capsys, *words) -> str:
    assert main(["report", *words]) == 2
    return capsys.readouterr().err


def test_newest_run_by_default(make_run, capsys):
    old, new = (
        make_run("outputs/a/1"),
        make_run("multirun/b/2/0", record={"status": "completed", "job": 0, "overrides": []}),
    )
    for file in old.rglob("*.*"):
        os.utime(file, (1e9, 1e9))
    assert main(["report"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"The newest run is {new.parent}",
        f"The report is {new.parent / 'report.html'}",
    ]


def test_no_run_in_the_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "there is no run in outputs/, multirun/" in error_of(capsys)


def test_no_such_folder(make_run, capsys):
    make_run("outputs/a/1")
    error = error_of(capsys, "outputs/a/2")
    assert error.startswith("trainer: There is no folder outputs/a/2. There are:\n  python")
    assert f"python -m trainer report {os.path.join('outputs', 'a', '1')}" in error


def test_folder_without_a_run(make_run, capsys, tmp_path):
    make_run("outputs/a/1")
    (tmp_path / "empty").mkdir()
    error = error_of(capsys, "empty")
    assert "empty is not the folder of a run or a sweep: the folder of a run contains run.json" in error
    assert os.path.join("outputs", "a", "1") in error


def test_file(make_run, capsys):
    folder = make_run()
    error = error_of(capsys, str(folder / "run.json"))
    assert f"is a file, expected the folder of a run. There are:\n  python -m trainer report {folder}\n" in error


def test_only_run_below(make_run, capsys):
    folder = make_run("outputs/a/1")
    assert main(["report", "outputs"]) == 0
    assert (folder / "report.html").is_file()


def test_newest_fit_has_precedence_over_a_later_test(make_run):
    fit, other = make_run("outputs/a/1"), make_run("outputs/a/2", record={"status": "completed", "command": "test"})
    for folder, moment in ((fit, 1000), (other, 2000)):
        for file in folder.rglob("*"):
            os.utime(file, (moment, moment))
    assert selection.chosen([]).folder == fit
    shutil.rmtree(fit)
    assert selection.chosen([]).folder == other


def test_sweep_is_one_thing(make_run):
    for job in (0, 1):
        make_run(f"multirun/a/1/{job}", record={"status": "completed", "job": job, "overrides": []})
    (sweep,) = selection.below(selection.Path("multirun"))
    assert sweep == selection.Path("multirun/a/1")
    assert [job.name for job in selection.jobs_of(sweep)] == ["0", "1"]


def test_page_overwrites_nothing_else(make_run, capsys):
    folder = make_run()
    assert "expected a name that ends in .html" in error_of(capsys, str(folder), "page.txt")
    (folder.parent / "page.html").mkdir()
    assert "expected a name that ends in .html" in error_of(capsys, str(folder), str(folder.parent / "page.html"))


def test_folder_that_cannot_be_written(make_run, capsys):
    folder = make_run()
    (folder / "report.html").mkdir()
    assert "expected a name that ends in .html" in error_of(capsys, str(folder))
    assert "Cannot write" in error_of(capsys, str(folder), str(folder / "run.json" / "page.html"))


def test_too_many_words(make_run, capsys):
    assert "'three'" in error_of(capsys, "one", "two.html", "three")


@pytest.mark.parametrize("name", ["result.json", "curves.json", "environment.json"])
def test_folder_of_an_older_version(make_run, capsys, name):
    folder = make_run(files={"run.json": None, name: "{}"})
    for words in ([], [str(folder)], ["outputs"]):
        error = error_of(capsys, *words)
        assert f"was written by an older version (it has {name}, expected run.json)" in error
        assert "Start the run again" in error
        assert error.count("\n") == 1


def test_sweep_of_an_older_version(make_run, capsys):
    job = make_run("multirun/a/1/0", files={"run.json": None, "result.json": "{}"})
    (job.parent / "multirun.yaml").touch()
    assert "was written by an older version" in error_of(capsys, str(job.parent))
