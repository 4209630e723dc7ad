"""How a checkpoint reaches the disk, and how one knows that it is whole.

A checkpoint is one file, a zip archive as ``torch.save`` writes it. The archive's comment is its manifest: a line of
JSON with the archive's length, the time, and a SHA-256 of the archive and of the manifest itself. Readers of zip
archives pass over a comment; it moves with the file, and is written last: a file that has one was written to its end.
What somebody writes in another form (``torch.save`` replaced, by one that encrypts for example) gets no manifest, and
is given to its reader unchecked.

A file is written beside the place it is meant for, brought to the disk, and renamed. So whatever happens, at any
instant, under a checkpoint's name is the old file or the new one, and never a part of one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from trainer.checkpoint import sharded_files
from trainer.checkpoint.manifest import FORMAT, PART, Manifest
from trainer.errors import CheckpointError, CheckpointWriteError, warn
from trainer.files import replacing, sync_folder

EXTENSION = ".ckpt"
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What the system says when there is no room: on the disk, in a quota, under a limit on the size of files."""

_CHUNK = 1 << 20
_END = b"PK\x05\x06"  # opens the last record of a zip archive, 22 bytes with a comment's length at the end
_END_SIZE = 22
_START = b"PK\x03\x04"  # opens a zip archive


class Summed:
    """A stream that counts and hashes what passes by.

    An error of the file below is kept, and the rest is only counted: so writers that cannot bear an exception come to
    their end, and it is known how much room would have been needed.

    Args:
        file: what takes the bytes.

    Attributes:
        size: the number of bytes taken.
        hash: their SHA-256.
        error: of the file below.
    """

    def __init__(self, file: Any) -> None:
        self.file = file
        self.size = 0
        self.hash = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Take bytes."""
        view = memoryview(data).cast("B")
        self.hash.update(view)
        self.size += len(view)
        self._put(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing: the file is flushed when it is whole."""

    def tell(self) -> int:
        """The number of bytes taken."""
        return self.size

    def _put(self, data: Any) -> None:
        if self.error is None:
            try:
                self.file.write(data)
            except OSError as error:
                self.error = error


class Sealing(Summed):
    """A stream to save an archive into, that ends it with a manifest.

    What is no zip archive without a comment goes to the file as it is.

    Args:
        file: what takes the bytes. Its error is for `seal`.
        facts: go into the manifest; plain values.
    """

    def __init__(self, file: Any, facts: Mapping[str, Any] | None = None) -> None:
        super().__init__(file)
        self._facts = dict(facts or {})
        self._start = self._end = b""  # of what was written

    def write(self, data: Any) -> int:
        """Take bytes."""
        taken, view = super().write(data), memoryview(data).cast("B")
        if len(self._start) < len(_START):
            self._start = (self._start + bytes(view[: len(_START)]))[: len(_START)]
        self._end = (self._end + bytes(view[-_END_SIZE:]))[-_END_SIZE:]
        return taken

    def seal(self) -> Manifest | None:
        """Write the manifest. None for what is no zip archive without a comment.

        Raises:
            OSError: the file below could not take everything.
        """
        is_ended = len(self._end) == _END_SIZE and self._end.startswith(_END) and self._end.endswith(b"\0\0")
        manifest = self._seal() if is_ended and self._start == _START else None
        if self.error is not None:
            raise self.error
        return manifest

    def _seal(self) -> Manifest:
        said = {"format": FORMAT, "bytes": self.size, "saved_at": time.time(), **self._facts}
        text = f'{json.dumps(said)[:-1]}, "sha256": "'.encode()
        self.hash.update(text)
        sha256 = self.hash.hexdigest()
        comment = text + f'{sha256}"}}'.encode()
        if self.error is None:
            self.file.seek(-2, os.SEEK_CUR)  # the last record ends with the length of a comment that was not there yet
        self._put(struct.pack("<H", len(comment)) + comment)
        self.size += len(comment)
        return Manifest(said["saved_at"], said["bytes"], sha256, self._facts)


def write(
    save: Callable[[BinaryIO], None], path: str | Path, facts: Mapping[str, Any] | None = None
) -> Manifest | None:
    """Write a checkpoint file, in the place of an older checkpoint or not at all. Returns its manifest, if it has one.

    Args:
        save: writes into the stream it is given, from start to end: a zip archive, as ``torch.save`` does, which gets a
            manifest, or anything else, which gets none.
        path: where the file is to be. Folders on the way are made.
        facts: more for the manifest; plain values.

    Raises:
        CheckpointWriteError: the file system did not take it. What was there is there still.
    """
    path = Path(path)
    stream: Sealing | None = None
    try:
        make_folder(path.parent)
        with sharded_files.aside(path), replacing(path, part=PART, durable=True) as file:
            stream = Sealing(file, facts)
            save(stream)  # type: ignore[arg-type]  # as much of a BinaryIO as writers need
            return stream.seal()
    except CheckpointError:
        raise
    except OSError as error:
        raise cannot_write(path, error, 0 if stream is None else stream.size) from error


def make_folder(folder: Path) -> list[Path]:
    """Make a folder and those above it that are missing. Returns those it made, the innermost first.

    Raises:
        OSError: it cannot be made.
    """
    missing = []
    above = folder
    while not above.exists():
        missing.append(above)
        above = above.parent
    folder.mkdir(parents=True, exist_ok=True)  # says what is wrong where it is a file
    for made in missing:
        sync_folder(made.parent)
    return missing


def read_manifest(path: str | Path) -> Manifest | None:
    """What the file or folder says of itself, without a look at whether that is so; None for a file without a manifest.

    Raises:
        CheckpointError: there is no end to the file, or something behind it, or a manifest that cannot be read.
        OSError: the file cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        return sharded_files.read_manifest(path)
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            raise CheckpointError(f"{path} is damaged: it is empty.")
        file.seek(-min(size, _END_SIZE + 0xFFFF), os.SEEK_END)
        tail = file.read()
    try:
        return _parse(path, size, tail)
    except CheckpointError:
        if _is_archive(path):
            raise
        return None  # of another form, in which bytes may mean anything


def _parse(path: Path, size: int, tail: bytes) -> Manifest | None:
    """The manifest in the ``tail`` of an archive; None for an archive without a comment."""
    place = tail.rfind(_END)
    if place < 0 or len(tail) < place + _END_SIZE:
        raise CheckpointError(f"{path} is damaged: it has no end. It was cut short after {size:,} bytes.")
    comment = tail[place + _END_SIZE :]
    length = int.from_bytes(tail[place + _END_SIZE - 2 : place + _END_SIZE], "little")
    if length == 0:
        return None  # though something may follow, such as a signature
    if len(comment) < length:
        raise CheckpointError(f"{path} is damaged: it was cut short, by {length - len(comment):,} bytes at its end.")
    if len(comment) > length:
        raise CheckpointError(f"{path} is damaged: {len(comment) - length:,} bytes follow its end.")
    try:
        said = json.loads(comment)
        del said["format"]
        manifest = Manifest(float(said.pop("saved_at")), int(said.pop("bytes")), str(said.pop("sha256")), said)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{path} is damaged: its manifest cannot be read.") from None
    if manifest.size + length != size:
        raise CheckpointError(
            f"{path} is damaged: it has {size - length:,} bytes, and was written with {manifest.size:,}."
        )
    return manifest


def verify(path: str | Path) -> bool:
    """See whether a checkpoint is what was written. Reads all of it.

    The checksums of the archive's members are what there is to check in an archive without a manifest. In what is no
    zip archive, such as a file of torch before 1.6 or an encrypted one, there is nothing: returns False.

    Raises:
        CheckpointError: it was cut short, or something was appended, or a bit is another one; or it cannot be read.
    """
    path = Path(path)
    try:
        if path.is_dir():
            sharded_files.verify(path)
            return True
        manifest = read_manifest(path)
        if manifest is not None:
            _check_hash(path, manifest)
        elif _is_archive(path):
            _check_members(path)
        else:
            return False
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    return True


def newest_good(
    folders: Iterable[str | Path], read: Callable[[Path], object] | None = None, beside: Iterable[Path] = ()
) -> Path | None:
    """The newest checkpoint in ``folders``, or ``beside`` them, that a training can go on from; None for none.

    Newest by its manifest, or by the file's time where it has none. A damaged one is named in a warning and passed
    over.

    Args:
        folders: where to look.
        read: reads a file in which there is nothing to check, or raises a CheckpointError. None trusts such files.
        beside: files that are there.
    """
    for path in in_order(folders, beside):
        try:
            manifest = read_manifest(path)
            if manifest is not None and not manifest.resumable:
                continue
            if not verify(path) and read is not None:
                read(path)
        except (CheckpointError, OSError) as error:
            warn(f"{error} It is passed over for the next older checkpoint.")
            continue
        return path
    return None


def in_order(folders: Iterable[str | Path], beside: Iterable[Path] = ()) -> list[Path]:
    """The checkpoints in ``folders`` and ``beside``, newest first, but for hidden ones; one with several names once."""
    times = {path.resolve(): _saved_at(path) for path in beside}
    for folder in dict.fromkeys(Path(folder) for folder in folders):
        for path in sorted(folder.glob(f"*{EXTENSION}")) if folder.is_dir() else ():
            target = path.resolve()
            if not path.name.startswith(".") and target.exists() and target not in times:
                times[target] = _saved_at(target)
    return sorted(times, key=times.__getitem__, reverse=True)


def remove_leftovers(folder: str | Path) -> list[Path]:
    """Remove what killed saves have left in ``folder``, where nobody may be writing. Returns what it removed.

    What lacks nothing but its name gets that.
    """
    sharded_files.recover(Path(folder))
    removed = []
    for path in Path(folder).glob(f".*{PART}"):
        sharded_files.discard(path)
        if not os.path.lexists(path):
            removed.append(path)
    return removed


def _check_hash(path: Path, manifest: Manifest) -> None:
    digest, left = hashlib.sha256(), manifest.size - 2
    with path.open("rb", buffering=0) as file:
        while left > 0 and (chunk := file.read(min(left, _CHUNK))):
            digest.update(chunk)
            left -= len(chunk)
        file.seek(manifest.size)
        comment = file.read()
    digest.update(b"\0\0")  # the comment's length when there was none yet
    end = f'{manifest.sha256}"}}'.encode()
    digest.update(comment.removesuffix(end))
    if not comment.endswith(end) or digest.hexdigest() != manifest.sha256:
        raise CheckpointError(f"{path} is damaged: its bytes are not those that were written (SHA-256).")


def _check_members(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except OSError:
        raise
    except Exception as error:  # a damaged archive breaks the reader in any way
        raise CheckpointError(f"{path} is damaged: it cannot be read as a zip archive ({error}).") from error
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: the bytes of {damaged} are not those that were written (CRC-32).")


def _is_archive(path: Path) -> bool:
    """Whether the file begins as a zip archive, or as a part of one."""
    with path.open("rb") as file:
        return _START.startswith(file.read(len(_START)))


def _saved_at(path: Path) -> float:
    with suppress(CheckpointError, OSError):
        if (manifest := read_manifest(path)) is not None:
            return manifest.saved_at
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def cannot_write(path: Path, error: OSError, needed: int) -> CheckpointWriteError:
    """Why a checkpoint of that many bytes is not at ``path``, and what to do."""
    what = f"The checkpoint {path} was not written: {error.strerror or error}."
    if error.errno in FULL:
        with suppress(OSError):
            what += f" It takes {needed:,} bytes, and there are {shutil.disk_usage(path.parent).free:,} bytes free."
        what += (
            " What was there before under that name is as it was. Make room, or save less often or fewer of them"
            " (ModelCheckpoint(every_n_epochs, save_top_k)); or have the training go on without, by"
            " Trainer(plugins=CheckpointFiles(when_full='continue'))."
        )
    else:
        what += " Expected a place that can be written to: choose another folder, or see to its permissions."
    return CheckpointWriteError(what, error.errno)
