"""Programs of ``scripts/benchmark_diagnosis`` without an alarm, and the form of a report."""

from __future__ import annotations

import pytest
from _diagnosis.bench import run
from _diagnosis.programs import PROGRAMS

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "name", ["Settling", "InfiniteMask", "MissingValues", "RareOverflow", "Gan", "Outlier", "Saturated"]
)
def test_no_alarm(tmp_path, name):
    assert run(PROGRAMS[name], tmp_path).verdict == "healthy"


def test_one_report_for_each_cause_of_at_most_six_lines(tmp_path):
    text = run(PROGRAMS["NanSample16"], tmp_path).text
    assert text.count("Verdict: ") == 1
    assert len([line for line in text.splitlines() if line.startswith(("Verdict", "  "))]) <= 6
    (report,) = tmp_path.glob("diagnosis_step_*.md")
    assert "| seen | 6 times |" in report.read_text()
