"""Files that are written whole or not at all. Imports no torch."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, *, part: str = ".part", durable: bool = False) -> Iterator[BinaryIO]:
    """Open a file that takes the place of ``path`` when the ``with`` block ends.

    It is written beside ``path`` and renamed. So at any instant there is the old file or the new one under that name,
    and never a part of one; if the block raises, the old one stays.

    Args:
        path: in a folder that is there.
        part: the end of the name under which it is written.
        durable: bring the file, and the renaming, to the disk (``fsync``) before returning.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = path.parent / f".{os.getpid()}-{secrets.token_hex(6)}{part}"  # short, however long the name is
    try:
        with unfinished.open("xb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)
        if durable:
            sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file so that its readers see all of it, or what was there before. Its folder is made.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(text.encode())


def sync_folder(folder: Path) -> None:
    """Bring what was made or renamed in ``folder`` to the disk, where the file system can be told to."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def from_here(path: Path) -> Path:
    """``path`` from the working directory on, where it lies in there: shorter, and still good to paste."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
