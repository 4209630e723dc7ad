"""The number of modules that a program and a command import on top of ``import lightning.pytorch``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.whole

MODULES_OF_A_TRAINER = 176
"""The largest number of the project's modules that ``from trainer import Trainer`` may import."""

PROGRAM = """
import gc, json, sys
import lightning.pytorch
def collections():
    return sum(generation["collections"] for generation in gc.get_stats())
def packages(modules):
    return {name.partition(".")[0] for name in modules}
before, collected = set(sys.modules), collections()
from trainer import Trainer
of_trainer, collected = sys.modules.keys() - before, collections() - collected
import trainer.module_weights
assert "torch.distributed.checkpoint.filesystem" not in sys.modules
from trainer.cli import main
small = ["data.batch_size=4", "data.in_features=8", "data.out_features=8"]
assert main(["fit", "+recipe=mlp", "+debug=fast_dev_run", *small]) == 0
command = packages(sys.modules) - packages(before) - sys.stdlib_module_names
print(json.dumps([len(of_trainer), sorted(packages(of_trainer)), collected, sorted(command)]))
"""


def test_trainer_and_command_import_only_their_packages_on_top_of_lightning(tmp_path):
    words = [sys.executable, "-W", "ignore", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{PROGRAM}"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    number, trainer, collections, command = json.loads(done.stdout.splitlines()[-1])
    assert trainer == ["trainer"]
    assert number <= MODULES_OF_A_TRAINER
    assert collections <= 1  # garbage: at the first allocation after the import
    libraries = {"hydra", "hydra_plugins", "omegaconf", "antlr4", "attr", "yaml", "_yaml"}
    assert set(command) <= {"trainer", "recipes"} | libraries
