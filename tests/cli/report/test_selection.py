"""Selection of the folder, and the error if it is ambiguous."""

import os
import shutil
from pathlib import Path

from trainer.cli import main
from trainer.cli.report.selection import choose_subject


def error_of(capsys, *words):
    assert main(["report", *words]) == 2
    return capsys.readouterr().err


def changed_at(moment, folder):
    for file in folder.rglob("*"):
        os.utime(file, (moment, moment))


def test_newest_fit_or_sweep_by_default(make_run):
    old, test = make_run("outputs/a/1"), make_run("outputs/a/2", record={"status": "completed", "command": "test"})
    jobs = [make_run(f"multirun/b/2/{n}", record={"status": "completed", "job": n}) for n in (0, 1)]
    changed_at(1000, old)
    changed_at(3000, test)
    changed_at(2000, jobs[0].parent)
    sweep = choose_subject([])
    assert (sweep.kind, sweep.folder, list(sweep.runs)) == ("sweep", Path("multirun/b/2"), jobs)
    shutil.rmtree("multirun")
    assert (choose_subject([]).kind, choose_subject([]).folder) == ("run", old)
    assert choose_subject(["outputs/a"]).runs == [old, test]
    shutil.rmtree(old)
    assert choose_subject([]).folder == choose_subject(["outputs"]).folder == test


def test_newest_run_is_printed(make_run, capsys):
    folder = make_run(record={"status": "completed"}, files={"csv/metrics.csv": None})
    assert main(["report"]) == 0
    assert capsys.readouterr().out == f"The newest run is {folder}\nThe report is {folder / 'report.html'}\n"


def test_mistakes(make_run, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "there is no run in outputs, multirun, lightning_logs." in error_of(capsys)
    folder = make_run("outputs/a/1")
    (tmp_path / "empty").mkdir()
    others = ", which RunRecorder writes, or metrics.csv.\n"
    assert "outputs/a/2 is not the folder of a run" in error_of(capsys, "outputs/a/2")
    assert error_of(capsys, "empty").endswith(others)
    (folder.parent / "page.html").mkdir()
    assert "Cannot write" in error_of(capsys, str(folder), str(folder.parent / "page.html"))
    assert "Cannot write" in error_of(capsys, str(folder), str(folder / "run.json" / "page.html"))
