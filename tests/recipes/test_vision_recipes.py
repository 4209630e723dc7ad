"""The photo recipes train with the command line on small samples in the right format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision import models

from tests.recipes.samples import sample_for
from trainer.cli import main

SMALL = ["trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false"]


def fit(name: str, folder: Path, *overrides: str) -> dict[str, Any]:
    """Run a recipe on its sample. Returns the record of the run."""
    sample = sample_for(name, folder / "sample")
    assert main(["fit", f"+recipe={name}", *sample, *SMALL, *overrides]) == 0
    (result,) = folder.glob(f"outputs/{name}/*/run.json")
    assert json.loads(result.read_text())["status"] == "completed"
    curves = json.loads(result.read_text())["curves"]
    assert {"val_loss", "val_acc"} <= set(curves["metrics"]["val"])  # both are in the picture
    return json.loads(result.read_text())


@pytest.mark.nightly
def test_resnet_learns_generated_images_in_the_format_of_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    smaller = ["model.architecture=resnet18", "data.limit=128", "data.batch_size=16", "data.resize_size=36"]
    result = fit("resnet50_cifar10", tmp_path, "precision=16-mixed", *smaller, "data.crop_size=32")
    assert result["steps"] == 40  # five epochs of eight batches: the first 128 images and no others
    assert result["metrics"]["val_acc"] > 0.6  # ten classes
    assert result["metrics"]["val_loss"] < 1.2  # 2.3 by guessing


@pytest.mark.whole
def test_new_layer_of_a_frozen_net_learns_photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Random weights suffice to separate discs from bars, and blue from red.
    monkeypatch.chdir(tmp_path)
    smaller = ["model.architecture=resnet18", "data.batch_size=8", "data.image_size=48", "optimizer.lr=0.01"]
    result = fit("resnet50_caltech256", tmp_path, "precision=16-mixed", *smaller)
    assert result["steps"] == 50
    assert result["metrics"]["val_acc"] >= 0.75  # four classes, four images


@pytest.mark.whole
def test_run_is_tested_and_resumed_without_its_initial_weights_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    weights = tmp_path / "resnet18.pth"
    torch.save(models.resnet18().state_dict(), weights)
    smaller = ["model.architecture=resnet18", "data.batch_size=8", "data.image_size=32", "trainer.max_epochs=1"]
    fitted = fit("resnet50_caltech256", tmp_path, *smaller, f"model.weights={weights.as_posix()}")
    weights.unlink()
    (run,) = tmp_path.glob("outputs/resnet50_caltech256/*")
    assert main(["test", f"ckpt={run.as_posix()}", "hydra.run.dir=tested"]) == 0
    tested = json.loads(Path("tested/run.json").read_text())["metrics"]
    assert tested["test_loss"] == pytest.approx(fitted["metrics"]["val_loss"])  # the same images
    assert main(["fit", f"ckpt={run.as_posix()}", "trainer.max_epochs=2", "hydra.run.dir=more"]) == 0
    assert json.loads(Path("more/run.json").read_text())["steps"] == 2 * fitted["steps"]
