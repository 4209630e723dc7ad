"""Confusion matrices and pictures on the page, from any writer."""

from __future__ import annotations

import base64
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.report.conftest import Page, facts, report
from trainer.cli import main

COUNTS = [[8, 2, 0], [1, 9, 0], [0, 0, 0]]


def png(shade: int = 7) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), shade, dtype=np.uint8)).save(file, format="PNG")
    return file.getvalue()


def put(folder: Path, name: str, content: object) -> None:
    file = folder / "figures" / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def matrix(counts: object = COUNTS, **more: object) -> dict[str, object]:
    return {"kind": "confusion matrix", "classes": ["cat", "dog", "<owl>"], "counts": counts} | more


def test_confusion_matrix(make_run):
    folder = make_run()
    put(folder, "test.json", matrix())
    page = report(folder)
    results = page.sections["results"]
    assert "Confusion matrix: test 20 samples, 85.0% correct." in results
    assert "cat dog <owl> recall cat 8 2 80.0% dog 1 9 90.0% <owl> Most" in results
    assert "Most frequent mistakes: cat predicted as dog 2 , dog predicted as cat 1" in results.replace(" 2,", " 2 ,")
    assert page.html.count("--share:0.800") == page.html.count("--share:0.200") == 1
    assert "#results" in page.having("a", "href")
    assert page.text.index("Learning rate") < page.text.index("Confusion matrix")


def test_pictures_are_in_the_page(make_run):
    folder = make_run()
    put(folder, "samples.png", png())
    put(folder, "notes.txt", b"nothing")
    page = report(folder)
    assert page.having("img", "alt") == ["samples"]
    (address,) = page.having("img", "src")
    assert base64.b64decode(address.removeprefix("data:image/png;base64,")) == png()
    assert "img-src data:" in page.html


def test_test_shows_its_results_first_and_no_curves_of_one_point(make_run):
    folder = make_run(record=facts(command="test", metrics={"test_acc": 0.5}, curves={}), files={
        "csv/metrics.csv": "epoch,step,test_acc\n0,0,0.5\n",
    })  # fmt: skip
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
    results = report(folder).sections["results"]
    assert "Shows the 24 classes with the most mistakes of 40." in results
    assert "c37 predicted as c3 9" in results
    assert "c37 9 5 35.7%" in results
    assert "c30" not in results


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", b"{", "a.json cannot be shown: JSONDecodeError"),
        ("a.json", {"kind": "scatter"}, "expected 'confusion matrix'"),
        ("a.json", matrix([[1, 2]]), "the counts are not a square matrix"),
        ("a.json", matrix([[1]]), "got 3 names for 1 classes"),
        ("a.json", matrix([["x"]]), "a.json cannot be shown: ValueError"),
        ("a.json", [3], "a.json cannot be shown: TypeError"),
        ("a.png", b"<script>alert(1)</script>", "a.png cannot be shown: ValueError: not a PNG file"),
        ("a.png", png() + bytes(2**21), "a.png cannot be shown: larger than 2 MiB"),
    ],
)
def test_invalid_figures_are_reported(make_run, name, content, expected):
    folder = make_run()
    put(folder, name, content)
    put(folder, "good.png", png())
    page = report(folder)
    assert expected in page.sections["results"]
    assert page.having("img", "alt") == ["good"]
    assert len(page.scripts) == 1


def test_links_out_of_the_folder_are_not_followed(make_run, tmp_path):
    folder = make_run()
    (tmp_path / "secret.png").write_bytes(png())
    put(folder, "good.png", png(9))
    (folder / "figures" / "bad.png").symlink_to(tmp_path / "secret.png")
    page = report(folder)
    assert page.having("img", "alt") == ["good"]
    assert "bad.png cannot be shown" in page.text


def test_number_of_pictures_is_limited(make_run):
    folder = make_run()
    for number in range(15):
        put(folder, f"{number:02}.png", png(number))
    page = report(folder)
    assert len(page.having("img", "src")) == 12
    assert "The page shows the first 12 figures. The others are in" in page.text


def test_figures_of_several_runs(make_run):
    runs = [make_run(f"a/{number}") for number in (1, 2)]
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
    shown = report(folder).sections["results"]
    assert "newer" in shown
    assert "own" in shown
    assert "older" not in shown
