"""Programs of ``scripts/benchmark_diagnosis`` without an alarm, and the form of a report."""

from __future__ import annotations

import pytest
import torch
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
    assert "code other than the optimizer has changed them" in text
    assert "writes to 'net.0.weight'" in text


def test_rate_that_was_too_high_for_one_step_is_no_other_code(tmp_path):
    class Spike(PROGRAMS["Plateau"]):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e30 if step == 3 else 1.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    text = run(Spike, tmp_path).text
    assert "Verdict: " in text
    assert "other code" not in text


def test_error_after_a_gradient_that_was_not_finite(tmp_path):
    class Eigenvectors(PROGRAMS["Plateau"]):
        def training_step(self, batch, batch_idx):
            z = self(batch[0])
            covariance = z.T @ z if batch_idx != 5 else torch.eye(z.shape[1]) + 0 * z.sum()
            _, vectors = torch.linalg.eigh(covariance)  # raises an error if a number is NaN
            return (vectors[0] * torch.arange(len(vectors))).sum() ** 2

    result = run(Eigenvectors, tmp_path)
    assert "Verdict: model: the computation is the cause (step 5, batch 5)" in result.text
    assert "linalg_eigh in the backward pass" in result.text
    assert isinstance(result.error, torch.linalg.LinAlgError)
