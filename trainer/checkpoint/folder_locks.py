"""Lock a checkpoint folder for one run at a time.

The lock is on a file next to the folder. The file names the owner. The system releases the lock when the process ends,
for any reason. The lock belongs to the process (``lockf``) and not to the open file (``flock``), so forked processes,
such as dataloader workers, do not keep it. A file is locked instead of the folder, because over NFS other hosts see
only locks of files.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from trainer.checkpoint.reading import make_folder, remove_leftovers
from trainer.errors import CheckpointWriteError, FolderInUseError, warn

if sys.platform != "win32":
    import fcntl

LOCK = ".in-use.lock"
"""Suffix of the lock file's name, after the folder's name. Inside the folder, this is the whole name."""

_holds: dict[tuple[int, Path], int] = {}  # by process, because a forked process inherits this dict, but no lock


@contextmanager
def lock_folder(folder: str | Path) -> Iterator[None]:
    """Lock ``folder`` for this process. Create it if necessary, and remove incomplete checkpoints of killed processes.

    On exit, created folders that are empty are removed. The process may lock a folder several times at once, for runs
    inside of a run.

    Raises:
        FolderInUseError: if another process has locked it.
        CheckpointWriteError: if it cannot be created or written to.
    """
    folder = Path(os.path.realpath(folder))
    key = (os.getpid(), folder)
    if key in _holds:
        _holds[key] += 1
        try:
            yield
        finally:
            _holds[key] -= 1
        return
    created: list[Path] = []
    with ExitStack() as locks:
        try:
            created = make_folder(folder)
            locks.callback(_remove_empty, created)
            _lock(folder, locks)
            with TemporaryFile(dir=folder):  # fail now instead of at the first save
                pass
        except OSError as error:
            raise CheckpointWriteError(
                f"The checkpoint folder {folder} cannot be written to: {error.strerror or error}. Expected a writable"
                " folder. Choose another with ModelCheckpoint(dirpath=...), or change its permissions.",
                error.errno,
            ) from error
        _holds[key] = 1
        locks.callback(_holds.pop, key)
        remove_leftovers(folder)
        yield


def describe_owner(folder: str | Path) -> str:
    """Return the text in the lock file of ``folder``, which describes the owner, or "" if there is no lock file.

    Two hosts that read the same text share the folder. A killed process leaves its lock file, without a lock.
    """
    folder = Path(os.path.realpath(folder))
    for file in (folder.parent / f".{folder.name}{LOCK}", folder / LOCK):
        with suppress(OSError):
            return file.read_text()
    return ""


def _lock(folder: Path, locks: ExitStack) -> None:
    """Lock ``folder`` until ``locks`` closes, with a file next to it, or inside it if that is not possible."""
    inner_lock_file, lock_file = folder / LOCK, folder.parent / f".{folder.name}{LOCK}"
    if os.path.ismount(folder):  # the path next to it differs between hosts and containers
        locks.enter_context(_locked(inner_lock_file, folder))
        return
    try:
        locks.enter_context(_locked(lock_file, folder))
    except OSError:  # the folder is writable, but its parent is not
        locks.enter_context(_locked(inner_lock_file, folder))
        return
    if inner_lock_file.exists():
        # left by a killed process, or held by one that cannot write next to the folder
        with _locked(inner_lock_file, folder):
            pass


@contextmanager
def _locked(path: Path, folder: Path) -> Iterator[None]:
    handle = _open_locked(path, folder)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # before the lock is released; a waiting process checks whether the file still exists
        os.close(handle)


def _open_locked(path: Path, folder: Path) -> int:
    """Create and lock the file that locks ``folder``, and write the owner into it. Returns its handle."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            if not _try_lock(handle):
                raise FolderInUseError(
                    f"The checkpoint folder {folder} is in use by another run{_read_owner(handle)}. Two runs in one"
                    " folder would remove each other's checkpoints: wait for that run, stop it, or use another folder."
                )
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), path.stat()):
                    _write_owner(handle)
                    return handle
            os.close(handle)  # the previous owner has removed the file in the meantime
        except BaseException:
            with suppress(OSError):
                os.close(handle)
            raise


def _try_lock(handle: int) -> bool:
    if sys.platform == "win32":
        return True
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        warn(
            f"This file system has no locks ({error.strerror}): nothing prevents two runs from using one checkpoint"
            " folder.",
        )
    return True


def _write_owner(handle: int) -> None:
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    with suppress(OSError):  # the lock holds even if the disk is full
        os.truncate(handle, 0)
        os.write(handle, json.dumps(owner).encode())


def _read_owner(handle: int) -> str:
    try:
        owner = json.loads(os.read(handle, 4096))
        return f" (process {owner['pid']} on {owner['host']}, since {owner['since']})"
    except (OSError, ValueError, KeyError, TypeError):  # the owner has not written it yet
        return ""


def _remove_empty(folders: list[Path]) -> None:
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()
