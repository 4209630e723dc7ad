"""``tune lr``: the suggestion for a curve, and a whole run."""

import json
from pathlib import Path

import pytest

from tests.cli.tune.test_lr_suggestion import RATES, sigmoid
from trainer.cli import main, tune
from trainer.cli.parsing import read
from trainer.cli.tune import report_lr


@pytest.fixture
def config(project):
    return tune.composed(read(["tune", "lr", "+recipe=line"]))


def message(points, **changes):
    usual = {"precision": "16-mixed", "ended_by": "divergence", "skipped": 2, "first_loss": 2.3}
    return {"status": "ok", "points": points, **usual, **changes}


def test_suggestion(config, tmp_path, capsys):
    assert report_lr(message(sigmoid(1e-3)), *config, tmp_path) == 0
    result = json.loads((tmp_path / "tune.json").read_text())
    assert result["suggestion"] == pytest.approx(1e-3, rel=0.2)
    assert (result["key"], result["precision"]) == ("optimizer.lr", "16-mixed")
    assert result["curve"]["lr"] == RATES
    out = capsys.readouterr().out
    assert f": optimizer.lr={result['suggestion']:.2g} (currently 0.1)\n" in out
    assert "The test ended with divergence, after 100 rates and 2 skipped steps." in out


def test_no_suggestion(config, tmp_path, capsys):
    assert report_lr(message([], ended_by="overflows"), *config, tmp_path) == 1
    out = capsys.readouterr().out
    assert "The test ended with overflows, after 0 rates" in out
    assert "No suggestion: the curve has only 0 points" in out
    assert "optimizer.lr=" not in out


@pytest.mark.whole
def test_whole_run(project, executable_is_warm, capfd):
    plain = ["optimizer.momentum=0", "data.batch_size=16", "callbacks=default"]
    assert main(["tune", "lr", "+recipe=line", *plain, "tune.min_lr=1e-3", "tune.max_lr=100"]) == 0
    (file,) = Path("outputs").rglob("tune.json")
    result = json.loads(file.read_text())
    assert 0.02 < result["suggestion"] < 2.0
    assert result["ended_by"] == "divergence"
    assert f"optimizer.lr={result['suggestion']:.2g} (currently 0.1)" in (out := capfd.readouterr().out)
    assert f"The results of all attempts are in {file}" in out
    assert {each.name for each in Path("outputs").rglob("*") if each.is_file()} == {"tune.json", "tune.log"}
