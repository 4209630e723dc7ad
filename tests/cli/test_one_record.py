"""Summary, picture, report and the table of a sweep have the same values for a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.report.conftest import Page
from trainer.callbacks.curves import figure_of
from trainer.cli import main, sweep
from trainer.record.run_record import RunRecord, load_run, read_json

pytestmark = pytest.mark.filterwarnings("default")  # Lightning warns of tiny data and few workers

RUN = Path("runs/0")
SHOWN = ["trainer.enable_progress_bar=true", "trainer.enable_model_summary=true"]
LINE = ["+recipe=line", f"hydra.run.dir={RUN}", "precision=16", "trainer.max_epochs=10", *SHOWN]


def summary_in(printed: str) -> dict[str, str]:
    lines = (re.split(r"\s{2,}", line.strip()) for line in printed.splitlines())
    return {line[0]: line[1] for line in lines if len(line) == 2}


def page() -> Page:
    assert main(["report", str(RUN)]) == 0
    return Page((RUN / "report.html").read_text(encoding="utf-8"))


def in_a_table() -> dict[str, object]:
    """The run in the table of a sweep, as a file."""
    RunRecord(read_json(RUN) | {"job": 0}, RUN).write()
    sweep.report(RUN.parent)
    (row,) = json.loads((RUN.parent / "summary.json").read_text())
    return row


def test_run_that_overflows_until_it_stops(project, capsys):
    """As in the quick start: the scale falls to its floor, every step is skipped, and changed settings are restored."""
    assert main(["fit", *LINE, "model.start=100000"]) == 1
    shown = summary_in(capsys.readouterr().out)
    run = load_run(RUN)
    assert (run.status, run.scale) == ("failed", 1.0)
    assert run.skipped_steps == run.steps > 20
    assert (shown["scale"], shown["skipped steps"], shown["optimizer steps"]) == ("1", str(run.steps), str(run.steps))
    assert not {"amp/scale", "amp/skipped_steps"} & shown.keys()
    assert "FLOPs" not in shown

    report = page()
    assert f"Skipped steps {run.steps} 100.0% of all" in report.text
    assert "Loss scale 1 last" in report.text
    assert "No step was skipped" not in report.text
    assert report.lines("Loss scale")["scale"]["y"][-1] == 1.0
    assert report.lines("Skipped steps")["so far"]["y"][-1] == run.steps

    *_, scale = figure_of(run).axes
    assert scale.lines[0].get_ydata()[-1] == 1.0
    assert len(scale.lines[1].get_xdata()) == run.steps

    row = in_a_table()
    assert (row["status"], row["seconds"]) == ("failed", run.seconds)
    assert (row["steps"], row["skipped_steps"], row["scale"]) == (run.steps, run.steps, 1.0)
