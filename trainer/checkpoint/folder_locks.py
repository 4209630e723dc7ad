"""A checkpoint folder belongs to one run at a time.

Who holds it is said in a file beside the folder, which the system locks: so it is free as soon as that process is gone,
however it went. The lock is the process's own (``lockf``) and not the open file's (``flock``): what it forks, such as a
dataloader's workers, does not hold on to it. It is a file's and not the folder's own, because over NFS only those of
files are seen by other hosts.
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

from trainer.checkpoint.files import make_folder, remove_leftovers
from trainer.errors import CheckpointWriteError, FolderInUseError, warn

if sys.platform != "win32":
    import fcntl

LOCK = ".in-use.lock"
"""The end of the lock's name, behind the folder's; the whole of it where it has to lie in the folder."""

_holds: dict[tuple[int, Path], int] = {}  # by process, because a forked one inherits this, but no lock


@contextmanager
def held(folder: str | Path) -> Iterator[None]:
    """Have ``folder`` for this process alone: it is made, what killed saves left in it is removed, nobody else gets it.

    Afterwards there is nothing in it that was not saved there, and no folder that was made for nothing. The process may
    hold a folder several times at once: a run inside of a run is no other run.

    Raises:
        FolderInUseError: another process has it.
        CheckpointWriteError: it cannot be made, or written to.
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
    made: list[Path] = []
    with ExitStack() as locks:
        try:
            made = make_folder(folder)
            locks.callback(_remove_empty, made)
            _lock(folder, locks)
            with TemporaryFile(dir=folder):  # so that it is known now, and not at the first save
                pass
        except OSError as error:
            raise CheckpointWriteError(
                f"The checkpoint folder {folder} cannot be written to: {error.strerror or error}. Expected one that"
                " exists, or that can be made: choose another, with ModelCheckpoint(dirpath=...), or see to its"
                " permissions.",
                error.errno,
            ) from error
        _holds[key] = 1
        locks.callback(_holds.pop, key)
        remove_leftovers(folder)
        yield


def owner(folder: str | Path) -> str:
    """What the lock of ``folder`` says of the run that holds it; "" where there is none.

    Two hosts that read the same have the same folder.
    """
    folder = Path(os.path.realpath(folder))
    for file in (folder.parent / f".{folder.name}{LOCK}", folder / LOCK):
        with suppress(OSError):
            return file.read_text()
    return ""


def _lock(folder: Path, locks: ExitStack) -> None:
    """Lock ``folder`` until ``locks`` closes, by a file beside it; by one in it where there can be none."""
    inside, beside = folder / LOCK, folder.parent / f".{folder.name}{LOCK}"
    if os.path.ismount(folder):  # beside it is another place on every host, and in every container
        locks.enter_context(_locked(inside, folder))
        return
    try:
        locks.enter_context(_locked(beside, folder))
    except OSError:  # one may write into the folder, and not beside it
        locks.enter_context(_locked(inside, folder))
        return
    if inside.exists():
        with _locked(inside, folder):  # of a process that was killed, or of one that may not write beside it
            pass


@contextmanager
def _locked(path: Path, folder: Path) -> Iterator[None]:
    handle = _open_locked(path, folder)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # while it is locked: who waits for it looks again
        os.close(handle)


def _open_locked(path: Path, folder: Path) -> int:
    """Make the file that locks ``folder``, lock it, and write into it who does. Returns its handle."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            if not _try_lock(handle):
                raise FolderInUseError(
                    f"The checkpoint folder {folder} is in use by another run{_owner(handle)}. Two runs in one"
                    " folder would remove each other's checkpoints: wait for it or stop it, or choose another folder."
                )
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), path.stat()):
                    _sign(handle)
                    return handle
            os.close(handle)  # whoever had it has removed it meanwhile
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
            f"This file system has no locks ({error.strerror}): nothing keeps two runs out of one checkpoint folder.",
        )
    return True


def _sign(handle: int) -> None:
    who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    with suppress(OSError):  # on a full disk it is locked all the same
        os.truncate(handle, 0)
        os.write(handle, json.dumps(who).encode())


def _owner(handle: int) -> str:
    try:
        who = json.loads(os.read(handle, 4096))
        return f" (process {who['pid']} on {who['host']}, since {who['since']})"
    except (OSError, ValueError, KeyError, TypeError):  # it is about to write it
        return ""


def _remove_empty(folders: list[Path]) -> None:
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()
