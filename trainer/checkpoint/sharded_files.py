"""Write sharded checkpoints, which are folders, to disk, and verify that they are complete. Does not import torch.

The files are written into a temporary folder next to the final place. The last file is ``manifest.json``: an object
with the time, the folder's name, the size and SHA-256 of every other file, and a SHA-256 of the manifest itself. Then
the folder is renamed. A folder cannot replace another in one step, so the old one is first moved aside, and removed
afterwards. If the process is killed in between, both complete folders are left next to the final place; :func:`recover`
then renames the newer one.

An object storage (``s3://...``) has no renaming. There, the files are in a subfolder with a new name, and the manifest,
which contains this name, is written last, in one step. So the folder is the old checkpoint until it is the new one.
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
from trainer.common.files import local_path, sync_folder
from trainer.errors import CheckpointError

MANIFEST = "manifest.json"
"""Name of the file with the hashes of the other files."""

STATE = "state.ckpt"
"""Name of the file with everything except the tensors."""

_REMOVED = f"-removed{PART}"
"""Suffix of the names of folders that are being removed."""

_SUBFOLDER = "subfolder"
"""The manifest's key for the name of the subfolder with the files. Only in remote checkpoints, and copies of them."""

_PREFIX = "files-"
"""Prefix of the names of subfolders."""

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
    with (temporary / MANIFEST).open("xb") as stream:
        stream.write(_text_of(files, {"name": name, **facts}))
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(temporary)


def _text_of(files: Mapping[str, tuple[int, str]], facts: Mapping[str, Any]) -> bytes:
    header = {"format": FORMAT, "saved_at": time.time(), **facts}
    header["files"] = {file: list(files[file]) for file in sorted(files)}
    text = f'{json.dumps(header)[:-1]}, "sha256": "'
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return f'{text}{sha256}"}}'.encode()


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


def read_manifest(folder: str | Path) -> Manifest:
    """Return the manifest of a folder, a path or a URL. :func:`verify` checks the files against it.

    Raises:
        CheckpointError: if the folder has no manifest, or a damaged one.
        OSError: if it cannot be read.
    """
    try:
        text = read_bytes(folder, MANIFEST).decode()
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
    if any(name != Path(name).name or name in ("", ".", "..") for name in [*files, header.get(_SUBFOLDER, STATE)]):
        raise ValueError
    size = sum(size for size, _ in files.values())
    facts = {name: value for name, value in header.items() if name not in ("format", "saved_at")}
    return Manifest(float(header["saved_at"]), size, sha256, facts, files)


def verify(folder: str | Path, reader: int = 0, readers: int = 1) -> Manifest:
    """Verify that a folder is unchanged since it was written. Reads all files, or the share of one of several readers.

    Of a remote folder, only the manifest and the sizes of the files are verified.

    Args:
        folder: the folder, a path or a URL.
        reader: number of this reader, which reads a share of the files. Default: 0.
        readers: number of readers. Default: 1.

    Raises:
        CheckpointError: if a file is missing or changed, or cannot be read.
    """
    try:
        manifest = read_manifest(folder)
        files = folder_of_files(folder, manifest)
        if not isinstance(files, Path):
            _check_sizes(files, manifest.files)
            return manifest
        part_files = sorted(manifest.files.items(), key=lambda file: file[1])[reader::readers]  # sorted by size
        with ThreadPoolExecutor(_THREADS, "verify") as threads:
            for problem in threads.map(lambda file: _problem(files / file[0], *file[1]), part_files):
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


# --- remote checkpoints -----------------------------------------------------------------------------------------------


def folder_at(path: str | Path) -> str | Path | None:
    """Return the path or the URL of the folder at ``path``. None for a file, and for an address of the web."""
    if (local := local_path(path)) is not None:
        return local if local.is_dir() else None
    if str(path).startswith("http"):
        return None
    system, place = _located(path)
    return str(path).rstrip("/") if system.isdir(place) else None


def remote_subfolder(url: str) -> str:
    """Return the URL of a new subfolder, for the files of a checkpoint at ``url``.

    Raises:
        OSError: if there is a file, or a folder that is not a checkpoint.
    """
    system, place = _located(url)
    if system.isfile(place) or any(name != MANIFEST and not name.startswith(_PREFIX) for name in _sizes(url)):
        raise FileExistsError(errno.EEXIST, "it exists and is not a sharded checkpoint", url)
    return f"{url}/{_PREFIX}{secrets.token_hex(6)}"


def seal_remote(url: str, subfolder: str, files: Mapping[str, tuple[int, str]], facts: Mapping[str, Any]) -> None:
    """Write the manifest of a remote checkpoint after its other files, and remove the files of an older one.

    Args:
        url: the URL of the checkpoint.
        subfolder: the result of :func:`remote_subfolder`.
        files: size and SHA-256 of each file as written, by name.
        facts: additional plain values for the manifest.

    Raises:
        CheckpointError: if a file is missing or has another size.
    """
    system, place = _located(url)
    name = subfolder.rpartition("/")[2]
    _check_sizes(subfolder, files)
    with system.transaction:  # a temporary file and a move, on file systems with transactions
        system.pipe_file(f"{place}/{MANIFEST}", _text_of(files, {_SUBFOLDER: name, **facts}))
    for other in _sizes(url).keys() - {name, MANIFEST}:
        discard_remote(f"{url}/{other}")


def remove_remote(url: str) -> None:
    """Remove a remote checkpoint, the manifest first."""
    system, place = _located(url)
    with suppress(FileNotFoundError):
        system.rm_file(f"{place}/{MANIFEST}")
    with suppress(FileNotFoundError):  # an empty folder of an object storage
        system.rm(place, recursive=True)


def discard_remote(url: str) -> None:
    """Remove a remote folder if possible."""
    system, place = _located(url)
    with suppress(OSError):
        system.rm(place, recursive=True)


def folder_of_files(folder: str | Path, manifest: Manifest) -> str | Path:
    """Return the folder of a checkpoint's files: the checkpoint, or its subfolder."""
    subfolder = manifest.facts.get(_SUBFOLDER)
    if subfolder is None:
        return folder
    return folder / subfolder if isinstance(folder, Path) else f"{folder}/{subfolder}"


def read_bytes(folder: str | Path, name: str) -> bytes:
    """Return the contents of a file in a folder, a path or a URL."""
    if isinstance(folder, Path):
        return (folder / name).read_bytes()
    system, place = _located(folder)
    return bytes(system.cat_file(f"{place}/{name}"))


def _located(path: str | Path) -> tuple[Any, str]:
    from fsspec.core import url_to_fs  # type: ignore[import-untyped] # here, because it takes 0.1 s

    system, place = url_to_fs(str(path))
    system.invalidate_cache()  # of listings: another process may have written files
    return system, place.rstrip("/")


def _sizes(url: str) -> dict[str, int]:
    """Return the sizes of files and folders in a folder, by name; {} if it does not exist."""
    system, place = _located(url)
    with suppress(FileNotFoundError):
        sizes = {entry["name"].rstrip("/"): int(entry["size"]) for entry in system.ls(place, detail=True)}
        sizes.pop(place, None)  # some programs store an empty file for a folder
        return {name.rpartition("/")[2]: size for name, size in sizes.items()}
    return {}


def _check_sizes(url: str, files: Mapping[str, tuple[int, str]]) -> None:
    """Raise a CheckpointError if a file is missing or has another size."""
    stored = _sizes(url)
    for name, (size, _) in files.items():
        if stored.get(name) != size:
            raise CheckpointError(
                f"{url} is damaged: {name} has {stored.get(name, 0):,} bytes, and was written with {size:,}."
            )
