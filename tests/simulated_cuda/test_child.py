import contextlib
import os
import re
from pathlib import Path

import pytest
import torch

from tests.simulated_cuda.child import Child
from tests.warm_python import ROOT

FILE = Path(__file__).with_name("deadly.py")


def test_tests_run_in_a_process_that_may_die(python):
    def run(name):
        return child.run(f"{FILE.relative_to(ROOT)}::{name}")

    with contextlib.closing(Child(python, [FILE])) as child:
        passed = run("test_passes")
        if child.refuses is not None:
            pytest.skip(child.refuses)
        assert passed == ("passed", "")
        result, text = run("test_fails")
        assert result == "failed"
        assert "assert 1.0 == 2" in text
        assert "said before" in text
        assert run("test_skips") == ("skipped", "Skipped: not today")
        result, text = run("test_dies")
        assert result == "failed"
        assert "The process of the simulated device died." in text
        assert "deadly.py" in text  # reports the device
        assert run("test_passes") == ("passed", "")  # in another process


def test_pinned_torch_can_simulate(python):
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if torch.__version__.partition("+")[0] != pinned[1] or os.uname().sysname != "Linux" or torch.version.cuda is None:
        pytest.skip("this is not the torch of constraints.txt, with CUDA, on Linux")
    with contextlib.closing(Child(python, [FILE])) as child:
        child.run(f"{FILE.relative_to(ROOT)}::test_passes")
        assert child.refuses is None
