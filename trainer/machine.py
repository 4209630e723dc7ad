"""What the machine has: cores, memory, disks. Imports no torch.

What this process may use counts: a container's share and not the host's, a batch job's cores and not all of them.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")

_NETWORK = ("9p", "afs", "beegfs", "ceph", "cifs", "gpfs", "glusterfs", "lustre", "nfs", "panfs", "smb", "sshfs")
"""File systems that live on another machine, as they are called in ``/proc/mounts``; some have a version added."""

_NO_LIMIT = 2**60  # cgroup v1 writes a number near 2**63 for "no limit"


@dataclass(frozen=True)
class Cores:
    """Processor cores.

    Args:
        total: in the machine; hyper-threads count.
        allowed: that the process may run on (its affinity).
        quota: how many cores' worth of time its control group gets; None for no limit.
    """

    total: int
    allowed: int
    quota: float | None = None

    @property
    def usable(self) -> int:
        """Whole cores that the process can keep busy, at least 1."""
        return max(1, min(self.allowed, int(self.quota) if self.quota is not None else self.allowed))


@dataclass(frozen=True)
class Memory:
    """Memory of the host, in bytes; None is what cannot be found out.

    Args:
        total: in the machine.
        available: that can be had without swapping.
        limit: of the process's control group, the narrowest one; None for none.
        left: of that limit. What the system only caches counts as left.
    """

    total: int | None
    available: int | None
    limit: int | None = None
    left: int | None = None

    @property
    def most(self) -> int | None:
        """What this process could ever have: the machine's, or its control group's limit."""
        known = [size for size in (self.total, self.limit) if size is not None]
        return min(known) if known else None

    @property
    def usable(self) -> int | None:
        """What this process can have now: the smaller of what is available and what is left of the limit."""
        known = [size for size in (self.available, self.left) if size is not None]
        return min(known) if known else None


@dataclass(frozen=True)
class Disk:
    """A folder, as somebody sees it who wants to write there.

    Args:
        folder: the one that was asked for, or the nearest above it that is there.
        free: bytes.
        total: bytes.
        problem: why nothing can be written; None if something can.
        network: the kind of file system, where it is on another machine; None on this one, or where that is unknown.
    """

    folder: Path
    free: int
    total: int
    problem: str | None = None
    network: str | None = None


def cpu_name() -> str:
    """The processor's name, or at least its architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cores(root: Path = Path("/")) -> Cores:
    """The cores of this process.

    Args:
        root: of the file system; for tests.
    """
    total = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    quotas = []
    for folder in _control_groups(root, "cpu"):
        quota, period = [*_words(folder / "cpu.max"), "max", "max"][:2]
        if quota == "max":  # none, or version 1
            quota, period = _one(folder / "cpu.cfs_quota_us"), _one(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return Cores(total, allowed, min(quotas, default=None))


def memory(root: Path = Path("/")) -> Memory:
    """The memory that is there and that this process may have.

    Args:
        root: of the file system; for tests.
    """
    total, available = _of_system(root)
    narrowest: tuple[int, int] | None = None
    for folder in _control_groups(root, "memory"):
        limit = _one(folder / "memory.max") or _one(folder / "memory.limit_in_bytes")
        used = _one(folder / "memory.current") or _one(folder / "memory.usage_in_bytes")
        if not (limit.isdigit() and used.isdigit()) or int(limit) >= _NO_LIMIT:
            continue
        left = max(0, int(limit) - int(used) + _cached(folder))
        if narrowest is None or left < narrowest[1]:
            narrowest = int(limit), left
    return Memory(total, available, *(narrowest or ()))


def disk(folder: Path, mounts: Path = Path("/proc/mounts")) -> Disk:
    """The disk that ``folder`` is on, or would be on. Writes a small file there and removes it.

    Args:
        folder: need not be there.
        mounts: the system's table of file systems; for tests.
    """
    place = folder.resolve()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    usage = shutil.disk_usage(place)
    problem = None
    try:
        with tempfile.TemporaryFile(dir=place) as file:  # a flag that says one may is no proof, nor is free space
            file.write(bytes(2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = error.strerror or str(error)
    return Disk(place, usage.free, usage.total, problem, _network(place, mounts))


def has_no_gpu(root: Path = Path("/")) -> bool:
    """Whether this machine surely has no GPU that torch could use. False where that takes torch to find out.

    On Linux, drivers of NVIDIA (Jetson and WSL included), AMD and Intel put files into ``/dev``.
    """
    if sys.platform != "linux":
        return False
    devices = root / "dev"
    patterns = ("nvidia*", "nvmap", "nvhost*", "dxg", "kfd", "dri/render*", "accel*")
    return devices.is_dir() and not any(found for pattern in patterns for found in devices.glob(pattern))


def suggested_workers(usable: int, gpus: int) -> int:
    """``num_workers`` to begin with.

    Beside a GPU: the cores less one for the training process, shared out among the GPUs, and at most 8, for more is
    rarely faster and each holds a copy of the data set. Without one the training itself wants the cores: none below
    eight, and an eighth of them above.

    Args:
        usable: cores of this process.
        gpus: in the machine.
    """
    if gpus == 0:
        return min(4, usable // 8)
    return max(1, min(8, (usable - gpus) // gpus))


def memory_in_use() -> int:
    """Bytes: the physical memory that this process takes now; where that cannot be asked, `peak_memory`."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return peak_memory()
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def peak_memory() -> int:
    """Bytes: the largest size that this process has had (its resident set). 0 where that cannot be asked."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return _peak_elsewhere()
    # Not ru_maxrss, which a child process begins with its parent's.
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)


def _peak_elsewhere() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def shared_memory() -> tuple[int, int] | None:
    """Free and all bytes of the memory that workers of dataloaders send batches through; None where that is unknown."""
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError:  # not on this system
        return None
    return usage.free, usage.total


def readable(size: float | None) -> str:
    """Bytes as one reads them.

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
    """The folders of the process's control group and of those above it, of version 2 and of version 1."""
    top = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number != "0" and controller not in controllers.split(","):
            continue
        base = top if number == "0" else top / controller
        own = base / path.lstrip("/")
        # In a container the path is often the host's and not there; then the top is the container's own.
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(base) and folder.is_dir())


def _cached(folder: Path) -> int:
    """Bytes of files that a control group holds in memory and that the system drops when it needs the room."""
    found = dict(line.split()[:2] for line in _lines(folder / "memory.stat") if len(line.split()) == 2)
    return int(found.get("total_inactive_file", found.get("inactive_file", "0")))


def _of_system(root: Path) -> tuple[int | None, int | None]:
    """Total and available memory, as Linux and macOS say; macOS does not say what is available."""
    found = {line.partition(":")[0]: line.split() for line in _lines(root / "proc/meminfo")}
    sizes = [int(found[name][1]) * 1024 if name in found else None for name in ("MemTotal", "MemAvailable")]
    if sizes[0] is None and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        sizes[0] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return sizes[0], sizes[1]


def _network(folder: Path, mounts: Path) -> str | None:
    best, kind = -1, ""
    for line in _lines(mounts):
        words = line.split()
        if len(words) < 3:
            continue
        point = Path(words[1].replace("\\040", " "))
        if folder.is_relative_to(point) and len(point.parts) > best:
            best, kind = len(point.parts), words[2]
    name = kind.removeprefix("fuse.")
    return name if name.startswith(_NETWORK) else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()


def _one(file: Path) -> str:
    return " ".join(_words(file))
