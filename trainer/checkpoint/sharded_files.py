"""How a sharded checkpoint, which is a folder, reaches the disk, and how one knows that it is whole. Imports no torch.

Its files are written into a folder beside the place that it is meant for. Then comes ``manifest.json``, the last file:
one object with the time, the name, the bytes and the SHA-256 of each other file, and a SHA-256 of itself. Then the
folder is renamed. A folder cannot take another's place in one step: the old one is moved aside before, and removed
after. Who is killed between these two leaves both beside the place, whole; :func:`recover` puts the newer one there.
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
from trainer.errors import CheckpointError
from trainer.files import sync_folder

MANIFEST = "manifest.json"
"""The name of the file that has the sums of the others."""

STATE = "state.ckpt"
"""The name of the file that has all but the tensors."""

_REMOVED = f"-removed{PART}"
"""The end of the names of what is being removed."""

_THREADS = 4  # hashing leaves the interpreter to the others


def part_of(place: Path, end: str = PART) -> Path:
    """A new name beside ``place``, short however long that one's is."""
    return place.parent / f".{os.getpid()}-{secrets.token_hex(6)}{end}"


def seal(part: Path, name: str, files: Mapping[str, tuple[int, str]], facts: Mapping[str, Any]) -> Manifest:
    """Write the manifest of the folder ``part``, whose other files are written, and bring it to the disk.

    Args:
        part: the folder.
        name: what it is going to be called.
        files: by name, the bytes and the SHA-256 that were written.
        facts: more for the manifest; plain values.

    Raises:
        OSError: it cannot be written, or a file is not there, or not of that size.
    """
    for file, (size, _) in files.items():
        found = (part / file).stat().st_size  # of another process, perhaps on another machine
        if found != size:
            raise OSError(f"{part / file} has {found:,} bytes, and was written with {size:,}")
    said = {"format": FORMAT, "saved_at": time.time(), "name": name, **facts}
    said["files"] = {file: list(files[file]) for file in sorted(files)}
    text = f'{json.dumps(said)[:-1]}, "sha256": "'
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    with (part / MANIFEST).open("xb") as stream:
        stream.write(f'{text}{sha256}"}}'.encode())
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(part)
    return _manifest(said, sha256)


def put(part: Path, place: Path) -> None:
    """Have the sealed folder ``part`` be ``place``, where an older checkpoint may be.

    Raises:
        OSError: it cannot be renamed.
    """
    aside = None
    if os.path.lexists(place):
        aside = part_of(place)
        place.rename(aside)
    try:
        part.rename(place)
    except OSError:
        if aside is not None:
            aside.rename(place)
        raise
    sync_folder(place.parent)
    if aside is not None:
        discard(aside)


def refuse_other(place: Path) -> None:
    """Raise where ``place`` is a folder with files, and none of a checkpoint among them: it would be removed.

    Raises:
        IsADirectoryError: it is.
    """
    if place.is_dir() and not place.is_symlink():
        names = {one.name for one in place.iterdir()}
        if names and not names & {MANIFEST, STATE, ".metadata"}:
            raise IsADirectoryError(errno.EISDIR, "it is a folder, and no checkpoint", str(place))


@contextmanager
def aside(place: Path) -> Iterator[None]:
    """Where ``place`` is a folder, have it out of the way of a file; put it back if the ``with`` block raises.

    Raises:
        IsADirectoryError: it is no checkpoint.
    """
    if place.is_symlink() or not place.is_dir():
        yield
        return
    refuse_other(place)
    older = part_of(place)
    place.rename(older)
    try:
        yield
    except BaseException:
        older.rename(place)
        raise
    discard(older)


def remove(folder: Path) -> None:
    """Remove a checkpoint that is a folder: at once for who looks for it by its name."""
    older = part_of(folder, _REMOVED)
    folder.rename(older)
    discard(older)


def discard(part: Path) -> None:
    """Remove what has no other name, as far as that is possible. The manifest first: without it, it is nothing."""
    with suppress(OSError):
        if part.is_symlink() or not part.is_dir():
            part.unlink()
            return
        (part / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(part)


def recover(folder: Path) -> list[Path]:
    """Put those folders into their places that were written to their end, and not renamed because a kill came between.

    Of several for one place the newest; none that was being removed. Nobody may be writing into ``folder``. Returns the
    places.
    """
    found = []
    for part in folder.glob(f".*{PART}"):
        with suppress(CheckpointError, OSError):
            if not part.name.endswith(_REMOVED) and not part.is_symlink() and part.is_dir():
                found.append((read_manifest(part), part))
    recovered = []
    for manifest, part in sorted(found, key=lambda one: one[0].saved_at, reverse=True):
        name = str(manifest.facts.get("name", ""))
        place = folder / name
        if name and name == Path(name).name and not name.startswith(".") and not os.path.lexists(place):
            with suppress(OSError):
                part.rename(place)
                recovered.append(place)
    return recovered


def read_manifest(folder: Path) -> Manifest:
    """What the folder says of itself; that it is what was written is a matter of :func:`verify`.

    Raises:
        CheckpointError: it has no manifest, or not one that was written.
        OSError: it cannot be read.
    """
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is no checkpoint, or was not written to its end: a folder without {MANIFEST}. Expected one that"
            " CheckpointFiles(sharded=True) has written."
        ) from None
    except UnicodeDecodeError:
        text = ""
    try:
        said = json.loads(text)
        sha256 = str(said.pop("sha256"))
        if hashlib.sha256(text.removesuffix(f'{sha256}"}}').encode()).hexdigest() != sha256:
            raise ValueError
        return _manifest(said, sha256)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{folder} is damaged: its {MANIFEST} is not what was written.") from None


def _manifest(said: dict[str, Any], sha256: str) -> Manifest:
    files = {str(name): (int(size), str(digest)) for name, (size, digest) in said.pop("files").items()}
    if any(name != Path(name).name or name in ("", ".", "..") for name in files):
        raise ValueError
    size = sum(size for size, _ in files.values())
    facts = {name: value for name, value in said.items() if name not in ("format", "saved_at")}
    return Manifest(float(said["saved_at"]), size, sha256, facts, files)


def verify(folder: Path, part: int = 0, parts: int = 1) -> Manifest:
    """See whether a folder is what was written. Reads all files, or this one of several parts of them.

    Raises:
        CheckpointError: a file is missing, cut short or longer, or a bit is another one; or it cannot be read.
    """
    try:
        manifest = read_manifest(folder)
        mine = sorted(manifest.files.items(), key=lambda file: file[1])[part::parts]  # by size
        with ThreadPoolExecutor(_THREADS, "verify") as threads:
            for problem in threads.map(lambda file: _problem(folder / file[0], *file[1]), mine):
                if problem:
                    raise CheckpointError(f"{folder} is damaged: {problem}")
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}.") from error
    return manifest


def _problem(path: Path, size: int, sha256: str) -> str:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return f"{path.name} is missing."
    if not stat.S_ISREG(found.st_mode):
        return f"{path.name} is no file."
    if found.st_size != size:
        return f"{path.name} has {found.st_size:,} bytes, and was written with {size:,}."
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256")
    if digest.hexdigest() != sha256:
        return f"the bytes of {path.name} are not those that were written (SHA-256)."
    return ""
