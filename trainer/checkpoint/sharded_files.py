"""Write sharded checkpoints, which are folders, to disk, and verify that they are complete. Does not import torch.

The files are written into a temporary folder next to the final place. The last file is ``manifest.json``: an object
with the time, the folder's name, the size and SHA-256 of every other file, and a SHA-256 of the manifest itself. Then
the folder is renamed. A folder cannot replace another in one step, so the old one is first moved aside, and removed
afterwards. If the process is killed in between, both complete folders are left next to the final place; :func:`recover`
then renames the newer one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainer.checkpoint.manifest import FORMAT, PART, Manifest
from trainer.common.files import sync_folder
from trainer.errors import CheckpointError

MANIFEST = "manifest.json"
"""Name of the file with the hashes of the other files."""

STATE = "state.ckpt"
"""Name of the file with everything except the tensors."""

_REMOVED = f"-removed{PART}"
"""Suffix of the names of folders that are being removed."""

_THREADS = 4  # hashing releases the GIL


def temporary_path(place: Path, end: str = PART) -> Path:
    """Return a new temporary path next to ``place``, with a short name."""
    return place.parent / f".{os.getpid()}-{secrets.token_hex(6)}{end}"


def seal(temporary: Path, name: str, files: Mapping[str, tuple[int, str]], facts: Mapping[str, Any]) -> None:
    """Write the manifest of the folder ``temporary`` after its other files, and flush it to disk.

    Args:
        temporary: the folder.
        name: its final name.
        files: size and SHA-256 of each file as written, by name.
        facts: additional plain values for the manifest.

    Raises:
        OSError: if the manifest cannot be written, or a file is missing or has another size.
    """
    for file, (size, _) in files.items():
        written = (temporary / file).stat().st_size  # written by another process, possibly on another machine
        if written != size:
            raise OSError(f"{temporary / file} has {written:,} bytes, and was written with {size:,}")
    header = {"format": FORMAT, "saved_at": time.time(), "name": name, **facts}
    header["files"] = {file: list(files[file]) for file in sorted(files)}
    text = f'{json.dumps(header)[:-1]}, "sha256": "'
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    with (temporary / MANIFEST).open("xb") as stream:
        stream.write(f'{text}{sha256}"}}'.encode())
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(temporary)


def move_into_place(temporary: Path, place: Path) -> None:
    """Rename the sealed folder ``temporary`` to ``place``, and replace an older checkpoint there.

    Raises:
        OSError: if it cannot be renamed.
    """
    with moved_aside(place):
        temporary.rename(place)
        sync_folder(place.parent)


def check_replaceable(place: Path) -> None:
    """Raise if ``place`` is a folder with files that are not a checkpoint, because it would be removed.

    Raises:
        IsADirectoryError: if ``place`` is such a folder.
    """
    if place.is_dir() and not place.is_symlink():
        names = {file.name for file in place.iterdir()}
        if names and not names & {MANIFEST, STATE, ".metadata"}:
            raise IsADirectoryError(errno.EISDIR, "it is a folder, but not a checkpoint", str(place))


@contextmanager
def moved_aside(place: Path) -> Iterator[None]:
    """Move an existing file or folder aside. After the ``with`` block it is removed.

    If the block raises before it has replaced the file or folder, it is restored.

    Raises:
        IsADirectoryError: if it is a folder, but not a checkpoint.
    """
    if not os.path.lexists(place):
        yield
        return
    check_replaceable(place)
    older = temporary_path(place)
    place.rename(older)
    try:
        yield
    except BaseException:
        if not os.path.lexists(place):
            older.rename(place)
        raise
    discard(older)


def remove(folder: Path) -> None:
    """Remove a checkpoint folder. Its name disappears immediately."""
    older = temporary_path(folder, _REMOVED)
    folder.rename(older)
    discard(older)


def discard(temporary: Path) -> None:
    """Remove a temporary file or folder if possible. The manifest is removed first, which invalidates a folder."""
    with suppress(OSError):
        if temporary.is_symlink() or not temporary.is_dir():
            temporary.unlink()
            return
        (temporary / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(temporary)


def recover(folder: Path) -> None:
    """Rename complete folders in ``folder`` that a killed process has not renamed.

    If there are several for one place, the newest is used. Folders that were being removed are ignored. No process may
    be writing into ``folder``.
    """
    complete = []
    for temporary in folder.glob(f".*{PART}"):
        with suppress(CheckpointError, OSError):
            if not temporary.name.endswith(_REMOVED) and not temporary.is_symlink() and temporary.is_dir():
                complete.append((read_manifest(temporary), temporary))
    for manifest, temporary in sorted(complete, key=lambda pair: pair[0].saved_at, reverse=True):
        name = str(manifest.facts.get("name", ""))
        place = folder / name
        if name and name == Path(name).name and not name.startswith(".") and not os.path.lexists(place):
            with suppress(OSError):
                temporary.rename(place)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder. :func:`verify` checks the files against it.

    Raises:
        CheckpointError: if the folder has no manifest, or a damaged one.
        OSError: if it cannot be read.
    """
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is not a checkpoint, or is incomplete: it has no {MANIFEST}. Expected a folder that"
            " CheckpointFiles(sharded=True) has written, or the path of a checkpoint file."
        ) from None
    except UnicodeDecodeError:
        text = ""
    try:
        header = json.loads(text)
        sha256 = str(header.pop("sha256"))
        if hashlib.sha256(text.removesuffix(f'{sha256}"}}').encode()).hexdigest() != sha256:
            raise ValueError
        return _manifest(header, sha256)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{folder} is damaged: its {MANIFEST} was changed.") from None


def _manifest(header: dict[str, Any], sha256: str) -> Manifest:
    files = {str(name): (int(size), str(digest)) for name, (size, digest) in header.pop("files").items()}
    if any(name != Path(name).name or name in ("", ".", "..") for name in files):
        raise ValueError
    size = sum(size for size, _ in files.values())
    facts = {name: value for name, value in header.items() if name not in ("format", "saved_at")}
    return Manifest(float(header["saved_at"]), size, sha256, facts, files)


def verify(folder: Path, reader: int = 0, readers: int = 1) -> Manifest:
    """Verify that a folder is unchanged since it was written. Reads all files, or the share of one of several readers.

    Args:
        folder: the folder.
        reader: number of this reader, which reads a share of the files. Default: 0.
        readers: number of readers. Default: 1.

    Raises:
        CheckpointError: if a file is missing or changed, or cannot be read.
    """
    try:
        manifest = read_manifest(folder)
        part_files = sorted(manifest.files.items(), key=lambda file: file[1])[reader::readers]  # sorted by size
        with ThreadPoolExecutor(_THREADS, "verify") as threads:
            for problem in threads.map(lambda file: _problem(folder / file[0], *file[1]), part_files):
                if problem:
                    raise CheckpointError(f"{folder} is damaged: {problem}")
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}.") from error
    return manifest


def _problem(path: Path, size: int, sha256: str) -> str:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return f"{path.name} is missing."
    if not stat.S_ISREG(status.st_mode):
        return f"{path.name} is not a file."
    if status.st_size != size:
        return f"{path.name} has {status.st_size:,} bytes, and was written with {size:,}."
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256")
    if digest.hexdigest() != sha256:
        return f"the bytes of {path.name} are not those that were written (SHA-256)."
    return ""
