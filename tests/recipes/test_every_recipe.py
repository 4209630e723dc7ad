"""Every recipe that ships composes, and runs one batch of everything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.samples import sample_for
from trainer.cli import main

RECIPES = sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "recipe").glob("*.yaml"))


def test_there_are_recipes():
    assert "resnet50" in RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_states_its_command(name):
    text = (Path(__file__).parents[2] / "conf" / "recipe" / f"{name}.yaml").read_text()
    assert text.startswith("# @package _global_\n# ")
    assert f"python -m trainer fit +recipe={name}" in text


@pytest.mark.parametrize("name", RECIPES)
def test_runs_a_batch(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sample = sample_for(name, tmp_path / "sample")
    assert main(["fit", f"+recipe={name}", "+debug=fast_dev_run", "data.batch_size=4", *sample]) == 0
    (result,) = tmp_path.glob(f"outputs/{name}/*/result.json")
    assert '"status": "completed"' in result.read_text()


def test_the_gradients_of_a_smaller_resnet_are_right(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    smaller = ["model.net._target_=torchvision.models.resnet18", "data.image_size=16"]
    some = "callbacks.gradient_check.parameters=[net.bn1.*,net.layer1.1.bn2.*,net.fc.*]"
    assert main(["fit", "+recipe=resnet50", "+debug=gradcheck", *smaller, some, "trainer.accelerator=cpu"]) == 0
    out = capsys.readouterr().out
    assert "6 parameters in " in out
    assert "wrong" not in out
