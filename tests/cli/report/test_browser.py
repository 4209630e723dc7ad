"""The page in a real browser, at the width of a desktop and of a phone."""

import json
import math
import shutil
import subprocess

import pytest

from tests.cli.report.conftest import CURVES, facts, report, series

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

pytestmark = [pytest.mark.whole, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium or Chrome")]

LONG = "a_name_without_any_place_to_break_it_" * 6

FRAMES = """
<script>
const found = [];
function look(frame) {
  const page = frame.contentDocument, there = frame.contentWindow;
  page.querySelectorAll("details").forEach((each) => { each.open = true; });
  const plot = page.querySelector(".plot"), box = plot.querySelector("svg").getBoundingClientRect();
  const over = { clientX: box.x + 0.98 * box.width, clientY: box.y + box.height / 2, bubbles: true };
  plot.dispatchEvent(new there.PointerEvent("pointermove", over));
  const count = (names) => page.querySelectorAll(names).length;
  const shown = [page.querySelector(".tip").innerText.split(/\\s+/), count(".point")];
  plot.dispatchEvent(new there.PointerEvent("pointerleave"));
  const loaded = there.performance.getEntriesByType("resource").map((each) => each.name);
  found.push({
    width: page.documentElement.scrollWidth, plots: count(".plot svg"), shown, after: count(".tip, .cursor, .point"),
    loaded,
  });
  document.title = JSON.stringify(found);
}
</script>
"""


def test_pages_in_a_browser(make_run, tmp_path):
    """Pages fit the width, load nothing and show values under the pointer."""
    wide = {"losses": series([1.0 + math.cos(step / 9) for step in range(300)])}
    record = facts(
        curves=CURVES | wide, status="failed", error=LONG, overrides=[f"+a.{LONG}={LONG}"], metrics={f"val_{LONG}": 1.0}
    )
    folder = make_run("outputs/a/1", record, files={"fit.log": f"[x][WARNING] - {LONG}\n"})
    usual = make_run()
    for number in range(2):
        make_run(f"multirun/a/1/{number}", record=facts(job=number, overrides=[f"x.{LONG}={number}"]))
    frames, style = [], "height:900px;border:0"
    for run in (str(folder), "multirun/a/1", str(usual)):
        report(run)
        frames += [
            f"<iframe src='{run}/report.html' style='{style};width:{width}px' onload='look(this)'></iframe>"
            for width in (1280, 390)
        ]
    (tmp_path / "frames.html").write_text(FRAMES + "".join(frames))
    assert CHROMIUM is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--dump-dom"]
    flags += ["--disable-background-networking", "--disable-dev-shm-usage", "--allow-file-access-from-files"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--timeout=60000", "--virtual-time-budget=60000"]
    command = [CHROMIUM, *flags, (tmp_path / "frames.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    found = json.loads(done.stdout.partition("<title>")[2].partition("</title>")[0])
    assert sorted(page["width"] for page in found) == [390] * 3 + [1280] * 3
    for page in found:
        assert page["plots"] >= 9
        assert (page["after"], page["loaded"]) == (0, [])
    assert [page["shown"] for page in found].count([["step", "4", "1", "train", "1.5", "val_loss"], 2]) == 2
