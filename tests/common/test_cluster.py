"""Processes started by a launcher against the Trainer's arguments: if they differ, an error has both numbers."""

import os
import socket
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities import rank_zero_only

from tests.parity import QUIET
from trainer import Trainer
from trainer.common import cluster
from trainer.errors import ClusterError, ConfigurationError

TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
            "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "0"}  # fmt: skip
SRUN = {"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", rank_zero_only.rank)  # a Trainer sets these; restored afterwards
    for name in {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK", *TORCHRUN, *SRUN}:
        monkeypatch.delenv(name, raising=False)


def build(monkeypatch, environment, **arguments):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return Trainer(**QUIET | {"accelerator": "cpu"} | arguments)


@pytest.mark.parametrize(
    ("environment", "nodes"),
    [({}, 1), (TORCHRUN, 2), (TORCHRUN | {"GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "2"}, 1), (SRUN, 2)],
)
def test_auto_takes_as_many_nodes_as_were_started(environment, nodes, monkeypatch):
    trainer = build(monkeypatch, environment, devices=2, num_nodes="auto", strategy="ddp")
    assert (trainer.num_nodes, trainer.world_size) == (nodes, 2 * nodes)
    assert trainer.engine.may_change_world_size
    alone = build(monkeypatch, environment, devices=2, num_nodes="auto", strategy="ddp", plugins=LightningEnvironment())
    assert alone.num_nodes == 1


@pytest.mark.parametrize(
    ("environment", "devices", "found"),
    [
        (TORCHRUN, 2, "2 processes, but torchrun has started 4 processes: WORLD_SIZE=4"),
        (SRUN, 2, "Slurm has started 4 processes: SLURM_NTASKS=4, SLURM_NTASKS_PER_NODE=2, SLURM_NNODES=2"),
        (TORCHRUN, 4, "LOCAL_WORLD_SIZE=2, GROUP_WORLD_SIZE=2"),
    ],
)
def test_other_counts_are_refused_before_processes_wait(environment, devices, found, monkeypatch):
    trainer = build(monkeypatch, environment, devices=devices, strategy="ddp")
    with pytest.raises(ClusterError) as raised:
        trainer.fit(BoringModel())
    for part in (found, f"Got devices={devices} and num_nodes=1", "Expected devices=2 and num_nodes=2"):
        assert part in str(raised.value)


class SecondHere(LightningEnvironment):
    """A custom environment for the second process of a machine."""

    def local_rank(self):
        return 1


def test_process_without_a_device_raises(monkeypatch):
    own = {"plugins": SecondHere(), "strategy": "ddp"}
    with pytest.raises(ClusterError, match=r"Got devices=1, but according to SecondHere this is process 2 of"):
        build(monkeypatch, {}, devices=1, **own)
    assert build(monkeypatch, {}, devices=2, **own).num_devices == 2
    with pytest.raises(ClusterError, match="Expected devices=2 and num_nodes=2"):
        build(monkeypatch, TORCHRUN | {"LOCAL_RANK": "1", "RANK": "1"}, devices=1, strategy="ddp")


def test_worker_of_ray_train_needs_its_plugin(monkeypatch):
    ray, alone, size = ModuleType("ray.train"), {"devices": 1, "max_steps": 1}, Mock(return_value=1)
    ray.get_context = lambda: SimpleNamespace(get_world_size=size)
    monkeypatch.setitem(sys.modules, "ray.train", ray)
    assert build(monkeypatch, {}, **alone).world_size == 1
    size.return_value = 2
    message = r"one of 2 workers of Ray Train without a plugin.*Trainer\(strategy=RayDDPStrategy\(\), plugins=RayLight"
    with pytest.raises(ClusterError, match=f"(?s){message}"):
        build(monkeypatch, {}, **alone)
    build(monkeypatch, {}, plugins=LightningEnvironment(), **alone).fit(BoringModel())  # on purpose
    with pytest.raises(ClusterError, match="strategy 'auto', but Ray Train has started 2 processes"):
        build(monkeypatch, {}, plugins=SecondHere(), **alone).fit(BoringModel())


@pytest.mark.parametrize(
    ("environment", "num_nodes", "expected"),
    [
        ({"LOCAL_RANK": "1"}, 1, "LOCAL_RANK=1 indicates .* but MASTER_PORT is not set"),
        ({"LOCAL_RANK": "1", "MASTER_PORT": "1"}, 2, "but MASTER_ADDR is not set"),
        ({}, 2, "num_nodes is 2, .* but MASTER_ADDR, MASTER_PORT, NODE_RANK are not set"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, 1, "Got 2 processes from .* WORLD_SIZE=4 are set"),
    ],
)
def test_variables_without_which_processes_cannot_find_each_other(environment, num_nodes, expected, monkeypatch):
    trainer = build(monkeypatch, environment, devices=2, num_nodes=num_nodes, strategy="ddp")
    with pytest.raises(ConfigurationError, match=expected):
        trainer.fit(BoringModel())


def test_environment_with_all_variables_is_accepted(monkeypatch):
    cluster.check_addresses(LightningEnvironment(), 1, 2)
    monkeypatch.setenv("WORLD_SIZE", "4")  # of a run that this process was part of
    cluster.check_addresses(LightningEnvironment(), 1, 2)
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
        monkeypatch.setenv(name, "1")
    cluster.check_addresses(LightningEnvironment(), 2, 4)


def test_port_in_use_is_named(monkeypatch):
    error = torch.distributed.DistNetworkError("... port: 80, code: -98, name: EADDRINUSE, ...")
    assert cluster.explained(error) is error, "nobody has chosen a port"
    monkeypatch.setenv("MASTER_PORT", "80")
    assert "The port 80 of this machine" in str(cluster.explained(error))
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert "15000 plus the last four digits" in str(cluster.explained(error))
    other = torch.distributed.DistNetworkError("timed out")
    assert cluster.explained(other) is other


def test_port_is_reserved_until_spawned_processes_listen(monkeypatch):
    def launch(launcher, function, *args, trainer):
        port = trainer.strategy.cluster_environment.main_port
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store.set("found", "here")
        assert torch.distributed.TCPStore("127.0.0.1", port, is_master=False).get("found") == b"here"
        ports.append(port)

    ports = []
    monkeypatch.setattr(_MultiProcessingLauncher, "launch", launch)
    trainer = build(monkeypatch, {}, devices=2, strategy="ddp_spawn")
    trainer.fit(BoringModel())
    with socket.socket() as other:
        other.bind(("", ports[0]))
        with pytest.raises(torch.distributed.DistNetworkError, match="address already in use"):
            trainer.fit(BoringModel())


class Engine:
    """Rank 0 in a run of several processes on as many nodes."""

    def __init__(self, *found):
        self.found = found
        self.broadcast = lambda value: value

    def any_rank(self, decision):
        return decision or not all(self.found)

    def gather(self, mine):
        return [mine, *((f"node{rank}", found) for rank, found in enumerate(self.found, 1))]


def test_folders_that_nodes_do_not_share_raise_with_their_names(tmp_path):
    cluster.check_shared(Engine(True, True), tmp_path.exists, "It is shared")
    with pytest.raises(ClusterError, match=r"It is not shared, .* not exist on rank 2 on node2\. Expected") as raised:
        cluster.check_shared(Engine(True, False), tmp_path.exists, "It is not shared")
    assert "rank 1" not in str(raised.value)


def test_files_may_appear_late():
    seen, engine = iter([False, False, True]), Engine(True)
    engine.broadcast = lambda value: True if value is False else value
    cluster.check_shared(engine, lambda: next(seen), "It is shared")
    assert next(seen, None) is None


@pytest.mark.parametrize(("num_nodes", "resume", "checks"), [(2, "auto", True), (2, None, False), (1, "auto", False)])
def test_folders_must_be_shared_if_a_later_run_needs_them(num_nodes, resume, checks, tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr(cluster, "check_shared", lambda engine, look, what: checked.append((look(), what)))
    monkeypatch.setattr(Trainer, "num_nodes", num_nodes)
    saving = {"callbacks": [ModelCheckpoint(tmp_path / "checkpoints")], "enable_checkpointing": True}
    build(monkeypatch, {}, devices=1, resume=resume, max_steps=1, **saving).fit(BoringModel())
    assert [what.partition(", and ")[2] for _, what in checked] == ["resume='auto' must find them on any node"] * checks
    assert all(f"{os.getpid()}" in owner for owner, _ in checked)
