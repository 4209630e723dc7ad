"""``weights=``: a run that starts with the weights of another, with a report on the terminal and in its record."""

import json
from pathlib import Path

import pytest
import torch

from trainer.cli import main
from trainer.record.find_checkpoint import find

pytestmark = pytest.mark.filterwarnings("default")


def fit(folder, *words):
    assert main(["fit", "+recipe=line", f"hydra.run.dir={folder}", *words]) == 0
    return json.loads(Path(folder, "run.json").read_text())


def weights(file):
    return torch.load(file, weights_only=True)["state_dict"]


def test_run_starts_with_the_weights_of_another(given, capfd):
    best = find(Path("given"))
    capfd.readouterr()
    record = fit("second", "weights=given", "optimizer.lr=0.0")
    assert f"Weights from {best}: 2 of 2 tensors, 2 of 2 parameters." in capfd.readouterr().err
    assert record["weights"] == {
        "path": str(best), "tensors": [2, 2], "parameters": [2, 2], "missing": [], "differing": {}, "unused": [],
        "prefixes": ["", ""],
    }  # fmt: skip
    before, after = weights(best), weights("second/checkpoints/last.ckpt")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert record["steps"] == 8  # its own
    fit("third", f"weights={best}")  # an = in a name needs no quotes
    assert main(["fit", "ckpt=second", "trainer.max_epochs=3"]) == 0  # resumes: nothing is loaded again


def test_resumed_run_keeps_its_record(given):
    again = ["weights=given", "resume=auto"]
    begun = fit("second", *again)
    (given / "run.json").unlink()  # and no best one any more
    gone_on = fit("second", *again, "trainer.max_epochs=4")
    assert gone_on["steps"] == 16
    assert gone_on["weights"] == begun["weights"]


@pytest.mark.whole
def test_trainer_of_lightning_is_refused(given, capfd):
    assert main(["fit", "+recipe=line", f"weights={given}", "trainer._target_=lightning.Trainer"]) != 0
    assert "weights with trainer._target_=lightning" in " ".join(capfd.readouterr().err.split())


@pytest.mark.whole
def test_range_test_starts_with_the_weights(project, executable_is_warm):
    fit("first", "trainer.max_epochs=30")
    words = ["+recipe=line", "tune.steps=10", "tune.min_lr=1e-9", "tune.max_lr=1e-8", "weights=first"]
    assert main(["tune", "lr", *words, "hydra.run.dir=tuned"]) in (0, 1)
    assert 0 < max(json.loads(Path("tuned/tune.json").read_text())["curve"]["loss"]) < 0.1  # 1.5 without the weights
