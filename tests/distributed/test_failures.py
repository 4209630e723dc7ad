"""A process of two fails while the other waits for it: both end, soon, and say which it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
TIMEOUT = 100
"""Seconds; with the time that two processes need to import torch and Lightning."""


def run(*arguments: str, torchrun: bool = False) -> tuple[int, str]:
    """The exit status of a run of ``failing_worker.py``, and what all its processes said."""
    left_out = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if torchrun else []
    done = subprocess.run(
        [sys.executable, *launcher, str(Path(__file__).with_name("failing_worker.py")), *arguments],
        env=environment | {"OMP_NUM_THREADS": "1"}, timeout=TIMEOUT, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,  # which ends when the last process does
    )  # fmt: skip
    return done.returncode, done.stdout


def test_a_rank_that_raises_ends_the_other_which_would_not_notice() -> None:
    status, output = run("ddp", "0", "training", "raises", "asleep")
    assert status == 1
    assert "ValueError: rank 0 has had enough" in output
    assert "has not ended by itself, and is killed" in output


def test_a_rank_that_is_killed_is_named_and_ends_the_other_which_would_not_notice() -> None:
    status, output = run("ddp", "1", "setup", "dies", "asleep")
    assert status == 1
    assert "Rank 1 (process " in output
    assert "was killed by SIGKILL. The others end, too." in output


def test_without_the_first_rank_the_other_ends() -> None:
    status, output = run("ddp", "0", "training", "dies", "asleep")
    assert status == -9
    assert "has died in the middle of the run. Rank 1 cannot go on without it, and ends." in output
