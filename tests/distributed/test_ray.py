"""Ray: two workers of Ray Train are two DDP ranks, and Ray Tune receives the metrics."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'ray[train,tune]'")
]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray")
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ray_worker.py")), str(folder)],
        env={**os.environ, **quiet, "PYTHONPATH": str(ROOT)}, cwd=folder, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def read(folder, name):
    return json.loads((folder / name).read_text())


def weights_of(folder, rank):
    return torch.load(folder / f"worker_{rank}.pt", weights_only=True)


def assert_equal(weights, others):
    torch.testing.assert_close(weights, others, rtol=0, atol=0)


def test_two_workers_train_bitwise_the_model_of_lightning(folder):
    first, second = weights_of(folder, 0), weights_of(folder, 1)
    assert_equal(first["ours"], first["lightning"])
    assert_equal(first["ours"], second["ours"])
    assert ("deepspeed" in first) is (find_spec("deepspeed") is not None)
    for engine in first.keys() & {"fsdp", "deepspeed"}:
        torch.testing.assert_close(first[engine], first["ours"], rtol=0, atol=1e-6)
    assert not torch.equal(first["ours"]["net.0.weight"], first["reported"]["net.0.weight"])


def test_checkpoints_and_metrics_are_reported(folder):
    workers = [read(folder, f"worker_{rank}.json") for rank in (0, 1)]
    assert [(worker["world_size"], worker["skipped"]) for worker in workers] == [(2, 1)] * 2
    reported = torch.load(folder / "reported.ckpt", weights_only=True)
    assert_equal(reported["state_dict"], weights_of(folder, 0)["reported"])
    assert reported["MixedPrecision"]["scale"] == 128
    metrics = read(folder, "result.json")["metrics"]
    assert (metrics["epoch"], metrics["step"]) == (1, 8)
    assert 0 < metrics["val_loss"] < 4


def test_restarted_workers_are_resumed_exactly(folder):
    assert_equal(torch.load(folder / "resumed.pt", weights_only=True), weights_of(folder, 0)["reported"])


def test_worker_without_ray_strategy_raises_with_the_fix(folder):
    for rank in (0, 1):
        without, alone, first_fsdp = read(folder, f"worker_{rank}.json")["told"]
        assert without.startswith("ClusterError: Got a Trainer in one of 2 workers of Ray Train without a plugin")
        assert "plugins=RayLightningEnvironment()" in without
        assert alone.startswith("ClusterError: Got a single device and strategy 'auto', but Ray Train has started 2")
        assert "RayFSDPStrategy" in first_fsdp
        assert "expected FSDP2: strategy='fsdp'" in first_fsdp


def test_ray_tune_receives_the_metrics(folder):
    result = read(folder, "result.json")
    assert result["trials"] == 2
    assert result["best"] == {"lr": 0.1}
