"""The calls of one training step, and the files that it runs: a change that adds some must change this file."""

import gc
import json
import platform
import re
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import lightning
import pytest

import trainer
from tests.support import Regression, loader_of, make_batches, make_trainer

PACKAGE, LIGHTNING = Path(trainer.__file__).parent, Path(lightning.__file__).parent
ROOT = Path(__file__).parents[2]
PINNED = (ROOT / "constraints.txt").read_text().splitlines()
STEP = 5
CALLS = {"of Python": 181, "of C": 131, "of this package": 61, "of Lightning": 0}


class Watched(Regression):
    """Counts the calls between the starts of two steps."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def training_step(self, batch, batch_idx):
        if batch_idx == STEP:
            gc.disable()
            sys.setprofile(self.count)
        elif batch_idx == STEP + 1:
            sys.setprofile(None)
            gc.enable()
        return super().training_step(batch, batch_idx)

    def count(self, frame, event, argument):
        if event in ("call", "c_call"):
            self.calls.append((event, Path(frame.f_code.co_filename)))


def main():
    module = Watched()
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(folder, precision="32-true").fit(module, loader_of(make_batches(STEP + 3)))
    python = [file for event, file in module.calls if event == "call"]
    counts = len(python), len(module.calls) - len(python)
    own = [sum(folder in file.parents for file in python) for folder in (PACKAGE, LIGHTNING)]
    files = {str(file.relative_to(PACKAGE)) for file in python if PACKAGE in file.parents}
    print(json.dumps([dict(zip(CALLS, (*counts, *own), strict=True)), sorted(files)]))


@pytest.fixture(scope="module")
def step(python):
    """In its own process, because other tests may have imported or patched code that a step calls."""
    done = python.run("-m", __name__)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_plain_step_makes_as_many_calls_as_before(step):
    calls, _ = step
    assert calls["of Lightning"] == 0
    if platform.python_version_tuple()[:2] != ("3", "11") or f"torch=={version('torch')}" not in PINNED:
        pytest.skip("The numbers are those of Python 3.11 and of the torch in constraints.txt.")
    assert calls == CALLS


def test_files_of_a_plain_step_are_those_of_the_documentation(step):
    _, files = step
    page = (ROOT / "docs" / "architecture.md").read_text().partition("## Files of a training step")[2]
    listed = re.findall(r"`(\S+\.py)`", page.partition("\n## ")[0])
    assert sorted(listed) == files
    assert len(files) <= 12


if __name__ == "__main__":
    main()
