"""Write files atomically. Imports no torch."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, *, part: str = ".part", durable: bool = False) -> Iterator[BinaryIO]:
    """Open a file that replaces ``path`` when the ``with`` block ends.

    The new file is written next to ``path`` and then renamed, so ``path`` is always the complete old file or the
    complete new file. If the block raises, the old file stays.

    Args:
        path: the file, in an existing folder.
        part: suffix of the temporary file.
        durable: whether to flush the file and the renaming to the disk (``fsync``) before returning. Default: False.

    Raises:
        OSError: if it cannot be written.
    """
    unfinished = path.parent / f".{os.getpid()}-{secrets.token_hex(6)}{part}"  # short, for any length of `path.name`
    try:
        with unfinished.open("x+b") as file:
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
    """Write a text file atomically, and create its folder.

    Raises:
        OSError: if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(text.encode())


def sync_folder(folder: Path) -> None:
    """Flush new and renamed entries of ``folder`` to the disk, if the file system supports it."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def from_here(path: Path) -> Path:
    """Return ``path`` relative to the working directory if it lies in that directory, otherwise unchanged."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def local_path(path: str | Path) -> Path | None:
    """Return ``path`` in the local file system. None for a remote path."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped] # here, because it takes 0.1 s
    from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

    file_system, place = url_to_fs(str(path))
    return Path(place) if isinstance(file_system, LocalFileSystem) else None
