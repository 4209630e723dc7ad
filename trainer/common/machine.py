"""Measure the machine's cores, memory and disks. Does not import torch.

The results respect the limits of the process's container and batch job.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SHARED_MEMORY = Path("/dev/shm")

_NETWORK = ("9p", "afs", "beegfs", "ceph", "cifs", "gpfs", "glusterfs", "lustre", "nfs", "panfs", "smb", "sshfs")
"""Prefixes of the names of network file systems in ``/proc/mounts``."""

_NO_LIMIT = 2**60  # cgroup v1 writes a number near 2**63 for "no limit"


class Cores(NamedTuple):
    """Processor cores.

    Args:
        total: number of cores of the machine, including hyper-threads.
        allowed: number of cores that the process may run on (its affinity).
        quota: limit on the CPU time of its control group, in cores. None for no limit.
    """

    total: int
    allowed: int
    quota: float | None = None

    @property
    def usable(self) -> int:
        """Number of cores that the process can use, at least 1."""
        return max(1, min(self.allowed, int(self.quota) if self.quota is not None else self.allowed))


class Memory(NamedTuple):
    """Memory of the machine in bytes. None if a value is unknown.

    Args:
        total: memory of the machine.
        available: memory available without swapping.
        limit: smallest limit of the process's control groups. None for no limit.
        left: smallest remaining memory among these control groups. Memory that only caches files counts as remaining.
            None for no limit.
    """

    total: int | None
    available: int | None
    limit: int | None = None
    left: int | None = None

    @property
    def most(self) -> int | None:
        """Maximum memory for this process: the smaller one of ``total`` and ``limit``."""
        return min((size for size in (self.total, self.limit) if size is not None), default=None)

    @property
    def usable(self) -> int | None:
        """Memory that this process can allocate now: the smaller of ``available`` and ``left``."""
        return min((size for size in (self.available, self.left) if size is not None), default=None)


class Disk(NamedTuple):
    """The disk of a folder.

    Args:
        folder: the given folder, or its nearest existing parent.
        free: free bytes.
        total: total bytes.
        problem: the reason why files cannot be written. Default: None, files can be written.
        network: type of the file system if it is a network file system. Default: None, it is local or unknown.
    """

    folder: Path
    free: int
    total: int
    problem: str | None = None
    network: str | None = None


def cpu_name() -> str:
    """Return the name of the processor, or its architecture if the name is unknown."""
    lines = _read_lines(Path("/proc/cpuinfo"))
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor()) or platform.machine()


def cores(root: Path = Path("/")) -> Cores:
    """Return the cores of this process.

    Args:
        root: root of the file system; for tests.
    """
    total = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    quotas = []
    for folder in _control_groups(root, "cpu"):
        quota, period = [*_read_text(folder / "cpu.max").split(), "max", "max"][:2]
        if quota == "max":  # no quota, or cgroup version 1
            quota, period = _read_text(folder / "cpu.cfs_quota_us"), _read_text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return Cores(total, allowed, min(quotas, default=None))


def memory(root: Path = Path("/")) -> Memory:
    """Return the memory of the machine and of this process.

    Args:
        root: root of the file system; for tests.
    """
    facts = {line.partition(":")[0]: line.split() for line in _read_lines(root / "proc/meminfo")}
    total, available = (int(facts[name][1]) * 1024 if name in facts else None for name in ("MemTotal", "MemAvailable"))
    if total is None and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:  # macOS
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits, remaining = [], []
    for folder in _control_groups(root, "memory"):
        limit = _read_text(folder / "memory.max") or _read_text(folder / "memory.limit_in_bytes")
        used = _read_text(folder / "memory.current") or _read_text(folder / "memory.usage_in_bytes")
        if not (limit.isdigit() and used.isdigit()) or int(limit) >= _NO_LIMIT:
            continue
        limits.append(int(limit))
        remaining.append(max(0, int(limit) - int(used) + _cached(folder)))
    return Memory(total, available, min(limits, default=None), min(remaining, default=None))


def disk(folder: Path, mounts: Path = Path("/proc/mounts")) -> Disk:
    """Return the disk of ``folder``. Writes a small file there, and removes it.

    Args:
        folder: the folder, which may not exist yet.
        mounts: the system's table of file systems; for tests.
    """
    place = folder.resolve()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    usage = shutil.disk_usage(place)
    problem = None
    try:
        with tempfile.TemporaryFile(dir=place) as file:  # permissions and free space do not prove that writing works
            file.write(bytes(2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = error.strerror or str(error)
    return Disk(place, usage.free, usage.total, problem, _network_file_system(place, mounts))


def suggested_workers(usable: int, gpus: int) -> int:
    """Return a first value for ``num_workers`` of dataloaders.

    With GPUs, one core per GPU is reserved for its training process. The other cores are divided among the GPUs, with
    1 to 8 workers per GPU: more are rarely faster, and each worker holds a copy of the dataset. Without a GPU, training
    needs the cores, so there is only one worker per 8 cores, up to 4.

    Args:
        usable: number of cores for this process.
        gpus: number of GPUs in the machine.
    """
    if gpus == 0:
        return min(4, usable // 8)
    return max(1, min(8, (usable - gpus) // gpus))


def memory_in_use() -> int:
    """Return the physical memory of this process in bytes, or `peak_memory` if it is unknown."""
    pages = _read_text(Path("/proc/self/statm")).split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else peak_memory()


def peak_memory() -> int:
    """Return the peak resident set size of this process in bytes, or 0 if it is unknown."""
    # not ru_maxrss, which a child process inherits from its parent
    for line in _read_lines(Path("/proc/self/status")):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def nvidia_smi(*words: str) -> list[str]:
    """Return the lines that the program ``nvidia-smi`` prints; [] if it fails or is missing."""
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def shared_memory() -> tuple[int, int] | None:
    """Return free and total bytes of the shared memory that dataloader workers use, or None if they are unknown."""
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError:  # not on this system
        return None
    return usage.free, usage.total


def readable(size: float | None) -> str:
    """Format a number of bytes.

    >>> readable(512), readable(3 * 2**20), readable(1.5 * 2**30), readable(None)
    ('512 bytes', '3 MiB', '1.5 GiB', 'unknown')
    """
    if size is None:
        return "unknown"
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


# --- the system's files ---------------------------------------------------------------------------------------


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the process's control group and its parents, in cgroup version 2 and version 1."""
    top = root / "sys/fs/cgroup"
    for line in _read_lines(root / "proc/self/cgroup"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number != "0" and controller not in controllers.split(","):
            continue
        base = top if number == "0" else top / controller
        group = base / path.lstrip("/")
        # in a container, `path` is often the host's and does not exist here; the group of the container is then `base`
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(base) and folder.is_dir())


def _cached(folder: Path) -> int:
    """Return the bytes of cached files in a control group, which the system drops if it needs memory."""
    counters = dict(line.split()[:2] for line in _read_lines(folder / "memory.stat") if len(line.split()) == 2)
    return int(counters.get("total_inactive_file", counters.get("inactive_file", "0")))


def _network_file_system(folder: Path, mounts: Path) -> str | None:
    rows = [line.split() for line in _read_lines(mounts)]
    systems = {Path(row[1].replace("\\040", " ")): row[2].removeprefix("fuse.") for row in rows if len(row) > 2}
    name = next((systems[point] for point in (folder, *folder.parents) if point in systems), "")
    return name if name.startswith(_NETWORK) else None


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _read_text(file: Path) -> str:
    return " ".join(_read_lines(file)).strip()
