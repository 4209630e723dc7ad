"""The calls of one training step: a change that adds some must change the numbers of this file."""

import gc
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import lightning
import pytest

import trainer
from tests.support import Regression, loader_of, make_batches, make_trainer

PACKAGE, LIGHTNING = Path(trainer.__file__).parent, Path(lightning.__file__).parent
PINNED = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
STEP = 5
PYTHON_CALLS, C_CALLS, OWN_CALLS = 184, 133, 64


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


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    module = Watched()
    make_trainer(tmp_path_factory.mktemp("fit"), precision="32-true").fit(module, loader_of(make_batches(STEP + 3)))
    return module.calls


def test_plain_step_runs_no_function_of_lightning(calls):
    assert [file for event, file in calls if LIGHTNING in file.parents] == []


def test_plain_step_makes_as_many_calls_as_before(calls):
    if platform.python_version_tuple()[:2] != ("3", "11") or f"torch=={version('torch')}" not in PINNED:
        pytest.skip("The numbers are those of Python 3.11 and of the torch in constraints.txt.")
    python = [file for event, file in calls if event == "call"]
    own = [file for file in python if PACKAGE in file.parents]
    assert (len(python), len(calls) - len(python), len(own)) == (PYTHON_CALLS, C_CALLS, OWN_CALLS)
