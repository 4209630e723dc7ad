"""The calls of one training step: a change that adds some must change the numbers of this file."""

import gc
import json
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import lightning
import pytest

import trainer
from tests.support import Regression, loader_of, make_batches, make_trainer

PACKAGE, LIGHTNING = Path(trainer.__file__).parent, Path(lightning.__file__).parent
PINNED = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
STEP = 5
CALLS = {"of Python": 183, "of C": 132, "of this package": 63, "of Lightning": 0}


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
    print(json.dumps(dict(zip(CALLS, (*counts, *own), strict=True))))


def test_plain_step_makes_as_many_calls_as_before(python):
    """In its own process, because other tests may have imported or patched code that a step calls."""
    done = python.run("-m", __name__)
    assert done.returncode == 0, done.stderr
    calls = json.loads(done.stdout.splitlines()[-1])
    assert calls["of Lightning"] == 0
    if platform.python_version_tuple()[:2] != ("3", "11") or f"torch=={version('torch')}" not in PINNED:
        pytest.skip("The numbers are those of Python 3.11 and of the torch in constraints.txt.")
    assert calls == CALLS


if __name__ == "__main__":
    main()
