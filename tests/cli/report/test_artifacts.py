"""Confusion matrices and pictures on the page, from any writer."""

import base64
import io
import json
import os
from pathlib import Path

import numpy as np
from PIL import Image

from tests.cli.report.conftest import Page, facts, report
from trainer.cli import main
from trainer.cli.report.artifacts import figures_of
from trainer.record.run_record import load_run

COUNTS = [[8, 2, 0], [1, 9, 0], [0, 0, 0]]


def png(shade=7):
    file = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), shade, dtype=np.uint8)).save(file, format="PNG")
    return file.getvalue()


def put(folder, name, content):
    file = folder / "figures" / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def matrix(counts=COUNTS, **more):
    return {"kind": "confusion matrix", "classes": ["cat", "dog", "<owl>"], "counts": counts} | more


def test_confusion_matrix_and_pictures_of_a_fit(make_run):
    folder = make_run()
    put(folder, "test.json", matrix())
    put(folder, "samples.png", png())
    put(folder, "notes.txt", b"nothing")
    page = report(folder)
    results = page.sections["results"]
    assert "Confusion matrix: test 20 samples, 85.0% correct." in results
    assert "cat dog <owl> recall cat 8 2 80.0% dog 1 9 90.0% <owl>" in results
    assert page.html.count("--share:0.800") == page.html.count("--share:0.200") == 1
    assert "#results" in page.having("a", "href")
    assert page.text.index("Learning rate") < page.text.index("Confusion matrix")
    assert page.having("img", "alt") == ["samples"]
    (address,) = page.having("img", "src")
    assert base64.b64decode(address.removeprefix("data:image/png;base64,")) == png()


def test_test_shows_its_results_first_and_no_curves_of_one_point(make_run):
    rows = {"csv/metrics.csv": "epoch,step,test_acc\n0,0,0.5\n"}
    folder = make_run(record=facts(command="test", metrics={"test_acc": 0.5}, curves={}), files=rows)
    put(folder, "test.json", matrix(classes=None))
    page = report(folder)
    assert page.titles == ["Confusion matrix: test"]
    assert page.text.index("Confusion matrix") < page.text.index("There are no curves for the command test.")
    assert "Optimizer steps" not in page.text
    assert "test_acc 0.5" in page.text


def test_most_confused_of_many_classes(make_run):
    folder = make_run()
    counts = [[5 * (i == j) for j in range(40)] for i in range(40)]
    counts[37][3] = 9
    put(folder, "test.json", matrix(counts, classes=[f"c{i}" for i in range(40)]))
    ((shown,), _, _) = figures_of(load_run(folder))
    assert (len(shown.classes), shown.of_all) == (24, 40)
    row = shown.classes.index("c37")
    assert shown.rows[row][shown.classes.index("c3")] == (9.0, 9 / 14)
    assert shown.recalls[row] == 5 / 14
    assert "c30" not in shown.classes


def test_invalid_figures_are_reported(make_run, tmp_path):
    folder = make_run()
    (tmp_path / "secret.png").write_bytes(png())
    put(folder, "good.png", png())
    (folder / "figures" / "link.png").symlink_to(tmp_path / "secret.png")
    invalid = {
        "a.json": (b"{", "JSONDecodeError"),
        "c.json": (matrix([[1, 2]]), "the counts are not a square matrix"),
        "d.json": (matrix([[1]]), "got 3 names for 1 classes"),
        "f.json": ([3], "TypeError"),
        "h.png": (png() + bytes(2**21), "larger than 2 MiB"),
    }
    for name, (content, _) in invalid.items():
        put(folder, name, content)
    matrices, pictures, notes = figures_of(load_run(folder))
    assert (matrices, [picture.name for picture in pictures]) == ([], ["good"])
    assert len(notes) == len(invalid) + 1
    for note, (name, (_, reason)) in zip(notes, invalid.items(), strict=False):
        assert note.startswith(f"{name} cannot be shown: ")
        assert reason in note
    assert notes[-1].startswith("link.png cannot be shown: ")  # a link out of the folder is not followed


def test_number_of_pictures_is_limited(make_run):
    folder = make_run()
    for number in range(15):
        put(folder, f"{number:02}.png", png(number))
    _, pictures, (note,) = figures_of(load_run(folder))
    assert len(pictures) == 12
    assert note.startswith("The page shows the first 12 figures. The others are in")


def test_figures_of_several_runs(make_run):
    of_run = {"record": facts(curves={}), "files": {"csv/metrics.csv": None}}
    runs = [make_run(f"a/{number}", **of_run) for number in (1, 2)]
    put(runs[1], "test.json", matrix())
    assert main(["report", *map(str, runs)]) == 0
    page = Page(Path("report.html").read_text(encoding="utf-8"))
    assert "Confusion matrix: test" in page.sections["job-1"]
    assert "Confusion matrix" not in page.sections["job-0"]


def test_figures_of_the_newest_test_below_a_run_are_shown(make_run):
    folder = make_run("outputs/a/1")
    for name, time in (("newer", 2e9), ("older", 1e9)):
        below = folder / "test" / name
        below.mkdir(parents=True)
        put(below, f"{name}.json", matrix())
        (below / "run.json").write_text(json.dumps({"command": "test", "status": "completed"}))
        os.utime(below / "run.json", (time, time))
    put(folder, "own.json", matrix())
    matrices, _, _ = figures_of(load_run(folder))
    assert sorted(shown.name for shown in matrices) == ["newer", "own"]
