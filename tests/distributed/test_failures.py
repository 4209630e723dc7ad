"""A rank fails while the other waits for it: both end soon, and report the failed rank."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import needs_deepspeed, needs_fsdp2
from tests.warm_python import ROOT, WarmPython

TIMEOUT = 100
"""Seconds; with the time that two processes need to import torch and Lightning."""


def run(python: WarmPython, *arguments: str) -> tuple[int, str]:
    """Return the exit status of ``failing_worker.py`` and the output of all its processes."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT")}
    with python.start(
        str(Path(__file__).with_name("failing_worker.py")), *arguments, text=True,
        env=inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,  # which ends with the last process
    ) as process:  # fmt: skip
        output, _ = process.communicate(timeout=TIMEOUT)
    return process.returncode, output


def test_rank_that_raises_ends_a_sleeping_rank(python):
    status, output = run(python, "ddp", "0", "training", "raises")
    assert status == 1
    assert "ValueError: rank 0 has failed" in output
    assert "has not exited, and is killed" in output


@pytest.mark.parametrize(
    ("strategy", "phase"),
    [
        ("ddp", "setup"),
        pytest.param("fsdp", "training", marks=needs_fsdp2),
        pytest.param("deepspeed", "training", marks=[needs_deepspeed, pytest.mark.nightly]),
    ],
)
def test_killed_rank_is_named_and_ends_a_sleeping_rank(python, request, strategy, phase):
    if strategy == "deepspeed":
        request.getfixturevalue("deepspeed_loaded")
    status, output = run(python, strategy, "1", phase, "dies")
    assert status == 1
    assert "Rank 1 (process " in output
    assert "was killed by SIGKILL. The others end, too." in output


def test_kill_of_rank_0_ends_a_sleeping_rank(python):
    status, output = run(python, "ddp", "0", "training", "dies")
    assert status == -9
    assert "has died during the run. Local rank 1 cannot continue without it, and exits." in output
