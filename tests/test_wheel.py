"""The wheel contains the packages and their configs, and works in any folder."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(words, python, folder, packages=None):
    environment = os.environ if packages is None else os.environ | {"PYTHONPATH": str(packages)}
    done = python.trainer(*words, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_holds_the_packages_and_their_configs(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "trainer/loops/fit.py",
        "trainer/py.typed",
        "trainer/conf/recipe/resnet50.yaml",
        "trainer/cli/report/template/page.css",
        "recipes/image_classification.py",
    ):
        assert name in names
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"trainer", "recipes"}


@pytest.mark.representative
def test_finds_its_own_and_the_users_configs(installed_python, tmp_path):
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "mine.yaml").write_text("# @package _global_\n# A recipe of mine.\nseed: 7\n")
    listed = run(["recipes"], installed_python, tmp_path)
    assert "resnet50" in listed
    assert "A recipe of mine." in listed
    assert "seed: 7" in run(
        ["fit", "+recipe=mine", "model=image_classifier", "data=digits", "--cfg", "job"], installed_python, tmp_path
    )


MODULE = """
import lightning as L
import torch


class Line(L.LightningModule):
    def __init__(self, optimizer):
        super().__init__()
        self.net, self.make = torch.nn.Linear(1, 1), optimizer

    def training_step(self, batch, batch_idx):
        return (self.net(batch) - batch).pow(2).mean()

    test_step = training_step

    def configure_optimizers(self):
        return self.make(self.parameters())


class Points(L.LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.rand(64, 1), 8)

    test_dataloader = train_dataloader
"""

RECIPE = """
# @package _global_
# A recipe of ten lines.
model:
  _target_: {package}.Line
  optimizer: ${{optimizer}}
data:
  _target_: {package}.Points
trainer: {{max_epochs: 1, limit_val_batches: 0}}
"""


@pytest.mark.parametrize("package", ["my_module", "conf.mine"])
def test_module_and_a_recipe_of_the_users(package, installed, installed_python, python_without_lightning, tmp_path):
    """Also in a package named ``conf``, like ours; Hydra reads configs from ``conf``."""
    file = tmp_path / f"{package.replace('.', '/')}.py"
    recipe = tmp_path / "conf" / "recipe" / "mine.yaml"
    for path, text in ((file, MODULE), (recipe, RECIPE.format(package=package).lstrip())):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if "." in package:
        (file.parent / "__init__.py").touch()
    words = ["fit", "+recipe=mine", "logger=none", "hydra.run.dir=trained", "-q"]
    # the former has imported our recipes before it looks for those of the user
    python = installed_python if package == "my_module" else python_without_lightning
    assert "A recipe of ten lines." in run(["recipes"], python, tmp_path, installed)
    assert "Results are in trained" in run(words, python, tmp_path, installed)
    if package == "my_module":
        run(["test", "ckpt=trained", "logger=none"], installed_python, tmp_path)
        run(["report", "trained"], installed_python, tmp_path)
        assert "<style>" in (tmp_path / "trained" / "report.html").read_text()
        run(["recipes", "copy", "resnet50", "other"], installed_python, tmp_path)
        assert "+recipe=other" in (tmp_path / "conf" / "recipe" / "other.yaml").read_text()


def test_no_lock_file_names_an_address():
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert pins
    assert all("==" in pin and "/" not in pin and "@" not in pin for pin in pins)
