"""The page of a real run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.report.conftest import Page
from trainer.cli import main

pytestmark = pytest.mark.filterwarnings("default")  # Lightning warns of tiny data and few workers

LINE = ["+recipe=line", "trainer.max_epochs=3", "precision=16", "precision.init_scale=16777216", "optimizer.lr=0.01"]


def test_fit_that_warns_and_fails(capsys, project, monkeypatch):
    monkeypatch.setattr("trainer.cli.report.charts._SHORTEST", 0.0)  # these runs take no longer
    text = (project / "line_fit.py").read_text()
    warning = "    def on_validation_start(self): __import__('warnings').warn('It is <late>.')\n\n"
    (project / "line_fit.py").write_text(text.replace("    def training_step", f"{warning}    def training_step", 1))
    with pytest.warns(UserWarning, match="It is <late>"):
        assert main(["fit", *LINE, "model.fail_at=9"]) == 1
    capsys.readouterr()
    assert main(["report"]) == 0
    page = Page(Path(capsys.readouterr().out.splitlines()[-1].removeprefix("The report is ")).read_text("utf-8"))
    assert "line Failed" in page.text
    assert "Why it failed RuntimeError: asked to fail" in page.text
    assert "It is <late>. (line_fit.py:" in page.sections["warnings"]
    assert "The run failed." not in page.sections["warnings"]
    assert "Optimizer steps 9 2 of 3 epochs" in page.text
    assert len(page.lines("Loss")["train"]["x"]) == 9
    assert len(page.lines("Loss")["val_loss"]["x"]) == 2
    assert page.lines("Learning rate")["SGD"]["y"] == [0.01] * 10
    assert page.lines("Loss scale")["scale"]["y"][0] == 2.0**24
    assert "Throughput" in page.titles
    assert "torch" in page.sections["environment"]
    assert "python -m trainer fit +recipe=line trainer.max_epochs=3 precision=16-mixed" in page.sections["settings"]
