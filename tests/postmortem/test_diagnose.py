"""Programs of ``scripts/benchmark_diagnosis`` without an alarm, and the form of a report."""

from __future__ import annotations

import pytest
from _diagnosis.bench import run
from _diagnosis.programs import PROGRAMS
from lightning.pytorch import Callback

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


def test_weights_that_other_code_breaks(tmp_path):
    class Divides(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 10:
                pl_module.net[0].weight.data.div_(0.0)

    text = run(PROGRAMS["Plateau"], tmp_path, callbacks=[Divides()]).text
    assert "Verdict: weights" in text
    assert "other code than the optimizer has changed them" in text
    assert "writes to 'net.0.weight'" in text
