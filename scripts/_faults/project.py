"""A user's project for the command line: a module in the working directory and a recipe in ./conf."""

from __future__ import annotations

from pathlib import Path

MODULE = """
import os
from dataclasses import replace
from pathlib import Path

from lightning.pytorch import LightningDataModule

from _faults.training import EVERYTHING, Classifier, Diary, training_data, validation_data

SETUP = replace(EVERYTHING, batches=20, epochs=2, overflows=(1, 7, 25), average="", pace=0.01)


class Net(Classifier):
    def __init__(self, folder):
        super().__init__(SETUP, Diary(Path(folder), int(os.environ.get("SLURM_PROCID", 0)), SETUP.pace))


class Data(LightningDataModule):
    def train_dataloader(self):
        return training_data(SETUP)

    def val_dataloader(self):
        return validation_data(SETUP)
"""

RECIPE = """
# @package _global_
# The training run of the fault suite.
#   python -m trainer fit +recipe=faulty
defaults:
  - override /trainer: cpu
  - override /logger: csv
  - override /precision: 16-mixed
model:
  _target_: faulty.Net
  folder: {folder}
data:
  _target_: faulty.Data
callbacks:
  model_checkpoint:
    every_n_train_steps: 2
trainer:
  max_epochs: 2
  accumulate_grad_batches: 3
  val_check_interval: 8
  enable_progress_bar: false
  enable_model_summary: false
  log_every_n_steps: 1
"""


def write(folder: Path) -> Path:
    """Write the project into ``folder``, where the module also writes its diary."""
    (folder / "conf" / "recipe").mkdir(parents=True)
    (folder / "faulty.py").write_text(MODULE)
    (folder / "conf" / "recipe" / "faulty.yaml").write_text(RECIPE.format(folder=folder))
    return folder
