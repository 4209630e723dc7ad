"""Many processes, one of which exists: what a sharded step exchanges does not grow with their number."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.distributed import fake_worker
from tests.support import needs_fsdp2
from tests.warm_python import ROOT, WarmPython

pytestmark = [pytest.mark.slow, needs_fsdp2]


@pytest.mark.parametrize("size", [8, 64])
def test_a_step_of_many_processes(python: WarmPython, tmp_path: Path, size: int) -> None:
    started = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "PYTHONPATH": str(ROOT)}
    done = python.run(
        fake_worker.__file__, str(size), str(tmp_path / "found"), env=os.environ | started, cwd=tmp_path, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found").read_text())
    assert found["counts"] == {"all-gather": 10, "all-reduce": 2, "reduce-scatter": 5}
    assert found["by hand"] == {"all-gather": 9, "all-reduce": 2, "reduce-scatter": 5}
    assert found["during"] == {"unscale_": 1, "clip_": 1, "step": 0, "update": 0}
    state = found["state"]
    assert state["optimizer"] == 2 * state["parameters"]
    assert state["parameters"] == pytest.approx(552_256 / size, rel=0.05)  # weights of fewer rows than there are ranks
