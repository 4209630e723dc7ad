"""The collectives and our own work per step do not grow with the number of simulated ranks."""

import json
import os

import pytest

from tests.distributed import fake_worker, growth_worker
from tests.support import needs_fsdp2
from tests.warm_python import ROOT

pytestmark = needs_fsdp2


def run(python, worker, folder, *words):
    names = {"LOCAL_RANK": "0", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    environment = os.environ | names | {"PYTHONPATH": str(ROOT)}
    done = python.run(worker.__file__, *words, env=environment, cwd=folder, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]


def test_step_of_many_processes(python, tmp_path):
    size = 64
    run(python, fake_worker, tmp_path, str(size), str(tmp_path / "found"))
    found = json.loads((tmp_path / "found").read_text())
    assert found["counts"] == {"all-gather": 10, "all-reduce": 2, "reduce-scatter": 5}
    assert found["by hand"] == {"all-gather": 9, "all-reduce": 2, "reduce-scatter": 5}
    assert found["during"] == {"unscale_": 0, "clip_": 1, "step": 1, "update": 0}
    state = found["state"]
    assert state["optimizer"] == 2 * state["parameters"]
    assert state["parameters"] == pytest.approx(552_256 / size, rel=0.05)  # weights of fewer rows than there are ranks


def test_table_of_a_model_without_values(python, tmp_path):
    run(python, fake_worker, tmp_path, "16", str(tmp_path / "found"), "hsdp")
    found = json.loads((tmp_path / "found").read_text())
    whole, window = 4 * found["parameters"], 12  # a window's sums are three numbers
    blocks = whole - 2 * 50304 * 64 * 4 - 2 * 64 * 4  # without embedding, head and the last normalisation
    assert found["counts"] == {"all-gather": 3 + 3 + 1 + 1, "reduce-scatter": 4, "all-reduce": 4 + 1}
    assert found["bytes"]["all-gather"] == pytest.approx(whole + blocks, rel=1e-4)  # blocks twice; the norm
    assert found["bytes"]["reduce-scatter"] == pytest.approx(whole, rel=1e-4)
    assert found["bytes"]["all-reduce"] == pytest.approx(whole / 8 + window, rel=1e-4)
    assert whole / 8 * 4 <= found["after"] < whole / 8 * 5  # weights, gradients, and two states


def test_own_work_is_independent_of_the_world_size(python, tmp_path):
    """A fit on several nodes that looks for a checkpoint, logs, validates, and saves sharded checkpoints."""
    sizes = 8, 8, 512  # the first time, modules are imported
    run(python, growth_worker, tmp_path, str(tmp_path / "found"), *map(str, sizes))
    _, few, many = json.loads((tmp_path / "found").read_text())
    assert many["files"] == few["files"]
    assert sum(name.endswith("state.ckpt") for name in few["files"]) == 2
    assert few["ours"]["calls"] > 10_000
    assert many["ours"]["calls"] == pytest.approx(few["ours"]["calls"], abs=250)  # half a call for each process
    for kind in few["collectives"]:  # the number of these collectives depends on the time
        assert many["collectives"][kind] == pytest.approx(few["collectives"][kind], abs=20)
    saves = 4  # each rank's manifest has the checksums of all ranks' files
    objects = [one["ours"]["objects received"] - saves * size for one, size in zip((few, many), sizes[1:], strict=True)]
    assert objects[0] == objects[1] < 50
