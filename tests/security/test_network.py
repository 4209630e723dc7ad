"""Importing the package, building a Trainer and a fit on the CPU use no network."""

PROGRAM = """
import socket
import warnings

warnings.simplefilter("ignore")


def refuse(*arguments, **options):
    raise AssertionError(f"asked for the network: {arguments}")


socket.socket.connect = socket.socket.connect_ex = refuse
socket.getaddrinfo = socket.create_connection = socket.gethostbyname = refuse

import sys
from pathlib import Path

import trainer
import trainer.callbacks
import trainer.cli
import trainer.precision
from trainer import Trainer

import recipes.data
import recipes.image_classification
import recipes.schedules
from lightning.pytorch.demos.boring_classes import BoringModel
from trainer.cli import main

runner = Trainer(accelerator="cpu", default_root_dir=sys.argv[1], max_epochs=1, limit_train_batches=2,
                 limit_val_batches=1, enable_progress_bar=False, enable_model_summary=False)
runner.fit(BoringModel())
runner.test(ckpt_path="best", verbose=False)
assert list(Path(sys.argv[1]).rglob("*.ckpt"))
assert main(["recipes"]) == 0
assert main(["fit", "+recipe=resnet50", "--cfg", "job"]) == 0
for name in ("requests", "wandb", "mlflow", "comet_ml", "boto3"):
    assert name not in sys.modules, name
print("none")
"""


def test_no_network_access(tmp_path, python_without_lightning):
    done = python_without_lightning.run("-c", PROGRAM, str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "none"
