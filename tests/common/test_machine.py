"""Facts about the machine, with simulated file trees of several systems, and on this one."""

import os
import resource
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from trainer.common import machine
from trainer.common.machine import Cores, Memory


def tree(root, group, files):
    files = {"proc/self/cgroup": f"{group}\n", **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("allowed", "quota", "usable"), [(16, None, 16), (4, None, 4), (16, 2.5, 2), (16, 0.5, 1), (2, 8.0, 2)]
)
def test_usable_cores(allowed, quota, usable):
    assert Cores(16, allowed, quota).usable == usable


LIMITS = {
    "the smallest of all groups": (
        "0::/jobs/mine",
        {
            "jobs/cpu.max": "250000 100000\n", "jobs/mine/cpu.max": "max 100000\n",
            "jobs/memory.max": "5000\n", "jobs/memory.current": "4900\n",
            "jobs/mine/memory.max": "3000\n", "jobs/mine/memory.current": "2000\n",
        },
        (2.5, 3000, 100),
    ),
    "version one": (
        "5:cpu,cpuacct:/a\n4:memory:/a\n0::/",
        {
            "cpu/a/cpu.cfs_quota_us": "150000\n", "cpu/a/cpu.cfs_period_us": "100000\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/memory.usage_in_bytes": "5000\n",
            "memory/a/memory.limit_in_bytes": "4000000\n", "memory/a/memory.usage_in_bytes": "3000000\n",
            "memory/a/memory.stat": "cache 1\ntotal_inactive_file 500000\n",
        },
        (1.5, 4_000_000, 1_500_000),
    ),
    "a container without the host's group": (
        "0::/system.slice/docker-1234.scope",
        {
            "cpu.max": "400000 100000\n", "memory.max": "1000\n", "memory.current": "900\n",
            "memory.stat": "inactive_file 300\n",
        },
        (4.0, 1000, 400),
    ),
    "no limits": ("0::/", {"memory.max": "max\n"}, (None, None, None)),
}  # fmt: skip


@pytest.mark.parametrize(("group", "files", "expected"), LIMITS.values(), ids=list(LIMITS))
def test_quota_limit_and_remaining_memory(tmp_path, group, files, expected):
    root = tree(tmp_path, group, files)
    memory = machine.memory(root)
    assert (machine.cores(root).quota, memory.limit, memory.left) == expected
    assert memory.usable == expected[2]
    (root / "proc/meminfo").write_text("MemTotal:   8 kB\nMemFree: 1 kB\nMemAvailable:   6 kB\n")
    memory = machine.memory(root)
    assert memory == Memory(8192, 6144, *expected[1:])
    assert memory.most == min(8192, expected[1] or 8192)


def test_this_machine():
    cores, memory = machine.cores(), machine.memory()
    assert 1 <= cores.usable <= cores.allowed <= cores.total == os.cpu_count()
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
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert machine.disk(tmp_path).problem == "No space left on device"


def test_network_file_system_is_that_of_the_longest_mount(tmp_path):
    root = tmp_path.resolve()
    (root / "data" / "runs").mkdir(parents=True)
    (root / "data here").mkdir()
    mounts = root / "mounts"
    escaped = str(root / "data here").replace(" ", "\\040")
    lines = ["disk / ext4 rw 0 0", f"server:/x {root}/data nfs4 rw 0 0", f"me@host: {escaped} fuse.sshfs rw 0 0"]
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
    monkeypatch.setattr(machine.Path, "read_text", Mock(side_effect=FileNotFoundError))
    monkeypatch.setattr(machine.sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=1000))
    assert machine.peak_memory() == 1000 * unit
