"""Each verdict on programs of ``scripts/benchmark_diagnosis``, and each remedy applied as it is printed."""

from __future__ import annotations

import pytest
from _diagnosis.bench import learns, run
from _diagnosis.programs import PROGRAMS
from _diagnosis.remedy import apply, remedy_in

TESTED = (
    "NanSample16", "NanSample32", "LabelTooLarge", "EmptyMask32", "RootOfZero16", "AllIgnored32", "UnscaledAttention",
    "MaskOfBillions", "TwoLosses", "TinyLoss", "BrokenFile16", "RateTooHigh32", "RateInfinite",
)  # fmt: skip
"""One or two for each verdict; the script runs all."""

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", TESTED)
def test_the_verdict_is_right_and_its_remedy_cures(tmp_path, name):
    broken = run(PROGRAMS[name], tmp_path / "broken")
    assert broken.verdict == PROGRAMS[name].verdict
    cured = apply(PROGRAMS[name], remedy_in(broken.text), tmp_path / "cured")
    assert learns(cured.losses)
    assert cured.verdict == "healthy"


@pytest.mark.parametrize("name", ["Settling", "InfiniteMask", "MissingValues", "RareOverflow", "Gan", "Outlier"])
def test_no_alarm(tmp_path, name):
    assert run(PROGRAMS[name], tmp_path).verdict == "healthy"


def test_one_report_for_each_cause_of_at_most_six_lines(tmp_path):
    text = run(PROGRAMS["NanSample16"], tmp_path).text
    assert text.count("Verdict: ") == 1
    assert len([line for line in text.splitlines() if line.startswith(("Verdict", "  "))]) <= 6
    (report,) = tmp_path.glob("diagnosis_step_*.md")
    assert "| seen | 6 times |" in report.read_text()
