"""The page in a real browser, at the width of a desktop and of a phone."""

from __future__ import annotations

import math

import pytest

from tests.cli.report.browser import IS_THERE, browser
from tests.cli.report.conftest import CURVES, facts, report, series

pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(not IS_THERE, reason="needs Chromium or Chrome, on Linux"),
]

LONG = "a_name_without_any_place_to_break_it_" * 6


def test_pages_in_a_browser(make_run, tmp_path):
    """Pages fit the width, load nothing and show values under the pointer."""
    wide = {"losses": series([1.0 + math.cos(step / 9) for step in range(300)])}
    record = facts(
        curves=CURVES | wide, status="failed", error=LONG, overrides=[f"+a.{LONG}={LONG}"], metrics={f"val_{LONG}": 1.0}
    )
    folder, usual = make_run("outputs/a/1", record, files={"fit.log": f"[x][WARNING] - {LONG}\n"}), make_run()
    report(folder)
    report(usual)
    for number in range(2):
        make_run(f"multirun/a/1/{number}", record=facts(job=number, overrides=[f"x.{LONG}={number}"]))
    report("multirun/a/1")
    with browser(tmp_path / "profile") as tab:
        for page in (folder / "report.html", tmp_path / "multirun/a/1/report.html"):
            for width, height in ((1280, 900), (390, 844)):
                tab.open(page, width, height, dark=width == 390)
                tab.value("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
                assert tab.value("document.documentElement.scrollWidth") == width
                assert tab.value("document.querySelectorAll('.plot svg').length") >= 9
                assert tab.value("getComputedStyle(document.body).backgroundColor") == (
                    "rgb(16, 19, 23)" if width == 390 else "rgb(246, 247, 249)"
                )
                assert tab.complaints == []
                assert tab.requests == [page.resolve().as_uri()]

        tab.open(usual / "report.html", 1280, 2400)
        box = tab.value("JSON.parse(JSON.stringify(document.querySelector('.plot svg').getBoundingClientRect()))")
        middle = {"x": box["x"] + box["width"] * 0.98, "y": box["y"] + box["height"] / 2}
        tab.send("Input.dispatchMouseEvent", type="mouseMoved", **middle)
        tip = tab.value("document.querySelector('.tip').innerText")
        assert [word for word in tip.split() if word] == ["step", "4", "1", "train", "1.5", "val_loss"]
        assert tab.value("document.querySelectorAll('.plot .point').length") == 2
        tab.send("Input.dispatchMouseEvent", type="mouseMoved", x=5, y=5)
        assert tab.value("document.querySelectorAll('.tip, .cursor, .point').length") == 0
        assert tab.complaints == []
