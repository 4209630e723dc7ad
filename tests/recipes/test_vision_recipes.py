"""The photo recipes train with the command line on small samples in the right format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torchvision import models

from tests.recipes.samples import sample_for
from trainer.cli import main


@pytest.mark.whole
def test_run_is_tested_and_resumed_without_its_initial_weights_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    weights = tmp_path / "resnet18.pth"
    torch.save(models.resnet18().state_dict(), weights)
    smaller = ["model.architecture=resnet18", "data.batch_size=8", "data.image_size=32", "trainer.max_epochs=1"]
    sample = [*sample_for("resnet50_caltech256", tmp_path / "sample"), f"model.weights={weights.as_posix()}"]
    recipe = ["+recipe=resnet50_caltech256", *sample, *smaller, "trainer.accelerator=cpu", "hydra.run.dir=run"]
    assert main(["fit", *recipe]) == 0
    weights.unlink()
    fitted = json.loads(Path("run/run.json").read_text())
    assert main(["test", "ckpt=run", "hydra.run.dir=tested"]) == 0
    tested = json.loads(Path("tested/run.json").read_text())["metrics"]
    assert tested["test_loss"] == pytest.approx(fitted["metrics"]["val_loss"])  # the same images
    assert main(["fit", "ckpt=run", "trainer.max_epochs=2", "hydra.run.dir=more"]) == 0
    assert json.loads(Path("more/run.json").read_text())["steps"] == 2 * fitted["steps"]
