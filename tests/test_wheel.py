"""The wheel contains the packages and their configs, and works in any folder."""

import os
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_holds_the_packages_and_their_configs(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "trainer/loop/fit.py",
        "trainer/py.typed",
        "trainer/conf/recipe/resnet50.yaml",
        "trainer/cli/report/template/page.css",
        "recipes/image_classification.py",
    ):
        assert name in names
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"trainer", "recipes"}


MODULE = """
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel


class Line(BoringModel):
    def __init__(self, optimizer):
        super().__init__()
        self.make = optimizer

    def configure_optimizers(self):
        return self.make(self.parameters())
"""

RECIPE = """
# @package _global_
# A recipe of ten lines.
model:
  _target_: {package}.Line
  optimizer: ${{optimizer}}
data:
  _target_: {package}.BoringDataModule
trainer: {{max_epochs: 1, limit_val_batches: 0}}
"""


PROGRAM = """
import trainer
from trainer.cli import main

assert trainer.__file__.startswith({installed!r})
for words in {commands}:
    assert main(words.split()) == 0, words
"""
COMMANDS = [
    "recipes", "fit +recipe=mine logger=none hydra.run.dir=trained -q", "test ckpt=trained logger=none",
    "report trained", "recipes copy resnet50 other",
]  # fmt: skip


@pytest.mark.parametrize("package", [pytest.param("my_module", marks=pytest.mark.representative), "conf.mine"])
def test_module_and_a_recipe_of_the_users(package, installed, python_without_lightning, tmp_path):
    """Also in a package named ``conf``, like ours; Hydra reads configs from ``conf``."""
    file = tmp_path / f"{package.replace('.', '/')}.py"
    recipe = tmp_path / "conf" / "recipe" / "mine.yaml"
    for path, text in ((file, MODULE), (recipe, RECIPE.format(package=package).lstrip())):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if "." in package:
        (file.parent / "__init__.py").touch()
    program = PROGRAM.format(installed=str(installed), commands=COMMANDS)
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = python_without_lightning.run("-c", program, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for text in ("resnet50", "A recipe of ten lines.", "Results are in trained"):
        assert text in done.stdout
    assert "<style>" in (tmp_path / "trained" / "report.html").read_text()
    assert "+recipe=other" in (tmp_path / "conf" / "recipe" / "other.yaml").read_text()


def test_no_lock_file_names_an_address():
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert pins
    assert all("==" in pin and "/" not in pin and "@" not in pin for pin in pins)
