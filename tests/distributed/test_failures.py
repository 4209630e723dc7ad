"""A rank fails while the other waits for it: both end soon, and report the failed rank."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import needs_deepspeed, needs_fsdp2
from tests.warm_python import WarmPython

TIMEOUT = 100
"""Seconds; with the time that two processes need to import torch and Lightning."""


def run(python: WarmPython, *arguments: str, children: bool = False) -> tuple[int, str]:
    """Return the exit status of ``failing_worker.py`` and the output of all its processes."""
    left_out = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    with python.start(
        str(Path(__file__).with_name("failing_worker.py")), *arguments, env=environment | {"OMP_NUM_THREADS": "1"},
        children=children, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,  # which ends with the last process
    ) as process:  # fmt: skip
        said, _ = process.communicate(timeout=TIMEOUT)
    return process.returncode, said


def test_rank_that_raises_ends_a_sleeping_rank(python: WarmPython) -> None:
    status, output = run(python, "ddp", "0", "training", "raises", "asleep", children=True)
    assert status == 1
    assert "ValueError: rank 0 has had enough" in output
    assert "has not exited, and is killed" in output


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(["ddp", "1", "setup"], id="ddp 1 setup"),
        pytest.param(["fsdp", "1", "setup"], id="fsdp 1 setup", marks=needs_fsdp2),
        pytest.param(["fsdp", "1", "training"], id="fsdp 1 training", marks=needs_fsdp2),
        pytest.param(["deepspeed", "1", "training"], id="deepspeed 1 training", marks=needs_deepspeed),
    ],
)
def test_killed_rank_is_named_and_ends_a_sleeping_rank(python: WarmPython, where: list[str]) -> None:
    status, output = run(python, *where, "dies", "asleep", children="deepspeed" in where)
    assert status == 1
    assert "Rank 1 (process " in output
    assert "was killed by SIGKILL. The others end, too." in output


def test_without_the_first_rank_the_other_ends(python: WarmPython) -> None:
    status, output = run(python, "ddp", "0", "training", "dies", "asleep", children=True)
    assert status == -9
    assert "has died during the run. Rank 1 cannot continue without it, and exits." in output
