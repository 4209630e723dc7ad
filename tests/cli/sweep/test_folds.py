"""``predict ckpt=SWEEP`` of a sweep over folds averages the predictions of its jobs."""

import csv
import json
from pathlib import Path

import pytest
import torch

from trainer.cli import main

pytestmark = pytest.mark.whole


def train(data, *settings, folds=(0, 1)):
    """Run the jobs of a sweep over folds in this process, with the numbers that the sweep gives them."""
    for number, fold in enumerate(folds):
        short = ["trainer.max_epochs=2", "logger=none", "trainer=cpu", "data.folds=2", *settings]
        words = ["+recipe=tabular", f"data={data}", f"data.fold={fold}", *short, f"hydra.run.dir=sweep/{number}"]
        assert main(["fit", *words]) == 0
        record = json.loads(Path(f"sweep/{number}/run.json").read_text())
        Path(f"sweep/{number}/run.json").write_text(json.dumps(record | {"job": number}))


def predicted(job):
    """Return the predictions of one job, without the sweep."""
    assert main(["predict", f"ckpt=sweep/{job}", f"hydra.run.dir=alone/{job}"]) == 0
    return torch.cat(torch.load(f"alone/{job}/predictions.pt", weights_only=True))


@pytest.mark.parametrize("data", ["wine", "diabetes"])
def test_predictions_of_folds_are_averaged(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train(data)
    assert main(["predict", "ckpt=sweep", "data.batch_size=10"]) == 0
    (folder,) = Path("sweep/predict").iterdir()
    assert f"The mean of 2 jobs is in {folder}/predictions.csv." in capsys.readouterr().out
    header, *rows = csv.reader((folder / "predictions.csv").read_text().splitlines())
    mean = (predicted(0) + predicted(1)) / 2
    assert torch.allclose(torch.cat(torch.load(folder / "predictions.pt", weights_only=True)), mean)
    assert [int(row[0]) for row in rows] == list(range(len(mean)))
    assert [float(row[-1]) for row in rows] == pytest.approx((mean.amax(1) if data == "wine" else mean).tolist(), 1e-4)
    assert header == ["sample", "class", "probability"] if data == "wine" else ["sample", "value"]
    if data == "wine":
        assert [int(row[1]) for row in rows] == mean.argmax(1).tolist()


def test_predictions_that_cannot_be_averaged(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train("wine")

    def message(*words):
        assert main(["predict", "ckpt=sweep", *words]) == 2
        return capsys.readouterr().err

    assert "Got -m with ckpt=sweep, a sweep over folds" in message("-m", "seed=1,2")
    writer = "+callbacks.own={_target_: recipes.language_model.TextWriter, dirpath: .}"
    assert "no run/0/predictions.pt, because a callback" in message("hydra.run.dir=run", writer)
    monkeypatch.setattr("recipes.tabular.TabularMLP.predict_step", lambda self, batch, _: self(batch[0]).argmax(1))
    assert "run/0/predictions.pt cannot be averaged" in message("hydra.run.dir=run")
    sizes = iter((3, 3, 2, 2))
    monkeypatch.setattr("recipes.tabular.TabularMLP.predict_step", lambda self, *_: torch.rand(next(sizes)))
    assert "have the shapes (6,), (4,), expected one" in message("hydra.run.dir=run")
