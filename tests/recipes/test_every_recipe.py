"""Every recipe has a description, composes, and runs one batch of each command that it supports."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recipes.samples import THINGS, caltech256, cifar10, tiny_llama
from tests.support import tiered
from trainer.cli import main

RECIPES = sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "recipe").glob("*.yaml"))
SMALLER = {
    "finetune": ["model.sample_length=5"],
    "gpt": ["model.sample_length=5"],
    "language_model": ["model.sample_length=5"],
    "mlp": ["data.num_batches=2", "data.in_features=64"],
    "resnet50": ["data.image_size=16", "+model.net.width_per_group=1"],
    "resnet50_caltech256": ["model.architecture=resnet18", "data.image_size=32"],
    "resnet50_cifar10": ["model.architecture=resnet18"],
    "unet": ["data.train_size=20", "data.val_size=8", "data.test_size=8"],
}
"""Overrides of recipes with slow batches."""

FEW = ["data.limit=40", "data.val_size=20", "data.resize_size=40", "data.crop_size=32", "data.num_workers=0"]
DATA: dict[str, Callable[[Path], list[str]]] = {
    "finetune": lambda folder: [f"model.folder={tiny_llama(folder)}", "data.context=32"],
    "resnet50_caltech256": lambda folder: [
        *(f"data.root={caltech256(folder)}", f"data.num_classes={len(THINGS)}", "data.num_workers=0"),
        "model.weights=null",
    ],
    "resnet50_cifar10": lambda folder: [f"data.root={cifar10(folder)}", "data.check_md5=false", *FEW],
}
"""Write the data that a recipe needs into a folder, and return the overrides to use it without a network."""

WRITTEN = {
    "finetune": "samples.txt",
    "gpt": "samples.txt",
    "language_model": "samples.txt",
    "resnet50_caltech256": "predictions.csv",
    "unet": "masks/test_0003.png",
}
"""For predict, if the recipe has a writer."""

PRECISIONS = {"fit": "16-mixed", "test": "32", "predict": "bf16-mixed"}  # a fit also validates
LEFT_OUT = {"gan": ["test"], "mlp": ["test", "predict"]}
"""Commands without the required methods of the module or of the data module."""


def test_recipes_have_a_description_and_a_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes"]) == 0
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines()}
    for name in RECIPES:
        text = (Path(__file__).parents[2] / "conf" / "recipe" / f"{name}.yaml").read_text(encoding="utf-8")
        package, description, command, *_ = text.splitlines()
        assert package == "# @package _global_"
        assert description == f"# {lines[name]}"
        assert description.endswith(".")
        assert command.startswith(f"#   python -m trainer fit +recipe={name}")


@pytest.mark.parametrize("name", tiered([name for name in RECIPES if name != "images"], quick=["mlp"]))
def test_runs_a_batch_of_everything(name, tmp_path, monkeypatch):
    """The recipe for images is in ``test_images.py``."""
    monkeypatch.chdir(tmp_path)
    if name == "finetune":
        pytest.importorskip("peft", reason="needs transformers")
    sample = [*DATA.get(name, lambda folder: [])(tmp_path / "sample"), *SMALLER.get(name, [])]
    for command in (one for one in PRECISIONS if one not in LEFT_OUT.get(name, [])):
        settings = ["+debug=fast_dev_run", f"precision={PRECISIONS[command]}", "data.batch_size=4", "trainer=cpu"]
        assert main([command, f"+recipe={name}", *settings, *sample, f"hydra.run.dir={command}"]) == 0
        result = json.loads((tmp_path / command / "run.json").read_text())
        assert result["status"] == "completed"
        assert all(map(math.isfinite, result["metrics"].values()))
        if command == "predict":
            assert (tmp_path / command / WRITTEN.get(name, "predictions.pt")).exists()
        elif command != "fit":
            assert result["metrics"]
