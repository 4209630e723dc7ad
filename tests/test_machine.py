"""Facts about the machine, with simulated file trees of several systems, and on this one."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer import machine
from trainer.machine import Cores, Memory


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("allowed", "quota", "usable"), [(16, None, 16), (4, None, 4), (16, 2.5, 2), (16, 0.5, 1), (2, 8.0, 2)]
)
def test_usable_cores(allowed, quota, usable):
    assert Cores(16, allowed, quota).usable == usable


def test_quota_is_the_narrowest_of_the_groups_above(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/jobs/mine\n",
            "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
            "sys/fs/cgroup/jobs/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/jobs/mine/cpu.max": "max 100000\n",
        },
    )
    assert machine.cores(root).quota == 2.5


def test_quota_and_limit_of_version_one(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5000\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "4000000\n",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "3000000\n",
            "sys/fs/cgroup/memory/a/memory.stat": "cache 1\ntotal_inactive_file 500000\n",
        },
    )
    assert machine.cores(root).quota == 1.5
    assert machine.memory(root).limit == 4_000_000
    assert machine.memory(root).left == 1_500_000


def test_limits_in_a_container_without_the_hosts_group(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/docker-1234.scope\n",
            "sys/fs/cgroup/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/memory.max": "1000\n",
            "sys/fs/cgroup/memory.current": "900\n",
            "sys/fs/cgroup/memory.stat": "inactive_file 300\n",
            "proc/meminfo": "MemTotal:   8 kB\nMemFree: 1 kB\nMemAvailable:   6 kB\n",
        },
    )
    assert machine.cores(root).quota == 4.0
    assert machine.memory(root) == Memory(8192, 6144, 1000, 400)
    assert machine.memory(root).most == 1000
    assert Memory(None, None).most is None
    assert machine.memory(root).usable == 400


def test_limit_and_remaining_memory_are_the_smallest_of_all_groups(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/jobs/mine\n",
            "sys/fs/cgroup/jobs/memory.max": "5000\n",
            "sys/fs/cgroup/jobs/memory.current": "4900\n",
            "sys/fs/cgroup/jobs/mine/memory.max": "3000\n",
            "sys/fs/cgroup/jobs/mine/memory.current": "2000\n",
        },
    )
    assert (machine.memory(root).limit, machine.memory(root).left) == (3000, 100)


def test_without_limits(tmp_path):
    root = tree(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"})
    assert machine.cores(root).quota is None
    found = machine.memory(root)
    assert (found.limit, found.left, found.available, found.usable) == (None, None, None, None)


def test_this_machine():
    cores, memory = machine.cores(), machine.memory()
    assert 1 <= cores.usable <= cores.allowed <= cores.total == os.cpu_count()
    assert memory.total is not None
    assert memory.total > 2**28
    assert machine.cpu_name()
    assert 2**20 < machine.peak_memory() < memory.total


def test_disk_that_one_can_write_to(tmp_path):
    found = machine.disk(tmp_path / "not" / "there")
    assert found.folder == tmp_path.resolve()
    assert 0 < found.free <= found.total
    assert found.problem is None
    assert list(tmp_path.iterdir()) == []


def test_full_disk(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert machine.disk(tmp_path).problem == "No space left on device"


def test_network_file_system_is_that_of_the_longest_mount(tmp_path):
    root = tmp_path.resolve()
    (root / "data" / "runs").mkdir(parents=True)
    (root / "data here").mkdir()
    mounts = root / "mounts"
    escaped = str(root / "data here").replace(" ", "\\040")
    lines = [
        "disk / ext4 rw 0 0",
        f"server:/x {root}/data nfs4 rw 0 0",
        f"me@host: {escaped} fuse.sshfs rw 0 0",
    ]
    mounts.write_text("\n".join(lines))
    assert machine.disk(root / "data" / "runs", mounts).network == "nfs4"
    assert machine.disk(root / "data here", mounts).network == "sshfs"
    assert machine.disk(root, mounts).network is None


@pytest.mark.parametrize(
    ("usable", "gpus", "workers"),
    [(7, 0, 0), (16, 0, 2), (96, 0, 4), (2, 1, 1), (8, 1, 7), (96, 8, 8), (4, 8, 1)],
)
def test_workers(usable, gpus, workers):
    assert machine.suggested_workers(usable, gpus) == workers


@pytest.mark.parametrize(("platform", "unit"), [("freebsd", 1024), ("darwin", 1)])
def test_unit_of_the_peak_memory_without_proc(monkeypatch, platform, unit):
    def no_proc(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(machine.Path, "read_text", no_proc)
    monkeypatch.setattr(machine.sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=1000))
    assert machine.peak_memory() == 1000 * unit
