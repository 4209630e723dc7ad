"""Every recipe that ships composes, and runs one batch of everything."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    assert main(["fit", f"+recipe={name}", "+debug=fast_dev_run", "data.batch_size=4"]) == 0
    (result,) = tmp_path.glob(f"outputs/{name}/*/result.json")
    assert '"status": "completed"' in result.read_text()
