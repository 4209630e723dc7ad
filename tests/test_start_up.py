"""The number of modules that a program and a command import on top of ``import lightning.pytorch``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.whole

MODULES_OF_A_TRAINER = 175
"""The largest number of the project's modules that ``from trainer import Trainer`` may import."""

PROGRAM = """
import gc, json, sys
import lightning.pytorch
before = set(sys.modules)
collections = sum(generation["collections"] for generation in gc.get_stats())
from trainer import Trainer
collections = sum(generation["collections"] for generation in gc.get_stats()) - collections
print(json.dumps([sorted(before), sorted(sys.modules.keys() - before), collections]))
"""

COMMAND = """
import json, sys
from trainer.cli import main
small = ["data.batch_size=4", "data.in_features=8", "data.out_features=8"]
assert main(["fit", "+recipe=mlp", "+debug=fast_dev_run", *small]) == 0
print(json.dumps(sorted(sys.modules)))
"""


def last_line_of(code: str, folder: Path) -> list[list[str]]:
    words = [sys.executable, "-W", "ignore", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def packages(modules: list[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return last_line_of(PROGRAM, tmp_path_factory.mktemp("program"))


def test_trainer_imports_nothing_but_the_project_on_top_of_lightning(program):
    _, added, _ = program
    assert packages(added) == {"trainer"}
    assert len(added) <= MODULES_OF_A_TRAINER


def test_no_garbage_is_collected_while_a_trainer_is_imported(program):
    assert program[2] <= 1  # the first allocation afterwards


def test_command_imports_hydra_and_the_recipe_on_top_of_lightning(program, tmp_path):
    added = packages(last_line_of(COMMAND, tmp_path)) - packages(program[0]) - sys.stdlib_module_names
    assert added <= {"trainer", "recipes", "hydra", "hydra_plugins", "omegaconf", "antlr4", "attr", "yaml", "_yaml"}
