"""The page of a real run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.report.conftest import Page
from trainer.cli import main

pytestmark = pytest.mark.filterwarnings("default")  # Lightning warns of tiny data and few workers

LINE = ["+recipe=line", "trainer.max_epochs=3", "precision=16", "precision.init_scale=16777216", "optimizer.lr=0.01"]


@pytest.fixture(autouse=True)
def alone(project, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    yield
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)


def the_page(capsys, *words: str) -> Page:
    capsys.readouterr()
    assert main(["report", *words]) == 0
    file = capsys.readouterr().out.splitlines()[-1].removeprefix("The report is ")
    return Page(Path(file).read_text(encoding="utf-8"))


def test_fit(capsys, monkeypatch):
    monkeypatch.setattr("trainer.cli.report.charts._SHORTEST", 0.0)  # these runs take no longer
    assert main(["fit", *LINE]) == 0
    page = the_page(capsys)
    assert "line Completed" in page.text
    assert "Optimizer steps 12 3 of 3 epochs" in page.text
    assert len(page.lines("Loss")["train"]["x"]) == 12
    assert len(page.lines("Loss")["val_loss"]["x"]) == 3
    assert page.lines("Learning rate")["SGD"]["y"] == [0.01] * 12
    assert page.lines("Loss scale")["scale"]["y"][0] == 2.0**24
    assert "Throughput" in page.titles
    assert "torch" in page.sections["environment"]
    assert "python -m trainer fit +recipe=line trainer.max_epochs=3 precision=16-mixed" in page.sections["settings"]


def test_fit_that_warns(capsys, project):
    text = (project / "line_fit.py").read_text()
    assert text.count("    def training_step") == 1
    warning = "    def on_train_end(self): __import__('warnings').warn('It is <late>.')\n\n"
    (project / "line_fit.py").write_text(text.replace("    def training_step", f"{warning}    def training_step"))
    with pytest.warns(UserWarning, match="It is <late>"):
        assert main(["fit", *LINE]) == 0
    assert "It is <late>. (line_fit.py:" in the_page(capsys).sections["warnings"]


def test_fit_that_fails(capsys):
    assert main(["fit", *LINE, "model.fail_at=5"]) == 1
    page = the_page(capsys, "outputs")
    assert "line Failed" in page.text
    assert "Why it failed RuntimeError: asked to fail" in page.text
    assert "The run failed." not in page.sections.get("warnings", "")
    assert len(page.lines("Loss")["train"]["x"]) == 5


def test_fit_that_logs_nothing(capsys):
    assert main(["fit", *LINE, "logger=none"]) == 0
    page = the_page(capsys)
    assert page.titles[:2] == ["Loss", "Loss scale"]  # the recorder's own
    assert "The run had no logger (logger=none)." in page.sections["curves"]
